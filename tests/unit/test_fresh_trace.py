"""Traces of fresh prompts: a batch's rounds are those of single requests; no prompt of the training data is used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspec_lab.bench.fresh_trace import compact, fresh_prompts, fresh_rows, main
from dspec_lab.calibration.records import read_rounds
from dspec_lab.config import DecodeConfig
from dspec_lab.models.load import load_tokenizer
from dspec_lab.training.responses import Response, write_responses
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS, tiny_decoder
from dspec_lab.verifier.trace import trace_rows, write_trace

TIMES = ("draft_s", "verify_s", "overhead_s")
TARGET = tiny_decoder(7, seed=1)
DSPARK = NEURAL_DRAFTERS["dspark"](TARGET)
PROMPTS = {"a/0": ("chat", [1, 2]), "a/1": ("chat", [3, 1, 4, 1]), "b/0": ("code", [5])}


def without_times(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in TIMES}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_of_a_batch_are_those_of_single_requests(temperature, tmp_path):
    config = DecodeConfig(gamma=3, max_new_tokens=12, temperature=temperature, ignore_eos=True)
    found = list(fresh_rows(TARGET, DSPARK, PROMPTS, config, batch=2))
    alone = []
    for name, (domain, ids) in PROMPTS.items():
        run = generate(TARGET, DSPARK, ids, config, request_id=name, trace=True)
        alone += trace_rows(
            run, request_id=name, prompt_id=name, domain=domain, drafter=DSPARK.name, temperature=temperature
        )
    assert [without_times(row) for row in found] == [without_times(row) for row in alone]
    assert any(row["num_accepted"] for row in found) and any(row["num_accepted"] < row["gamma"] for row in found)
    rounds = read_rounds([write_trace(tmp_path / "t.parquet", map(compact, found))])
    assert rounds.domains == ("chat", "code") and len(rounds) == len(found) and rounds.has_confidence
    for short, row in zip(map(compact, found), found, strict=True):
        assert all(abs(a - b) <= 5e-5 for a, b in zip(short["confidence"], row["confidence"], strict=True))


def answered(ids: list[int]) -> Response:
    """One answer to this prompt."""
    prompt, answer = np.array(ids, dtype=np.int32), np.array([1, 2], dtype=np.int32)
    return Response(domain="chat", source="own", temperature=0.0, prompt_ids=prompt, response_ids=answer)


@pytest.mark.model
def test_prompts_of_training_responses_are_left_out(default_model_dir: Path, tmp_path: Path):
    args = (["chat"], 8, 5, TARGET, load_tokenizer(default_model_dir))
    every = fresh_prompts(*args)
    assert len(every) == 8 and {domain for domain, _ in every.values()} == {"chat"}
    names = list(every)
    held = [answered(every[name][1]) for name in names[:3]]
    file = write_responses(tmp_path / "seen.parquet", held, 49152)
    assert list(fresh_prompts(*args, without=[file])) == names[3:]
    everything = [answered(ids) for _, ids in every.values()]
    with pytest.raises(ValueError, match="every prompt of chat with seed 5"):
        fresh_prompts(*args, without=[write_responses(file, everything, 49152)])


@pytest.mark.model
def test_prompts_that_do_not_fit_are_left_out_and_said(default_model_dir: Path, capsys):
    args = (["chat"], 8, 5, TARGET, load_tokenizer(default_model_dir))
    every = fresh_prompts(*args)
    longest = sorted(len(ids) for _, ids in every.values())[3]
    short = fresh_prompts(*args, longest=longest)
    assert 4 <= len(short) < 8 and all(len(ids) <= longest for _, ids in short.values())
    assert f"{8 - len(short)} prompts of more than {longest} tokens" in capsys.readouterr().err
    with pytest.raises(ValueError, match="8 with more than 1 tokens"):
        fresh_prompts(*args, longest=1)


def test_the_command_ends_its_run_without_the_prompts_that_do_not_fit(tmp_path: Path, monkeypatch, capsys):
    asked = [SimpleNamespace(source="chat", domain="chat", turns=ids) for ids in ([1, 2], [3, 1, 4, 1], [5])]
    monkeypatch.setattr("dspec_lab.models.load.load_target", lambda *args: TARGET)
    monkeypatch.setattr("dspec_lab.models.load.load_tokenizer", lambda name: None)
    monkeypatch.setattr("dspec_lab.evaluation.drafters.build_drafters", lambda names, target: {"dspark": DSPARK})
    monkeypatch.setattr("dspec_lab.training.prompts.sources.gather", lambda *args: asked)
    monkeypatch.setattr("dspec_lab.verifier.decode.encode_chat", lambda tokenizer, turns: turns)
    out, new = tmp_path / "t.parquet", TARGET.max_context - 3
    command = [str(out), "--gamma", "3", "--threads", str(torch.get_num_threads()), "--max-new-tokens"]
    assert main([*command, str(new)]) == 0
    told = capsys.readouterr()
    assert "1 prompts of more than 3 tokens are left out" in told.err and "rounds of 2 prompts" in told.out
    assert len(read_rounds([out])) > 0
    with pytest.raises(SystemExit):
        main([*command, str(TARGET.max_context)])
    assert "leave no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x.csv"], "give a .parquet file"), (["nowhere/x.parquet"], "a folder that exists"),
        (["x.parquet", "--source", "poems"], "unknown prompt source 'poems'"),
        (["x.parquet", "--count", "0"], "count must be at least 1"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named_before_a_model_is_loaded(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and said in capsys.readouterr().err
