"""Settings, architecture, and the first weights of a drafter."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dspec_lab.checkpoints.layout import write_checkpoint
from dspec_lab.core.files import read_json
from dspec_lab.models.protocol import Taps
from dspec_lab.training.build import architecture, frequent_tokens, new_drafter, spread_layers, trainable
from dspec_lab.training.target_reader import TargetReader
from dspec_lab.training.train_config import DRAFTERS, TrainConfig, default_config, read_config
from dspec_lab.training.warm_start import start_from, warm_start


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_settings_survive_json_and_yaml(drafter, tmp_path):
    config = default_config(drafter, learning_rate=2e-4, target_layer_ids=[0, 3])
    for name in ("c.json", "c.yaml"):
        (tmp_path / name).write_text(json.dumps(config.to_dict()))
        assert read_config(tmp_path / name, drafter) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nosuch": 1}, "nosuch"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 2.5}, "steps"),
        ({"learning_rate": 0}, "learning_rate must lie in"),
        ({"learning_rate": float("nan")}, "learning_rate must be a number"),
        ({"markov_head_type": "lstm"}, "'lstm'"),
        ({"features": "ram"}, "'ram'"),
        ({"first_slots": 9}, "first_slots 9"),
        ({"sequences_per_step": 5, "accumulate": 2}, "sequences_per_step 5"),
        ({"loss_ce": 0.0, "loss_l1": 0.0}, "must not both be 0"),
        ({"minutes": -1.0}, "minutes must lie in"),
        ({"trained_part": "head"}, "trained_part must be all or confidence, got 'head'"),
        ({"trained_part": "confidence", "loss_confidence": 0.0}, "trained_part confidence needs"),
        ({"start_from": 3}, "start_from"),
        ({"precision": "fp16"}, "precision must be fp32 or bf16, got 'fp16'"),
    ],
)
def test_bad_settings_are_named(changes, words):
    with pytest.raises((ValueError, TypeError), match=words.replace("(", r"\(")):
        default_config("dspark", **changes)


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("drafter: dflash\n")
    with pytest.raises(ValueError, match="'dflash', not 'dspark'"):
        read_config(path, "dspark")
    path.write_text("steps: 4\nwarmup: 3\n")
    with pytest.raises(ValueError, match="c.yaml.*warmup"):
        read_config(path, "dspark")
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="settings by name"):
        read_config(path, "dspark")
    with pytest.raises(ValueError, match="dflash has neither"):
        TrainConfig(drafter="dflash")


def test_schedule_warms_up_and_decays():
    config = default_config("dspark", learning_rate=1e-3, warmup_share=0.1, final_lr_share=0.1)
    rates = [config.rate_at(i / 100) for i in range(101)]
    assert rates[0] < 2e-5 and max(rates) == pytest.approx(1e-3) and rates.index(max(rates)) == 10
    assert rates[5] == pytest.approx(5e-4) and rates[-1] == pytest.approx(1e-4)
    assert all(later <= earlier for earlier, later in zip(rates[10:], rates[11:], strict=False))
    assert config.slots_at(0.39) == 3 and config.slots_at(0.4) is None
    assert config.anchors_at(0.0) == 64 and config.anchors_at(1.0) == 32


def test_layers_are_spread_as_in_the_paper():
    assert spread_layers(36) == (1, 9, 17, 25, 33)
    assert spread_layers(30) == (1, 7, 14, 21, 27) or spread_layers(30)[-1] == 27
    assert spread_layers(4) == (0, 1, 2)


def test_kept_tokens_are_the_most_frequent(tiny_target, tiny_config):
    counts = np.zeros(89, dtype=np.int64)
    counts[[70, 5, 33]] = [9, 7, 7]
    assert frequent_tokens(counts, 4).tolist() == [70, 5, 33, 0]
    config = tiny_config("dspark", draft_vocab_size=3)
    model = new_drafter(architecture(config, tiny_target, counts), tiny_target, counts, seed=0)
    assert model.target_ids_W.tolist() == [5, 33, 70]
    assert model.arch.mask_token_id == 0


@torch.no_grad()
def tapped(target, layers, ids):
    reader = TargetReader(target, layers)
    return target.session(capacity=64, taps=reader.taps).extend(ids).features.tapped_NF.clone()


def test_the_copied_layer_sees_the_targets_own_keys_and_values(tiny_target, tiny_config):
    config = tiny_config("dspark", num_layers=1, target_layer_ids=(0, 1, 2))
    counts = np.arange(89)
    model = new_drafter(architecture(config, tiny_target, counts), tiny_target, counts, seed=0)
    warm_start(model, tiny_target)
    ids = list(range(5, 17))
    features = tapped(tiny_target, (0, 1, 2), ids)
    keys, values = model.layers[0].self_attn.project_context(model.context(features)[None])
    last = tiny_target.weights.layers[3]
    stream = features[:, 64:]  # output of layer 2
    normed = torch.nn.functional.rms_norm(stream, (32,), last.norm_in, 1e-5)
    qkv = normed @ last.qkv.T
    torch.testing.assert_close(keys[0].flatten(1), qkv[:, 32:48], rtol=0, atol=1e-5)
    torch.testing.assert_close(values[0].flatten(1), qkv[:, 48:], rtol=0, atol=1e-5)
    assert torch.equal(model.norm.weight, tiny_target.weights.norm)


@pytest.mark.parametrize("drafter", ["dspark", "dflash", "eagle3", "mtp"])
def test_copies_are_not_the_targets_tensors(drafter, tiny_target, tiny_config):
    counts = np.arange(89)
    model = new_drafter(architecture(tiny_config(drafter), tiny_target, counts), tiny_target, counts, seed=0)
    warm_start(model, tiny_target)
    assert torch.equal(model.layers[-1].mlp.down_proj.weight, tiny_target.weights.layers[3].down)
    held = {tensor.data_ptr() for layer in tiny_target.weights.layers for tensor in (layer.down, layer.qkv, layer.out)}
    assert not held & {parameter.data_ptr() for parameter in model.parameters()}
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in trainable(model))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_run_can_go_on_from_a_checkpoint(drafter, tiny_target, tiny_folder, tiny_config, tmp_path):
    counts = np.arange(89)
    arch = architecture(tiny_config(drafter, draft_vocab_size=40), tiny_target, counts)
    old = new_drafter(arch, tiny_target, counts, seed=1)
    if drafter == "dspark":
        torch.nn.init.normal_(old.markov_head.markov_w2.weight)
    write_checkpoint(tmp_path / "old", old, read_json(tiny_folder / "config.json"), dtype=torch.float32)
    # other counts: the checkpoint's own draft vocabulary must win
    model = new_drafter(arch, tiny_target, counts[::-1].copy(), seed=2)
    start_from(model, tmp_path / "old", tiny_target)
    for name, parameter in old.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name
    assert torch.equal(model.target_ids_W, old.target_ids_W)
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(model.head_logits(hidden), old.head_logits(hidden), rtol=0, atol=0)


def test_another_shape_cannot_be_gone_on_from(tiny_target, tiny_folder, tiny_config, tmp_path):
    counts = np.arange(89)
    old = new_drafter(architecture(tiny_config("dspark"), tiny_target, counts), tiny_target, counts, seed=1)
    write_checkpoint(tmp_path / "old", old, read_json(tiny_folder / "config.json"), dtype=torch.float32)
    arch = architecture(tiny_config("dspark", markov_rank=5), tiny_target, counts)
    model = new_drafter(arch, tiny_target, counts, seed=2)
    with pytest.raises(ValueError, match="differs in markov_rank"):
        start_from(model, tmp_path / "old", tiny_target)
    with pytest.raises(FileNotFoundError, match="is no checkpoint"):
        start_from(model, tmp_path / "none", tiny_target)


def test_only_the_confidence_head_moves_if_asked(tiny_target, tiny_config):
    counts = np.arange(89)
    model = new_drafter(architecture(tiny_config("dspark"), tiny_target, counts), tiny_target, counts, seed=0)
    assert set(trainable(model, "confidence")) == {n for n, _ in model.named_parameters() if "confidence_head" in n}


def test_same_seed_same_weights(tiny_target, tiny_config):
    counts = np.arange(89)

    def drawn(seed):
        arch = architecture(tiny_config("dspark"), tiny_target, counts)
        return torch.cat([p.flatten() for p in new_drafter(arch, tiny_target, counts, seed).parameters()])

    assert torch.equal(drawn(3), drawn(3)) and not torch.equal(drawn(3), drawn(4))


def test_mtp_starts_with_the_targets_stream(tiny_target, tiny_config):
    """The final norm is undone though one of its weights is negative, so the stream's direction and size come back."""
    counts = np.arange(89)
    norm = tiny_target.weights.norm.clone()
    try:
        tiny_target.weights.norm[3] = -0.7
        model = new_drafter(architecture(tiny_config("mtp"), tiny_target, counts), tiny_target, counts, seed=0)
        warm_start(model, tiny_target)
        with torch.no_grad():
            rows = tiny_target.session(capacity=64, taps=Taps(layers=(2,), last_hidden=True)).extend(list(range(9, 29)))
            entered = model.hnorm(rows.features.last_ND)
            # the stream after the last layer, whose size is close to that before it
            last = rows.features.last_ND / tiny_target.weights.norm
        cosine = torch.nn.functional.cosine_similarity(entered, last)
        assert cosine.min() > 0.999
        size = entered.square().mean(-1).sqrt().median() / rows.features.tapped_NF.square().mean(-1).sqrt().median()
        assert 0.4 < size < 2.5
    finally:
        tiny_target.weights.norm.copy_(norm)
