"""Ready-made settings of the simulator: a cost table, a law of acceptance, and what they rest on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dspec_lab.core.files import data_dir, read_json
from dspec_lab.scheduler.cost_table import CostTable, load_table
from dspec_lab.serving.acceptance import Acceptance, Domain, ParametricAcceptance
from dspec_lab.serving.paper_fit import FITS, FREE, GAMMA, SHARED, SLOPE, TAU_MTP, column, paper_rows
from dspec_lab.serving.roofline import GPUS, roofline_table

CPU_TABLE = "cpu_cost_table.json"
BENCH_RECORD = "cpu_bench.json"
# the spread around the paper's averages is not in the paper; these are near what the V4 fits find
REQUEST_SD, ROUND_SD, POSITION_SD = 0.6, 0.9, 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What `dspec simulate --preset` stands for."""

    name: str
    table: CostTable
    acceptance: Acceptance
    concurrency: tuple[int, ...]  # a sensible sweep
    notes: tuple[str, ...]
    mtp: Acceptance | None = None  # the law of the MTP-1 baseline, where it is another drafter's
    sla_tok_per_s: float | None = None  # the user rate at which the paper compares


def load_preset(name: str) -> Preset:
    """The preset of that name; `ValueError` for another, `FileNotFoundError` where its measurement is missing."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]()


def _cpu() -> Preset:
    path = data_dir() / "profiles" / CPU_TABLE
    if not path.is_file():
        raise FileNotFoundError(f"the preset cpu needs {path}; make it with: dspec profile --json {path}")
    table = load_table(path)
    return Preset(
        name="cpu",
        table=table,
        acceptance=paper_acceptance(),
        concurrency=(1, 2, 4, 8, 16, 32),
        notes=(f"cost table measured on this project's machine: {path.name}", ACCEPTANCE_NOTE),
    )


def _gpu(name: str) -> Preset:
    table = roofline_table(GPUS[name])
    return Preset(
        name=name,
        table=table,
        acceptance=paper_acceptance(),
        concurrency=(1, 4, 16, 64, 128, 256, 512),
        notes=(
            f"roofline of {GPUS[name].sheet}: what the silicon allows, not what an engine reaches",
            ACCEPTANCE_NOTE,
            "drafting is free of charge in this preset",
        ),
    )


def _v4(name: str) -> Preset:
    fit = FITS[name]
    domain = Domain(
        name="all",
        logit_G=tuple(fit.logit + SLOPE * k for k in range(GAMMA)),
        round_sd=fit.spread * math.sqrt(SHARED),
        position_sd=fit.spread * math.sqrt(1 - SHARED),
    )
    return Preset(
        name=name,
        table=fit.table(),
        acceptance=ParametricAcceptance((domain,)),
        mtp=mtp_acceptance(),
        concurrency=(10, 20, 40, 60, 80, 100, 120, 140, 160, 180, 200, 240),
        sla_tok_per_s=80.0 if name == "v4-flash" else 35.0,
        notes=(
            f"fitted, {len(FREE)} numbers ({', '.join(FREE)}): step time to the paper's MTP-1 curve (Figure 7), "
            "chances to its DSpark budget curve (Figure 8)",
            f"assumed: MTP-1 gains {TAU_MTP} tokens a step, logit slope {SLOPE} a position, half of the spread shared "
            "within a block, where it comes and goes with passages of a text rather than with requests",
            "predicted: all throughput and speed of DSpark, hence its gains",
        ),
    )


def mtp_acceptance() -> ParametricAcceptance:
    """MTP-1: one draft, accepted with the same chance always."""
    chance = TAU_MTP - 1
    return ParametricAcceptance((Domain(name="all", logit_G=(math.log(chance / (1 - chance)),)),))


ACCEPTANCE_NOTE = (
    "acceptance: the paper's Figure 2 for DSpark on Qwen3-4B, math, code and chat in equal shares; the spread around "
    "these averages is assumed"
)


def paper_acceptance(drafter: str = "DSpark") -> ParametricAcceptance:
    """Three domains with the conditional acceptance of the paper's Figure 2 by position, and an assumed spread."""
    variance = REQUEST_SD**2 + ROUND_SD**2 + POSITION_SD**2
    # a mean of sigmoids lies nearer to 1/2 than the sigmoid of the mean; the usual approximation of that
    widen = math.sqrt(1 + math.pi * variance / 8)
    domains = []
    for name in ("math", "code", "chat"):
        chance_G = column(
            paper_rows("fig2_conditional_acceptance", domain=name, drafter=drafter), "conditional_acceptance"
        )
        logit_G = tuple(widen * math.log(chance / (1 - chance)) for chance in chance_G.tolist())
        domains.append(
            Domain(
                name=name,
                logit_G=logit_G,
                share=1 / 3,
                request_sd=REQUEST_SD,
                round_sd=ROUND_SD,
                position_sd=POSITION_SD,
            )  # fmt: skip
        )
    return ParametricAcceptance(tuple(domains))


PRESETS: Mapping[str, Callable[[], Preset]] = {
    "cpu": _cpu,
    "h100": lambda: _gpu("h100"),
    "h200": lambda: _gpu("h200"),
    "a6000": lambda: _gpu("a6000"),
    "v4-flash": lambda: _v4("v4-flash"),
    "v4-pro": lambda: _v4("v4-pro"),
}


def recorded_cpu_table() -> CostTable:
    """The cost table measured on this project's machine; where there is none, the passes recorded by `dspec bench`."""
    path = cpu_table_path()
    if path.is_file():
        return load_table(path)
    record = data_dir() / "profiles" / BENCH_RECORD
    if not record.is_file():
        raise FileNotFoundError(f"neither {path} nor {record}; dspec profile makes the first")
    passes = {int(rows): times["median"] / 1e3 for rows, times in read_json(record)["forward_ms_by_rows"].items()}
    return CostTable(
        rows=tuple(sorted(passes)),
        seconds=tuple(passes[rows] for rows in sorted(passes)),
        name=f"passes of {BENCH_RECORD}",
        source="measured",
    )


def cpu_table_path() -> Path:
    """Where the measured table of the preset `cpu` lies."""
    return data_dir() / "profiles" / CPU_TABLE
