"""Our verifier against the reference's records of the accept/reject rule with given random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspec_lab.config import SamplingConfig
from dspec_lab.core.rejection import accept_probs, residual_probs, verify, verify_greedy
from dspec_lab.core.sampling import law
from dspec_lab.core.types import Proposal

HERE = Path(__file__).parent
SMALL = HERE / "vectors" / "verification"
FULL = HERE.parents[2] / "shared" / "reference" / "verification"
TOLERANCE = 1e-6  # the reference's own


def _records(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "manifest.json").read_text()), load_file(folder / "verification.safetensors")


CASES = [
    pytest.param(SMALL, id="small"),
    pytest.param(
        FULL,
        id="full",
        marks=pytest.mark.skipif(not FULL.is_dir(), reason="../shared/reference is not beside the repository"),
    ),
]


class GivenNumbers:
    """A chooser with the record's uniforms; the law of the extra token is kept, its draw does not matter."""

    def __init__(self, uniforms: list[float]) -> None:
        self._uniforms = uniforms
        self.asked: list[int] = []
        self.extra: tuple[str, Tensor] | None = None

    def bernoulli(self, purpose: str, round_index: int, slot: int, prob: float) -> bool:
        assert purpose == "accept"
        self.asked.append(slot)
        return self._uniforms[slot] < prob

    def categorical(self, purpose: str, round_index: int, slot: int, probs_V: Tensor) -> int:
        assert self.extra is None
        self.extra = (purpose, probs_V)
        return int(probs_V.argmax())


def _sampling(temperature: float) -> SamplingConfig:
    return SamplingConfig(temperature=0.0 if temperature < 1e-5 else temperature)


@pytest.mark.parametrize("folder", CASES)
def test_accepted_drafts_and_the_law_of_the_extra_token(folder: Path) -> None:
    manifest, tensors = _records(folder)
    kinds_seen = set()
    for index, kind in enumerate(manifest["kinds"]):
        where = f"record {index} ({kind})"
        gamma = int(tensors["in.k"][index])
        sampling = _sampling(float(tensors["in.temperature"][index]))
        ids = tuple(tensors["in.tokens"][index, 1 : gamma + 1].tolist())
        target_JV = law(tensors["in.target_logits"][index, : gamma + 1], sampling)
        draft_GV = law(tensors["in.draft_logits"][index, :gamma], sampling) if gamma else None
        torch.testing.assert_close(
            target_JV, tensors["out.target_probs"][index, : gamma + 1], rtol=0, atol=TOLERANCE, msg=where
        )
        chooser = GivenNumbers(tensors["in.uniforms"][index].tolist())
        verdict = verify(target_JV, Proposal(ids, draft_probs_GV=draft_GV), chooser, 0)
        mask_G = tensors["out.accept_prefix_mask"][index, :gamma]
        assert verdict.num_accepted == int(mask_G.sum()), where
        # nothing behind the first rejection is asked about
        assert chooser.asked == list(range(min(verdict.num_accepted + 1, gamma))), where
        stop = int(tensors["in.stop_id"][index])
        kept = ids[: verdict.num_accepted]
        cut = kept.index(stop) + 1 if stop in kept else len(kept)
        assert cut == int(tensors["out.accepted"][index]), where
        assert (stop in kept) == bool(tensors["out.stopped_inside_draft"][index]), where
        counted = cut if stop in kept else gamma
        assert counted == int(tensors["out.counted_proposal_length"][index]), where
        purpose, extra_V = chooser.extra  # type: ignore[misc]
        assert purpose == ("bonus" if verdict.num_accepted == gamma else "replacement"), where
        if not bool(tensors["out.stopped_inside_draft"][index]):
            torch.testing.assert_close(
                extra_V / extra_V.sum(), tensors["out.next_distribution"][index], rtol=0, atol=TOLERANCE, msg=where
            )
        kinds_seen.add(kind)
    assert kinds_seen == {"random", "close", "identical", "zero_overlap", "k0", "low_draft_prob", "stop"}


@pytest.mark.parametrize("folder", CASES)
def test_accept_probs(folder: Path) -> None:
    manifest, tensors = _records(folder)
    compared = 0
    for index in range(len(manifest["kinds"])):
        gamma = int(tensors["in.k"][index])
        if gamma == 0:
            continue
        sampling = _sampling(float(tensors["in.temperature"][index]))
        ids_1G = tensors["in.tokens"][index : index + 1, 1 : gamma + 1]
        draft_GV = law(tensors["in.draft_logits"][index, :gamma], sampling)
        target_GV = tensors["out.target_probs"][index, :gamma]
        got_G = accept_probs(target_GV[None], draft_GV[None], ids_1G)[0]
        torch.testing.assert_close(got_G, tensors["out.accept_prob"][index, :gamma], rtol=0, atol=TOLERANCE)
        compared += gamma
    assert compared > 50


@pytest.mark.parametrize("folder", CASES)
def test_residuals_of_free_standing_pairs(folder: Path) -> None:
    _, tensors = _records(folder)
    got_NV = residual_probs(tensors["in.residual.target_probs"], tensors["in.residual.draft_probs"])
    torch.testing.assert_close(got_NV, tensors["out.residual.distribution"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("folder", CASES)
def test_greedy_records_by_the_greedy_rule(folder: Path) -> None:
    """At temperature 0 the records' drafts are greedy or not; the one-hot rule and the greedy rule keep the same."""
    manifest, tensors = _records(folder)
    compared = 0
    for index in range(len(manifest["kinds"])):
        gamma = int(tensors["in.k"][index])
        if float(tensors["in.temperature"][index]) >= 1e-5:
            continue
        logits_JV = tensors["in.target_logits"][index, : gamma + 1]
        proposal = Proposal(tuple(tensors["in.tokens"][index, 1 : gamma + 1].tolist()))
        verdict = verify_greedy(logits_JV, proposal)
        accept_G = tensors["out.accept_prob"][index, :gamma]
        assert verdict.num_accepted == int((accept_G > 0).long().cumprod(0).sum())
        assert verdict.next_token == int(logits_JV[verdict.num_accepted].argmax())
        compared += 1
    assert compared >= 10
