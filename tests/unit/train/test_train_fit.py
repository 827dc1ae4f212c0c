"""Training runs on a tiny target: they learn, resume to the bit, and do not depend on how a step is cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspec_lab.checkpoints.drafters import open_drafter
from dspec_lab.config import DecodeConfig
from dspec_lab.drafters.layers import in_bf16
from dspec_lab.training import terms
from dspec_lab.training.fit import STATE, Run, fit
from dspec_lab.training.responses import write_responses
from dspec_lab.training.step import Processes, micro_loss, optimiser_step
from dspec_lab.training.train_config import DRAFTERS
from dspec_lab.verifier.decode import generate


class Watch:
    """A display that keeps what it was told."""

    def __init__(self):
        self.steps, self.validations = [], []

    def on_step(self, report):
        self.steps.append(report)

    def on_validation(self, step, measures):
        self.validations.append((step, measures))

    def on_lengths(self, lengths):
        self.lengths = lengths


@pytest.fixture
def train(tiny_target, tiny_folder, tiny_corpus, tmp_path):
    def run(config, name="run", **options):
        target_config = json.loads((tiny_folder / "config.json").read_text())
        return fit(config, tiny_target, target_config, tiny_corpus(config), tmp_path / name, **options)

    return run


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drafter_learns_and_its_checkpoint_decodes_losslessly(drafter, train, tiny_config, tiny_target):
    watch = Watch()
    # identity heads have furthest to go
    steps = 80 if drafter == "medusa" else 30
    config = tiny_config(drafter, steps=steps, validate_every=steps, save_every=steps, learning_rate=1e-2)
    result = train(config, display=watch)
    assert [step for step, _ in watch.validations] == [0, steps]
    before, after = (measures["all"] for _, measures in watch.validations)
    assert after["tau"] > before["tau"] + 0.02, (before, after)
    assert len(after["accept_rate"]) == config.proposed and all(0 <= rate <= 1 for rate in after["accept_rate"])
    assert len(watch.steps) == steps and watch.steps[-1].progress == 1 and watch.steps[-1].loss == watch.steps[-1].loss
    assert watch.lengths["all"]["rounds"] > 0 and 1 <= watch.lengths["all"]["accepted_length"] <= config.proposed + 1
    assert result.state.history[-1]["on_policy"] == watch.lengths
    drafter_made = open_drafter(result.checkpoint, tiny_target)
    prompt = [5, 9, 30, 41]
    settings = DecodeConfig(gamma=3, max_new_tokens=24)
    plain = generate(tiny_target, None, prompt, settings)
    assert generate(tiny_target, drafter_made, prompt, settings).token_ids == plain.token_ids


def test_validation_prompts_are_never_trained_on(tiny_config, tiny_corpus):
    corpus = tiny_corpus(tiny_config("dspark"))

    def prompts(indices):
        return {corpus.sequences[i].ids_T[: corpus.sequences[i].num_prompt].tobytes() for i in indices}

    assert corpus.validation and not prompts(corpus.training) & prompts(corpus.validation)


def weights(folder: Path):
    return {name: tensor for name, tensor in load_file(folder / STATE).items() if name.startswith("weight.")}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.training.build import tapped_layers
from dspec_lab.training.corpus import Corpus, feature_reader, read_corpus_files
from dspec_lab.training.fit import fit
from dspec_lab.training.train_config import read_config
folder, responses, config_file, out, pause = sys.argv[1:6]
accelerator = None
if len(sys.argv) > 6:
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
config = read_config(config_file)
target = LeanDecoder.from_folder(folder, impl="torch")
sets = read_corpus_files([responses], config, target.vocab_size)
corpus = Corpus(sets, feature_reader(config, target, tapped_layers(config, target)), config, Path(out) / "features")
class Slow:
    def on_step(self, report):
        print("step", report.step, flush=True)
        time.sleep(float(pause))
    def on_validation(self, step, measures):
        pass
    def on_lengths(self, lengths):
        pass
fit(config, target, json.loads((Path(folder) / "config.json").read_text()), corpus, out, display=Slow(),
    accelerator=accelerator)
"""


@pytest.fixture
def outside(tiny_folder, tiny_responses, tmp_path):
    """Starts a training run in a process of its own."""
    responses = write_responses(tmp_path / "responses.parquet", tiny_responses, 89)
    (tmp_path / "run.py").write_text(SCRIPT)

    def start(config, name, *, pause=0.0, extra=(), **variables):
        (tmp_path / f"{name}.json").write_text(json.dumps(config.to_dict()))
        arguments = [str(tmp_path / "run.py"), str(tiny_folder), str(responses), str(tmp_path / f"{name}.json")]
        arguments += [str(tmp_path / name), str(pause), *extra]
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        )

    start.folder = tmp_path
    return start


