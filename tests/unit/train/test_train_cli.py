"""`dspec train`: what it refuses, what it says before it starts, and a run from prompts to a checkpoint."""

from __future__ import annotations

import json

import pytest

from dspec_lab.cli import main as shell
from dspec_lab.training.responses import read_responses, write_responses


@pytest.fixture
def data(tiny_responses, tmp_path):
    return str(write_responses(tmp_path / "responses.parquet", tiny_responses, 89))


class NoPrompt:
    """Stands for a tokenizer: the tiny responses have no chat template."""

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, return_dict):
        # the last prompt token of the tiny responses differs from row to row, so nothing may be asked of it
        return {"input_ids": [1, 2, 3] if add_generation_prompt else [1, 2]}


def run(*arguments):
    try:
        return shell.main(["train", *arguments])
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["gpt"], "gpt"),
        (["dspark"], "--responses"),
        (["dspark", "--responses", "none.parquet", "--out", "x"], "none.parquet"),
        (["dspark", "--responses", "DATA", "--out", "x", "--set", "stepz=3"], "stepz"),
        (["dspark", "--responses", "DATA", "--out", "x", "--set", "steps"], "NAME=VALUE"),
        (["dspark", "--responses", "DATA", "--out", "x", "--set", "steps=0"], "steps must be at least 1"),
        (["dspark", "--responses", "DATA", "--out", "x", "--minutes", "2", "--steps", "3"], "not allowed with"),
        (["dspark", "--responses", "DATA", "--out", "x", "--config", "none.yaml"], "none.yaml"),
        (["dflash", "--responses", "DATA", "--out", "x", "--set", "markov_rank=4"], "markov_rank 4"),
        (["responses", "--prompts", "poems", "--out", "x.parquet"], "poems"),
        (["responses", "--prompts", "math", "--out", "x.csv"], "x.csv"),
        (["responses", "--prompts", "math", "--out", "x.parquet", "--count", "0"], "count must be at least 1"),
        (["responses", "--prompts", "math", "--out", "x.parquet", "--temperatures", "hot"], "hot"),
        (["responses", "--prompts", "none.jsonl", "--out", "x.parquet"], "none.jsonl"),
        (["responses", "--prompts", "hf:set", "--out", "x.parquet"], "hf:set"),
        (["responses", "--prompts", "math", "--out", "x.parquet", "--target", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, named, data, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*(data if word == "DATA" else word for word in arguments)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and named in error, error


@pytest.fixture
def no_template(monkeypatch):
    """The tiny target's folder has no tokenizer, and its responses no generation prompt."""
    from dspec_lab.models import load
    from dspec_lab.training import data as training_data

    monkeypatch.setattr(load, "load_tokenizer", lambda *_args, **_options: NoPrompt())
    monkeypatch.setattr(training_data, "generation_prompt", lambda _tokenizer: ())


TINY = [
    "--threads", "1", "--steps", "3", "--set", "target_layer_ids=[0, 1, 2]", "--set", "draft_vocab_size=60",
    "--set", "markov_rank=8", "--set", "block_size=4", "--set", "vocab_drawn=null", "--set", "max_tokens=64",
    "--set", "validation_share=0.2",
]  # fmt: skip


def test_estimate_says_sizes_and_trains_nothing(data, tiny_folder, no_template, capsys, tmp_path):
    out, result = tmp_path / "out", tmp_path / "estimate.json"
    arguments = ["dspark", "--responses", data, "--out", str(out), "--target", str(tiny_folder), "--estimate"]
    assert run(*arguments, *TINY, "--cache", str(tmp_path / "cache"), "--json", str(result)) == 0
    said = capsys.readouterr().out
    assert "40 sequences" in said and "GB free" in said and "reading the target" in said
    estimate = json.loads(result.read_text())["estimate"]
    assert estimate["num_sequences"] == 40 and estimate["sequences_used"] == 12
    tokens = sum(len(r.prompt_ids) + len(r.response_ids) for r in read_responses(data))
    assert estimate["features_bytes"] == estimate["missing_bytes"] == tokens * (2 * 4 * 32 + 4 + 32)
    assert not out.exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("rounds", [True, False])
def test_bf16_products_that_the_cpu_lacks_are_said(
    rounds, data, tiny_folder, no_template, capsys, tmp_path, monkeypatch
):
    from types import SimpleNamespace

    from dspec_lab.training import estimate

    monkeypatch.setattr(estimate, "row_ops", lambda *_: SimpleNamespace(rounds=rounds))
    arguments = ["dspark", "--responses", data, "--out", str(tmp_path / "out"), "--target", str(tiny_folder), *TINY]
    arguments += ["--estimate", "--cache", str(tmp_path / "cache")]
    assert run(*arguments, "--set", "precision=bf16") == 0
    assert ("bf16 is slower than fp32" in capsys.readouterr().out) is not rounds
    assert run(*arguments) == 0
    assert "bf16 is slower" not in capsys.readouterr().out


def test_reading_ahead_fills_the_cache_and_trains_nothing(data, tiny_folder, no_template, capsys, tmp_path):
    out, result, cache = tmp_path / "out", tmp_path / "read.json", tmp_path / "cache"
    arguments = ["dspark", "--responses", data, "--out", str(out), "--target", str(tiny_folder), *TINY]
    assert run(*arguments, "--read-ahead", "--cache", str(cache), "--json", str(result)) == 0
    tokens = json.loads(result.read_text())["tokens_read"]
    captured = capsys.readouterr()
    assert tokens > 0 and f"{tokens} tokens read" in captured.out and "step 2: " in captured.err
    assert not out.exists() and list(cache.glob("*/*.safetensors"))
    # nothing is left to read
    assert run(*arguments, "--read-ahead", "--cache", str(cache), "--json", str(result)) == 0
    assert json.loads(result.read_text())["tokens_read"] == 0
    assert run(*arguments, "--read-ahead", "--set", "features=stream") == 2
    assert "'stream'" in capsys.readouterr().err
    assert run(*arguments, "--read-ahead", "--estimate") == 2


def test_a_run_writes_checkpoint_card_and_record(data, tiny_folder, no_template, capsys, tmp_path):
    out, result = tmp_path / "out", tmp_path / "run.json"
    arguments = ["dspark", "--responses", data, "--out", str(out), "--target", str(tiny_folder), *TINY]
    assert run(*arguments, "--cache", str(tmp_path / "cache"), "--json", str(result)) == 0
    captured = capsys.readouterr()
    assert "step 3" in captured.err and "validation, step 3, all: tau at T=1" in captured.err
    made = json.loads(result.read_text())
    assert [entry["step"] for entry in made["history"]] == [0, 3] and made["run"]["settings"]["steps"] == 3
    files = {path.name for path in (out / "checkpoint").iterdir()}
    assert files == {"config.json", "model.safetensors", "README.md", "training.json"}
    card = (out / "checkpoint" / "README.md").read_text()
    assert "3 steps of 4 sequences" in card and "responses.parquet" in card and "| 3 |" in card


def test_a_tensorboard_log_without_the_package_is_said(monkeypatch):
    import sys

    from dspec_lab.training.progress import TensorBoardDisplay

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        TensorBoardDisplay("x")
