"""Targets, dtypes, devices and tokenizers by name: what is taken, and the one line that says why not."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch

from dspec_lab.kernels.rows import native_status
from dspec_lab.models import load
from dspec_lab.models.load import choose_dtype, dtype_name, load_target, load_tokenizer, parse_dtype, plan_target
from dspec_lab.models.model_folder import write_manifest

TINY = Path(__file__).parents[1] / "parity" / "vectors" / "target_gemma4" / "checkpoint"


@pytest.fixture
def folder(tmp_path):
    """A copy of a tiny Gemma 4 model, to be damaged."""
    return Path(shutil.copytree(TINY, tmp_path / "tiny"))


def change_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].update(fields.pop("text_config", {}))
    (folder / "config.json").write_text(json.dumps(config | fields))


# dtypes


def test_dtype_names():
    assert parse_dtype("fp32") == torch.float32 and parse_dtype("fp16", "cpu") == torch.float16
    assert [dtype_name(parse_dtype(name)) for name in ("fp32", "bf16", "fp16")] == ["fp32", "bf16", "fp16"]
    with pytest.raises(ValueError, match="'int8'"):
        parse_dtype("int8")
    with pytest.raises(ValueError, match=r"torch\.float64"):
        dtype_name(torch.float64)


@pytest.mark.parametrize(("compiled", "name"), [(True, "bf16"), (False, "fp32")])
def test_auto_on_a_cpu_follows_the_compiled_ops_and_says_so(monkeypatch, compiled, name):
    monkeypatch.setattr(load, "native_status", lambda: (compiled, "told by the test"))
    choice = choose_dtype("auto", "cpu")
    assert choice.name == name and choice.dtype == parse_dtype(name) and "told by the test" in choice.why
    assert choose_dtype("fp16").why == "as asked"


def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match="'nosuch'"):
        load_target(TINY, device="nosuch")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'cuda'"):
            choose_dtype("auto", "cuda")


# folders


def test_a_folder_the_lean_decoder_knows():
    target = load_target(TINY, "fp32")
    assert type(target).__name__ == "LeanDecoder" and target.dtype == torch.float32 and target.eos_ids == {2}
    assert plan_target(str(TINY)).kind == "lean"
    half = load_target(TINY, torch.float16)
    assert half.dtype == torch.float16 and half.ops.name == "torch"
    assert torch.isfinite(half.session(capacity=4).extend([1, 2, 3]).logits_JV).all()
    if native_status()[0]:
        with pytest.raises(ValueError, match=r"torch\.float16"):
            load_target(TINY, "fp16", impl="native")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (dict(text_config=dict(num_kv_shared_layers=1)), "num_kv_shared_layers"),
        (dict(text_config=dict(hidden_activation="relu")), "'relu'"),
        (dict(quantization_config=dict(quant_method="x")), "quantised"),
    ],
)
def test_what_the_lean_decoder_cannot_run_goes_to_transformers_and_the_plan_says_why(folder, fields, why):
    change_config(folder, **fields)
    plan = plan_target(folder)
    assert plan.kind == "hf" and why in plan.why
    with pytest.raises(ValueError, match=why):
        plan_target(folder, impl="native")


def test_another_family_runs_through_transformers(tmp_path):
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "qwen2")
    target = load_target(tmp_path / "qwen2", "bf16")
    assert type(target).__name__ == "HFTarget" and target.name == "qwen2" and target.dtype == torch.bfloat16
    assert "'qwen2'" in plan_target(tmp_path / "qwen2").why
    lean, theirs = load_target(TINY, "fp32"), load_target(TINY, "fp32", impl="hf")
    ids = [5, 9, 3, 70]
    torch.testing.assert_close(
        lean.session(capacity=4).extend(ids).logits_JV, theirs.session(capacity=4).extend(ids).logits_JV
    )


def test_folders_that_are_no_target_are_named(folder, tmp_path):
    for bad in (tmp_path / "absent", f"{tmp_path}/absent", "./absent"):
        with pytest.raises(FileNotFoundError, match="absent is not a folder"):
            load_target(bad)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty holds no config.json"):
        load_target(tmp_path / "empty")
    change_config(folder, architectures=["Gemma4DSparkModel"])
    with pytest.raises(ValueError, match="Gemma4DSparkModel, which is not a causal language model"):
        load_target(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load_target(folder)


def test_damaged_weights_are_named(folder):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_target(folder)
    with pytest.raises(OSError, match="cannot load .*tiny"):
        load_target(folder, impl="hf")
    weights.write_bytes(b"\0" * 8 + content[8:])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        load_target(folder)
    weights.write_bytes(content)
    write_manifest(folder, {"source": "test"})
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt"):
        load_target(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors file"):
        load_target(folder)


def test_weights_that_are_missing_are_not_made_up(folder):
    from safetensors.torch import load_file, save_file

    weights = folder / "model.safetensors"
    state = load_file(weights)
    lost = next(name for name in sorted(state) if name.endswith("layers.1.mlp.up_proj.weight"))
    del state[lost]
    save_file(state, weights, metadata={"format": "pt"})
    for impl in ("auto", "hf"):
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight"):
            load_target(folder, impl=impl)


# hub names


def test_a_hub_name_that_cannot_be_had_is_one_line_and_quick(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(load, "getproxies", dict)
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    asked = []

    def nowhere(host, *_, **__):
        asked.append(host)
        raise socket.gaierror(-2, "told by the test")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    for call in (load_target, load_tokenizer):
        with pytest.raises(OSError, match="nobody/nothing, neither a local folder nor") as caught:
            call("nobody/nothing")
        assert "\n" not in str(caught.value)
    assert 2 <= len(asked) < 6  # left to itself the hub's client asks six times each, over half a minute
    assert plan_target("nobody/nothing").kind == "hf"
    with pytest.raises(ValueError, match="hub model"):
        load_target("nobody/nothing", impl="native")


def test_no_code_of_a_checkpoint_is_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    change_config(folder, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((OSError, ValueError), match="tiny"):
        load_target(folder)


# tokenizers


def test_a_tokenizer_without_a_chat_template_fails_only_on_a_chat(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from dspec_lab.verifier.decode import encode_chat

    words = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "there": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer("hello there").input_ids == [1, 2]
    with pytest.raises(ValueError, match="chat_template"):
        encode_chat(tokenizer, ["hello"])


def test_a_folder_without_a_tokenizer_is_named():
    with pytest.raises(OSError, match="cannot load a tokenizer from .*checkpoint"):
        load_tokenizer(TINY)


@pytest.mark.model
def test_the_default_model_has_a_short_name(default_model_dir):
    target = load_target(dtype="bf16")
    assert target.name == load_target("smollm2", "bf16").name == default_model_dir.name
    tokenizer = load_tokenizer()
    assert tokenizer.chat_template and len(tokenizer) == target.vocab_size
