"""Timing of one scheduling decision: many requests, fresh confidences each time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspec_lab.scheduler.cost_table import CostTable
from dspec_lab.scheduler.policies import RoundView, policy_from_name

NAMES = ("early-stop", "delayed", "threshold-0.5", "full")


def bench_decisions(
    requests: int = 1024, gamma: int = 7, *, names: Sequence[str] = NAMES, repeats: int = 200, seed: int = 0
) -> dict[str, Any]:
    """Microseconds of one decision by policy: median, least, largest over `repeats` different rounds.

    Includes the running product of the confidences; not the reading of requests around it.
    """
    if requests < 1 or gamma < 1 or repeats < 3:
        raise ValueError(f"need requests, gamma >= 1 and repeats >= 3, got {requests}, {gamma}, {repeats}")
    rng = np.random.default_rng(seed)
    last = requests * (gamma + 1)
    table = CostTable(rows=(1, last // 8 + 2, last + 3), seconds=(0.010, 0.013, 0.080))
    rounds = [rng.uniform(0.3, 1.0, (requests, gamma)).astype(np.float32) for _ in range(8)]
    past_BG = np.cumprod(rng.uniform(0.3, 1.0, (requests, gamma)), axis=1).astype(np.float32)
    lens_B = np.full(requests, gamma)
    result: dict[str, Any] = {"requests": requests, "gamma": gamma, "repeats": repeats, "us": {}, "admitted": {}}
    for name in names:
        policy = policy_from_name(name, table)
        times, admitted = [], []
        for repeat in range(repeats + 5):
            start = time.perf_counter()
            survival_BG = np.cumprod(rounds[repeat % len(rounds)], axis=1)
            lengths_B = policy.lengths(RoundView(survival_BG=survival_BG, lens_B=lens_B, past_BG=past_BG))
            times.append(1e6 * (time.perf_counter() - start))
            admitted.append(int(lengths_B.sum()))
        kept = times[5:]
        result["us"][name] = {"median": statistics.median(kept), "min": min(kept), "max": max(kept)}
        result["admitted"][name] = statistics.fmean(admitted)
    return result


if __name__ == "__main__":
    from dspec_lab.core.files import json_text

    print(json_text(bench_decisions()), end="")
