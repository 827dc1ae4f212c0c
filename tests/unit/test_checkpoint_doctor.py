"""The checkpoint doctor: a sound checkpoint has no findings, and each planted fault is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspec_lab.checkpoints.doctor import scan_checkpoint
from dspec_lab.checkpoints.layout import build_model, write_checkpoint
from dspec_lab.checkpoints.probe import probe_drafter, target_text
from dspec_lab.cli.main import main
from dspec_lab.drafters.architecture import BlockArchitecture, ChainArchitecture
from dspec_lab.models.family import model_spec
from dspec_lab.models.protocol import Features, Taps, TargetRows

VECTORS = Path(__file__).parents[1] / "parity" / "vectors"
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_theta": 10000.0,
}


@pytest.fixture
def sound(tmp_path):
    arch = BlockArchitecture(
        spec=model_spec(LLAMA),
        target_hidden_size=16,
        num_target_layers=6,
        target_layer_ids=(0, 2, 4),
        block_size=4,
        mask_token_id=3,
        markov_rank=4,
        markov_head_type="vanilla",
        confidence_head=True,
        confidence_with_markov=True,
        draft_vocab_size=12,
    )
    torch.manual_seed(0)
    model = build_model(arch)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.keep_tokens(torch.arange(12) * 3 + 1)
    return write_checkpoint(tmp_path / "sound", model.requires_grad_(False), LLAMA)


def change_fields(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    config = {name: value for name, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_sound_checkpoint_has_no_findings(sound):
    assert scan_checkpoint(sound, {**LLAMA, "num_hidden_layers": 6}) == []


@pytest.mark.parametrize("name", ["dspark_gemma4_vanilla_conf", "eagle3_qwen3_bias"])
def test_reference_checkpoints_have_at_most_the_flag_missing(name):
    findings = scan_checkpoint(VECTORS / name / "checkpoint")
    # DeepSpec has no such field
    assert [f.code for f in findings] == (["anchor_flag_missing"] if name.startswith("dspark") else [])


@pytest.mark.parametrize(
    ("changes", "code", "severity"),
    [
        ({"sample_from_anchor": "absent"}, "anchor_flag_missing", "warning"),
        ({"sample_from_anchor": False}, "anchor_flag_false", "warning"),
        ({"query_zero_predicts_next": False}, "anchor_flag", "error"),
        ({"dspark_config": {"sample_from_anchor": False}}, "anchor_flag", "error"),
        ({"target_layer_ids": [0, 2, 5], "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "layer_ids_last", "error"),
        ({"target_layer_ids": [0, 2, 9], "eagle_aux_hidden_state_layer_ids": [1, 3, 10]}, "layer_ids_range", "error"),
        ({"target_layer_ids": [2, 0, 4], "eagle_aux_hidden_state_layer_ids": [3, 1, 5]}, "layer_ids_order", "error"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "layer_ids_shifted", "error"),
        ({"target_layer_ids": "absent"}, "layer_ids", "error"),
        ({"block_size": 0}, "block_size", "error"),
        ({"mask_token_id": 40}, "mask_token_id", "error"),
        ({"architectures": ["Qwen3DSparkModel"]}, "architecture", "error"),
        ({"markov_rank": 5}, "tensors", "error"),
        ({"markov_head_type": "lstm"}, "config", "error"),
        ({"dflash_config": {"markov_rank": 3}}, "config", "error"),
    ],
)
def test_faults_in_fields(sound, changes, code, severity):
    change_fields(sound, **changes)
    findings = scan_checkpoint(sound)
    assert [(f.code, f.severity) for f in findings if f.code == code], findings
    assert findings == sorted(findings, key=lambda f: f.severity != "error")


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, make):
    def change(tensors):
        tensors[name] = make(tensors[name])

    return change


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (put("norm.weight", torch.ones_like), "constant_norm", "norm.weight"),
        (put("hidden_norm.weight", lambda t: torch.full_like(t, 0.5)), "constant_norm", "hidden_norm.weight"),
        (put("fc.weight", torch.zeros_like), "zero", "fc.weight"),
        (put("fc.weight", lambda t: t * float("nan")), "not_finite", "fc.weight"),
        (
            lambda tensors: tensors["layers.0.mlp.up_proj.weight"].copy_(tensors["layers.0.mlp.gate_proj.weight"]),
            "duplicate",
            "layers.0.mlp.up_proj.weight",
        ),
        (drop("markov_head.markov_w2.weight"), "tensors", "model.safetensors"),
        (put("d2t", lambda t: t + 8), "vocabulary_map", "d2t"),  # leaves the vocabulary
        (put("d2t", lambda t: t - torch.arange(12)), "vocabulary_map", "t2d"),  # another map than t2d
        (put("d2t", lambda t: -torch.arange(12)), "vocabulary_map", "d2t"),  # all on token 0
        (put("d2t", lambda t: t[:-1]), "vocabulary_map", "d2t"),
        (drop("d2t"), "vocabulary_map", "d2t"),
    ],
)
def test_faults_in_tensors(sound, change, code, where):
    change_tensors(sound, change)
    found = [(f.code, f.where) for f in scan_checkpoint(sound) if f.severity == "error"]
    assert (code, where) in found, found


def test_another_target_is_named(sound):
    found = scan_checkpoint(sound, {**LLAMA, "num_hidden_layers": 8, "vocab_size": 41})
    assert {(f.code, f.where) for f in found} == {("other_target", "num_target_layers"), ("other_target", "vocab_size")}


class RolledTarget:
    """A target whose next token is a fixed permutation, and whose layer i holds the token one-hot, rolled by i."""

    name, vocab_size, num_layers, hidden_size, max_context = "rolled", 16, 6, 16, 256
    eos_ids, dtype, device = frozenset(), torch.float32, torch.device("cpu")

    def __init__(self):
        # two closed walks of eight tokens each
        self.next_id = torch.tensor([3, 0, 6, 5, 1, 7, 4, 2, 11, 8, 14, 13, 9, 15, 12, 10])

    def embedding(self):
        return torch.eye(16)

    def head(self):
        return torch.eye(16)

    def session(self, *, capacity, taps=None):
        return RolledSession(self, taps or Taps())


class RolledSession:
    def __init__(self, target, taps):
        self.target, self.taps, self.length = target, taps, 0

    def extend(self, token_ids, *, logit_rows=None):
        ids = torch.tensor(token_ids)
        self.length += len(token_ids)
        rows = torch.eye(16)[ids]
        tapped = torch.cat([rows.roll(layer, dims=-1) for layer in self.taps.layers], -1) if self.taps.layers else None
        logits = torch.eye(16)[self.target.next_id[ids]] * 9.0
        return TargetRows(logits[len(ids) - (logit_rows or len(ids)) :], Features(tapped_NF=tapped))

    def truncate(self, length):
        self.length = length


def chain_on_layer(layer):
    """An EAGLE-3 drafter that turns the feature of `layer` (token i) into token i + 2, with idle draft layers."""
    target = RolledTarget()
    spec = model_spec({**LLAMA, "vocab_size": 16})
    arch = ChainArchitecture(
        kind="eagle3", spec=spec, target_hidden_size=16, num_target_layers=6, target_layer_ids=(layer,), ttt_length=2
    )
    model = build_model(arch).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.zero_()
    two_on = target.next_id[target.next_id]
    for token in range(16):
        # the drafter was made for layer 2
        model.fc.weight[two_on[token], (token + 2) % 16] = 1.0
    model.share(embedding=target.embedding, head=target.head)
    return model, target


@pytest.mark.parametrize(("layer", "shift"), [(2, 0), (3, -1), (1, 1)])
def test_probe_names_layers_that_are_off_by_one(layer, shift):
    model, target = chain_on_layer(layer)
    texts = [target_text(target, [start], 24) for start in range(4)]
    report = probe_drafter(model, target, texts, [1] * len(texts))
    assert report.hits_by_layer_shift[shift] == 1.0
    assert [f.code for f in report.findings] == ([] if shift == 0 else ["layer_ids_off_by_one"])
    if shift:
        assert "[2] fit better" in report.findings[0].message


def test_probe_says_when_nothing_fits():
    model, target = chain_on_layer(2)
    model.fc.weight.zero_()[9] = 1.0  # a token that these texts never hold
    texts = [target_text(target, [start], 24) for start in range(4)]
    report = probe_drafter(model, target, texts, [1] * len(texts))
    assert [f.code for f in report.findings] == ["accepts_nothing"]


def test_probe_names_a_flipped_anchor_flag(e2e_qwen3, tmp_path):
    from dspec_lab.checkpoints.layout import load_drafter
    from dspec_lab.models.decoder import LeanDecoder

    target = LeanDecoder.from_folder(e2e_qwen3 / "target")
    target.eos_ids = frozenset()
    prompts = json.loads((e2e_qwen3 / "manifest.json").read_text())["prompts"]
    texts = [target_text(target, prompt, 30) for prompt in prompts]
    first = [len(prompt) for prompt in prompts]
    shutil.copytree(e2e_qwen3 / "draft_dflash", tmp_path / "d")
    report = probe_drafter(load_drafter(tmp_path / "d", target).model, target, texts, first)
    assert report.findings == () and report.anchors == 90
    change_fields(tmp_path / "d", sample_from_anchor=False)
    (finding,) = probe_drafter(load_drafter(tmp_path / "d", target).model, target, texts, first).findings
    assert finding.code == "anchor_flag_flipped" and "set it to true" in finding.message


@pytest.fixture
def e2e_qwen3():
    folder = Path(__file__).parents[3] / "shared" / "reference" / "e2e_qwen3"
    if not folder.is_dir():
        pytest.skip("needs the fitted drafters of ../shared/reference")
    return folder


# the command


@pytest.fixture
def target_folder(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 6}))
    return str(folder)


def test_the_command_passes_a_sound_checkpoint(sound, target_folder, capsys):
    assert main(["doctor", str(sound), "--target", target_folder, "--no-probe"]) == 0
    assert "no error found" in capsys.readouterr().out


def test_the_command_names_the_faulty_field_and_fails(sound, target_folder, tmp_path, capsys):
    change_fields(sound, target_layer_ids=[0, 4, 2])
    assert main(["doctor", str(sound), "--target", target_folder, "--json", str(tmp_path / "r.json")]) == 1
    assert "target_layer_ids: [0, 4, 2] do not rise strictly" in capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["healthy"] is False and report["first_proposals_right"] is None
    assert "layer_ids_order" in [finding["code"] for finding in report["findings"]]


def test_the_command_refuses_what_is_no_checkpoint_or_no_target(sound, tmp_path, capsys):
    for arguments, named in (
        ([str(tmp_path / "none")], "none"),
        ([str(tmp_path)], "config.json"),
        ([str(sound), "--target", str(tmp_path / "t")], "--target"),
    ):
        assert main(["doctor", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and named in error