def finished(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out


def test_a_run_killed_and_resumed_ends_with_the_same_bits(outside, tiny_config):
    config = tiny_config("dspark", steps=14, save_every=4, validate_every=7, features="cache")
    finished(outside(config, "whole"))
    killed = outside(config, "cut", pause=0.2)
    for line in killed.stdout:
        if line.strip() == "step 7":  # three steps past the last save
            os.kill(killed.pid, signal.SIGKILL)
            break
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    out = finished(outside(config, "cut"))
    assert out.split("\n")[0] == "step 5", "the run must go on after its last save"
    whole, cut = weights(outside.folder / "whole"), weights(outside.folder / "cut")
    assert len(whole) > 10 and same(whole, cut)
    checkpoints = [(outside.folder / name / "checkpoint/model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert checkpoints[0] == checkpoints[1]
    histories = [json.loads((outside.folder / n / "history.json").read_text())["history"] for n in ("whole", "cut")]
    measures = [[(entry["step"], entry["measures"]) for entry in history] for history in histories]
    assert measures[0] == measures[1] and [step for step, _ in measures[0]] == [0, 7, 14]


def test_two_processes_do_what_one_does(outside, tiny_config):
    import socket

    config = tiny_config("dspark", steps=5, vocab_drawn=None, validation_share=0.0)
    finished(outside(config, "one"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    both = [
        outside(config, "two", extra=("accelerate",), RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(2)
    ]
    for process in both:
        finished(process)
    one, two = weights(outside.folder / "one"), weights(outside.folder / "two")
    assert one.keys() == two.keys() and len(one) > 10
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=2e-4, msg=name)


def test_resuming_with_other_settings_or_data_is_refused(train, tiny_config):
    train(tiny_config("mtp", steps=2))
    with pytest.raises(ValueError, match="other config: learning_rate was 0.003, is 0.1"):
        train(tiny_config("mtp", steps=2, learning_rate=0.1))


def test_a_finished_run_given_again_does_nothing_more(train, tiny_config):
    config = tiny_config("mtp", steps=3)
    first = train(config)
    watch = Watch()
    again = train(config, display=watch)
    assert watch.steps == [] and again.state.step == 3
    assert same({n: p for n, p in first.model.named_parameters()}, {n: p for n, p in again.model.named_parameters()})


@pytest.mark.parametrize("drafter", ["dspark", "eagle3", "medusa"])
def test_micro_batches_do_not_change_the_step(drafter, tiny_config, tiny_corpus, tiny_target, tmp_path):
    grads = []
    for accumulate in (1, 2):
        config = tiny_config(drafter, accumulate=accumulate, vocab_drawn=None, clip_norm=1e9)
        run = Run(config, tiny_target, {}, tiny_corpus(config), tmp_path, None, None)
        micros = run._micro_batches(0.9)
        assert len(micros) == accumulate
        parameters = list(run.parameters.values())
        optimiser_step(run.model, parameters, run.optimiser, micros, config, 0.0, Processes())
        grads.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
    scale = grads[0].abs().max()
    if drafter == "eagle3":
        # the divisor counts padding, which depends on the cut: compare directions
        grads = [grad / grad.norm() for grad in grads]
        scale = grads[0].abs().max()
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=float(1e-4 * scale))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_bf16_products_train_in_the_same_direction(drafter, tiny_config, tiny_corpus, tiny_target, tmp_path):
    losses, grads = [], []
    for precision in ("fp32", "bf16"):
        config = tiny_config(drafter, precision=precision)
        run = Run(config, tiny_target, {}, tiny_corpus(config), tmp_path, None, None)
        report = micro_loss(run.model, run._micro_batches(0.9)[0], config)
        report.total.backward()
        losses.append(float(report.total.detach()))
        found = {name: parameter.grad for name, parameter in run.parameters.items() if parameter.grad is not None}
        assert all(grad.dtype == torch.float32 for grad in found.values())
        grads.append(torch.cat([grad.flatten() for _, grad in sorted(found.items())]))
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[0] != losses[1]
    assert float(torch.cosine_similarity(*grads, dim=0)) > 0.98
    assert not in_bf16(), "outside of a step nothing is rounded"


def test_bf16_products_are_made_again_as_they_were(tiny_config, tiny_corpus, tiny_target, tmp_path, monkeypatch):
    """Laws beyond the memory limit are computed again in the backward pass, where the step's context is left."""
    grads = []
    for keep_bytes in (2**30, 0):
        monkeypatch.setattr(terms, "KEEP_BYTES", keep_bytes)
        config = tiny_config("eagle3", precision="bf16")
        run = Run(config, tiny_target, {}, tiny_corpus(config), tmp_path, None, None)
        micro_loss(run.model, run._micro_batches(0.9)[0], config).total.backward()
        grads.append(torch.cat([p.grad.flatten() for _, p in sorted(run.parameters.items()) if p.grad is not None]))
    assert torch.equal(*grads)


@pytest.mark.parametrize("through", [True, False])
def test_confidence_loss_reaches_the_backbone_only_when_told(through, tiny_config, tiny_corpus, tiny_target, tmp_path):
    config = tiny_config("dspark", confidence_through_backbone=through, loss_l1=1e-12, loss_ce=0.0)
    run = Run(config, tiny_target, {}, tiny_corpus(config), tmp_path, None, None)
    torch.nn.init.normal_(run.model.confidence_head.proj.weight)
    micro_loss(run.model, run._micro_batches(0.9)[0], config).total.backward()
    moved = float(run.model.layers[0].mlp.down_proj.weight.grad.abs().max())
    assert (moved > 1e-6) == through
    assert float(run.model.confidence_head.proj.weight.grad.abs().max()) > 1e-6


def test_minutes_end_a_run_by_the_clock(train, tiny_config):
    watch = Watch()
    started = time.perf_counter()
    result = train(tiny_config("medusa", minutes=0.05, validate_every=10**6, validation_share=0.0), display=watch)
    took = time.perf_counter() - started
    assert 3.0 <= result.state.seconds <= took and result.state.step == len(watch.steps) > 1
    rates = [report.rate for report in watch.steps]
    assert rates[-1] < max(rates), "the learning rate must follow the clock"


def test_a_loss_that_is_not_finite_stops_the_run(train, tiny_config, monkeypatch):
    from dspec_lab.training import step

    real = step.micro_loss

    def broken(model, micro, config):
        report = real(model, micro, config)
        return type(report)(total=report.total * float("nan"), metrics=report.metrics, weight=report.weight)

    monkeypatch.setattr(step, "micro_loss", broken)
    with pytest.raises(ArithmeticError, match="nan"):
        train(tiny_config("dflash", steps=2))
