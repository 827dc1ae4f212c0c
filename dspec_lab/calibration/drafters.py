"""Views of a drafter: with calibrated confidences, and with blocks cut where survival becomes unlikely.

Both wrap the drafter, so decoding, evaluation and a batch use them without knowing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from dspec_lab.calibration.calibration import Calibration
from dspec_lab.calibration.records import CALIBRATED_MARK, THRESHOLD_MARK
from dspec_lab.config import SamplingConfig
from dspec_lab.core.streams import DraftDraws
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.protocol import Commit, Drafter, DraftSession
from dspec_lab.models.protocol import Target


class CalibratedDrafter:
    """The drafter with calibrated confidences; tokens and laws are untouched. Applied once: a second time is refused.

    `drafter_hash` is that of the checkpoint in use: where both sides know one it must agree, elsewhere the name.
    """

    def __init__(self, drafter: Drafter, calibration: Calibration, *, drafter_hash: str | None = None) -> None:
        if isinstance(drafter, (CalibratedDrafter, ThresholdDrafter)) or CALIBRATED_MARK in drafter.name:
            raise ValueError(f"{drafter.name} is calibrated or cut already: calibrate once, before any threshold")
        refuse_other_drafter(calibration, drafter.name, drafter_hash)
        self.inner, self.calibration = drafter, calibration
        self.name = f"{drafter.name}{CALIBRATED_MARK}"
        self.taps = drafter.taps
        self.max_gamma: int | None = min(drafter.max_gamma or calibration.gamma, calibration.gamma)

    def start(self, target: Target, *, capacity: int) -> ViewedSession:
        """A session of the drafter, seen through the calibration."""
        return ViewedSession(self.inner.start(target, capacity=capacity), self._calibrated)

    def _calibrated(self, proposal: Proposal) -> Proposal:
        raw_1G = np.array([_confidences(proposal)])
        entropy_1G = _entropies(proposal)[None] if self.calibration.reads_entropy else None
        return replace(proposal, confidence_G=tuple(self.calibration.confidences(raw_1G, entropy_1G)[0].tolist()))


def refuse_other_drafter(calibration: Calibration, name: str, drafter_hash: str | None = None) -> None:
    """Raise `ValueError` unless the calibration was fitted for this drafter: by weights if known, else by name."""
    origin = calibration.provenance
    if drafter_hash is not None and origin.drafter_hash is not None:
        if drafter_hash != origin.drafter_hash:
            raise ValueError(
                f"the calibration was fitted for other weights than those of {name!r} "
                f"(sha256 {origin.drafter_hash[:12]}, here {drafter_hash[:12]})"
            )
    elif name != origin.drafter:
        raise ValueError(f"the calibration was fitted for the drafter {origin.drafter!r}, not for {name!r}")


class ViewedSession:
    """One request's drafting state, each proposal with drafts seen through `view`."""

    def __init__(self, inner: DraftSession, view: Callable[[Proposal], Proposal]) -> None:
        self.inner, self._view = inner, view

    def commit(self, commit: Commit) -> None:
        """Passed on."""
        self.inner.commit(commit)

    def propose(self, gamma: int, sampling: SamplingConfig, draws: DraftDraws) -> Proposal:
        """The view of the drafter's proposal; one without drafts is left as it is."""
        return self.seen(self.inner.propose(gamma, sampling, draws))

    def seen(self, proposal: Proposal) -> Proposal:
        """The proposal as this view shows it."""
        return self._view(proposal) if proposal.gamma else proposal


class ThresholdDrafter:
    """The drafter with its block cut before the first draft whose survival, prod_{i<=k} c_i, lies below `threshold`.

    The output law stays the target's: c_k is a function of the drafts before k alone, so whether k is verified does
    not depend on x_k. A drafter whose c_k has seen x_k must not be used here.
    """

    def __init__(self, drafter: Drafter, threshold: float) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
            raise ValueError(f"the confidence threshold must lie in 0..1, got {threshold!r}")
        self.inner, self.threshold = drafter, float(threshold)
        self.name = f"{drafter.name}{THRESHOLD_MARK}{threshold:g}"
        self.taps, self.max_gamma = drafter.taps, drafter.max_gamma

    def start(self, target: Target, *, capacity: int) -> ViewedSession:
        """A session of the drafter that cuts; a block may become empty."""
        return ViewedSession(self.inner.start(target, capacity=capacity), self._cut)

    def _cut(self, proposal: Proposal) -> Proposal:
        return proposal.prefix(kept_length(_confidences(proposal), self.threshold))


def kept_length(confidence_G: tuple[float, ...], threshold: float) -> int:
    """Drafts before the first whose survival lies below `threshold`. It looks at nothing behind that one."""
    chance = 1.0
    for k, confidence in enumerate(confidence_G):
        chance *= confidence
        if chance < threshold:
            return k
    return len(confidence_G)


def _confidences(proposal: Proposal) -> tuple[float, ...]:
    if proposal.confidence_G is None:
        raise ValueError("the drafter gives no confidences: it has no confidence head")
    return proposal.confidence_G


def _entropies(proposal: Proposal) -> np.ndarray:
    if proposal.draft_logits_GV is None:
        raise ValueError("the calibration reads the draft's entropy, and the drafter gives no logits")
    # in fp32, unlike a trace's, since it is paid for in every round; the difference is far below a bin
    logits_GV = proposal.draft_logits_GV.float()
    law_GV = torch.softmax(logits_GV, dim=-1)
    top_G1, best_G1 = logits_GV.max(dim=-1, keepdim=True)
    # H = log sum e^z - sum p z; the largest p is never tiny, so its logarithm is safe
    nats_G = (top_G1 - law_GV.gather(-1, best_G1).log())[:, 0] - torch.linalg.vecdot(law_GV, logits_GV)
    if not bool(torch.isfinite(nats_G).all()):
        nats_G = torch.special.entr(law_GV).sum(-1)  # a logit of -inf: 0 times it is no number
    return (nats_G / math.log(2)).double().numpy(force=True)


def dress_drafter(
    drafter: Drafter,
    *,
    calibration: Calibration | None = None,
    threshold: float | None = None,
    drafter_hash: str | None = None,
) -> Drafter:
    """The drafter, calibrated and then cut, as far as asked for."""
    if calibration is not None:
        drafter = CalibratedDrafter(drafter, calibration, drafter_hash=drafter_hash)
    return drafter if threshold is None else ThresholdDrafter(drafter, threshold)
