"""Targets against the reference vectors: hidden states by layer id, logits, context features, greedy continuation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dspec_lab.config import DecodeConfig
from dspec_lab.kernels.rows import native_status
from dspec_lab.models.load import load_target
from dspec_lab.models.protocol import Taps, Target
from dspec_lab.verifier.decode import generate

VECTORS = Path(__file__).parent / "vectors"
REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
FAMILIES = ("llama", "qwen3", "gemma4")
ABSENT = pytest.mark.skipif(
    not REFERENCE.is_dir(), reason="the full reference set is not at shared/reference beside the repository"
)
IMPLS = ("native", "torch", "hf")
CASES = [pytest.param((VECTORS / "target_gemma4", impl), id=f"small-gemma4-{impl}") for impl in IMPLS]
CASES += [
    pytest.param((REFERENCE / f"target_{family}", impl), id=f"{family}-{impl}", marks=ABSENT)
    for family in FAMILIES
    for impl in IMPLS
]


@pytest.fixture(scope="module")
def targets():
    """Targets by folder and implementation, each loaded once."""
    loaded: dict[tuple[Path, str], Target] = {}

    def target(folder: Path, impl: str) -> Target:
        if impl == "native" and not native_status()[0]:
            pytest.skip(native_status()[1])
        if (folder, impl) not in loaded:
            loaded[folder, impl] = load_target(folder / "checkpoint", "fp32", impl=impl)
        return loaded[folder, impl]

    return target


@pytest.fixture(params=CASES)
def case(request, targets):
    """(folder, target) of one reference model through one implementation."""
    folder, impl = request.param
    target = targets(folder, impl)
    assert type(target).__name__ == ("HFTarget" if impl == "hf" else "LeanDecoder")
    return folder, target


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "target.safetensors")


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def rows_of(target: Target, ids: list[int], taps: Taps):
    return target.session(capacity=len(ids), taps=taps).extend(ids)


def test_hidden_states_by_layer_id_and_logits(case, assert_near):
    folder, target = case
    expected = tensors(folder)
    layers = tuple(sorted(int(name.split(".")[-1]) for name in expected if name.startswith("out.layer.")))
    assert layers == tuple(range(-1, target.num_layers - 1))
    for row, ids in enumerate(expected["in.input_ids"].tolist()):
        rows = rows_of(target, ids, Taps(layers=layers, last_hidden=True))
        assert_near(rows.logits_JV, expected["out.logits"][row])
        assert_near(rows.features.last_ND, expected["out.last_hidden_state"][row])
        for layer, tapped in zip(layers, rows.features.tapped_NF.split(target.hidden_size, -1), strict=True):
            assert_near(tapped, expected[f"out.layer.{layer}"][row])


def test_context_features(case, assert_near):
    folder, target = case
    expected = tensors(folder)
    for index, layers in enumerate(manifest(folder)["context_feature_sets"]):
        for row, ids in enumerate(expected["in.input_ids"].tolist()):
            rows = rows_of(target, ids, Taps(layers=tuple(layers)))
            assert_near(rows.features.tapped_NF, expected[f"out.context.{index}"][row])
            assert rows.features.last_ND is None


def test_the_last_layer_is_refused(case):
    folder, target = case
    last = manifest(folder)["num_layers"] - 1
    with pytest.raises(ValueError, match=f"layer id {last} is out of range"):
        target.session(capacity=4, taps=Taps(layers=(0, last)))


def test_greedy_continuation(case):
    folder, target = case
    prompt = tensors(folder)["in.input_ids"][0].tolist()
    expected = manifest(folder)["greedy_continuation_of_row_0"]
    config = DecodeConfig(max_new_tokens=len(expected), ignore_eos=True)
    assert generate(target, None, prompt, config).token_ids == expected
    assert target.eos_ids == {2}
