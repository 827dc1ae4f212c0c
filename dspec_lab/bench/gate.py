"""Gated policies beside the best fixed length on many small loads, simulated: how far a record of one load carries.

    python -m dspec_lab.bench.gate OUT.json --record SERVE.json --tables TABLE.json [TABLE.json ...]

A dozen texts are few: which fixed length is best for them is known only afterwards, and a gate learns while they run.
So sets of texts are drawn out of a `serve-bench` record, which holds a drafter's acceptance at every token, and served
on each cost table. Sets overlap, so they show what the choice of texts does, not how sure the means are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dspec_lab.bench.record import run_record
from dspec_lab.core.files import json_text, read_json, write_text
from dspec_lab.scheduler.cost_table import CostTable, load_table
from dspec_lab.scheduler.policies import FixedLength, Policy, policy_from_name
from dspec_lab.serving.measured import MeasuredAcceptance, parse_measured
from dspec_lab.serving.simulator import SimConfig, simulate
from dspec_lab.serving.workload import ClosedLoop

LENGTHS = (1, 2, 3, 5)
POLICIES = ("early-stop", "delayed")
REQUESTS = (1, 2, 4, 8, 16, 32)


def text_sets(measured: MeasuredAcceptance, count: int, per_domain: int, seed: int) -> list[MeasuredAcceptance]:
    """`count` sets of texts, `per_domain` of each domain, drawn without repetition within a set and shuffled."""
    rng, by_domain = np.random.default_rng(seed), dict[str, list[int]]()
    for index, text in enumerate(measured.texts):
        by_domain.setdefault(text.domain, []).append(index)
    fewest = min(by_domain, key=lambda domain: len(by_domain[domain]))
    if not 1 <= per_domain <= len(by_domain[fewest]):
        raise ValueError(f"per_domain must lie in 1..{len(by_domain[fewest])}, the texts of {fewest}, got {per_domain}")
    sets = []
    for _ in range(count):
        picked = np.concatenate([rng.choice(held, per_domain, replace=False) for held in by_domain.values()])
        sets.append(replace(measured, texts=tuple(measured.texts[i] for i in rng.permutation(picked))))
    return sets


def throughput(
    texts: MeasuredAcceptance, table: CostTable, requests: int, policy: Policy | None, *, gate: bool = False
) -> float:
    """Simulated tokens per second of a closed loop over the texts in turn, in rounds in which all places are taken."""
    longest = max(len(text.accepted) for text in texts.texts)
    return simulate(
        SimConfig(
            load=ClosedLoop(concurrency=requests), policy=policy, table=table, acceptance=texts.law(), tokens=longest,
            lengths="text", total=max(requests, len(texts.texts)), full_only=True, gate=gate, learn=policy is not None,
            context_tokens=texts.context_tokens,
        )
    ).throughput_tok_per_s  # fmt: skip


def gate_rows(
    sets: Sequence[MeasuredAcceptance], tables: Mapping[str, CostTable], requests: Sequence[int] = REQUESTS
) -> list[dict[str, Any]]:
    """One row per table, number of requests and policy: its throughput over that of the best fixed length of each set.

    `of_fixed` compares with the best length of 1 or more, `of_any` with plain decoding too: [mean, least, largest].
    """
    rows = []
    for name, table in tables.items():
        for places in requests:
            ratios = {policy: ([], []) for policy in POLICIES}
            for texts in sets:
                fixed = max(throughput(texts, table, places, FixedLength(length)) for length in LENGTHS)
                best = max(fixed, throughput(texts, table, places, None))
                for policy, (of_fixed, of_any) in ratios.items():
                    found = throughput(texts, table, places, policy_from_name(policy, table), gate=True)
                    of_fixed.append(found / fixed)
                    of_any.append(found / best)
            for policy, (of_fixed, of_any) in ratios.items():
                row: dict[str, Any] = {"table": name, "requests": places, "policy": policy}
                for key, values in (("of_fixed", of_fixed), ("of_any", of_any)):
                    row[key] = [float(np.mean(values)), min(values), max(values)]
                rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, simulate, print, write."""
    parser = argparse.ArgumentParser(description="Gated policies beside the best fixed length, simulated.")
    parser.add_argument("out", help="the JSON file to write")
    parser.add_argument("--record", required=True, help="of dspec serve-bench, at temperature 0")
    parser.add_argument("--tables", nargs="+", required=True, help="cost tables")
    parser.add_argument("--sets", type=int, default=16, help="sets of texts (default: 16)")
    parser.add_argument("--per-domain", type=int, default=4, help="texts of each domain in a set (default: 4)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        if args.sets < 1:
            raise ValueError(f"sets must be at least 1, got {args.sets}")
        measured = parse_measured(read_json(args.record).get("acceptance") or {})
        tables = dict[str, CostTable]()
        for path in map(Path, args.tables):
            if path.name in tables:
                raise ValueError(f"two cost tables are called {path.name}: {', '.join(args.tables)}")
            tables[path.name] = table = load_table(path)
            needed = max(REQUESTS) * (1 + measured.gamma)
            if table.last_row < needed or table.flat:
                raise ValueError(f"{path} must tell {needed} rows from one, and ends at {table.last_row}")
        rows = gate_rows(text_sets(measured, args.sets, args.per_domain, args.seed), tables)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    for row in rows:
        means = ", ".join(
            f"{key} {row[key][0]:.3f} ({row[key][1]:.3f}-{row[key][2]:.3f})" for key in ("of_fixed", "of_any")
        )
        print(f"{row['table']}, {row['requests']} requests, {row['policy']}: {means}")
    record = run_record({key: value for key, value in vars(args).items() if key != "out"}, args.seed)
    write_text(args.out, json_text({"rows": rows, "lengths": list(LENGTHS), "run": record}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
