"""SGLang's table of steps per second (`--speculative-dspark-sps-table-path`), read and written.

Two forms. By rows: `sample_batch_tokens` (rising), `sample_steps_per_sec`, `max_batch_tokens`; a batch takes the rate
of the largest probe that is not above it. Additive: seconds = `bias_seconds` + alpha(requests) + theta(rows), each
interpolated between its probes and held at the ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspec_lab.core.files import write_json
from dspec_lab.scheduler.cost_table import CostTable

BY_ROWS = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
ADDITIVE = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")


def is_sglang(values: Mapping[str, Any]) -> bool:
    """Whether a JSON object is meant as a table of SGLang's, whole or not."""
    return "format" not in values and any(key in values for key in (*BY_ROWS, *ADDITIVE))


def parse_sglang(values: Mapping[str, Any], *, name: str = "") -> CostTable:
    """The cost table that one of SGLang's two forms describes. Raises `ValueError` for a mixture or a missing key."""
    forms = [keys for keys in (BY_ROWS, ADDITIVE) if any(key in values for key in keys)]
    if len(forms) != 1:
        raise ValueError(f"the keys of both SGLang forms are mixed: {sorted(values)}")
    missing = [key for key in forms[0] if key not in values]
    if missing:
        raise ValueError(f"an SGLang table lacks {', '.join(missing)}")
    if forms[0] is BY_ROWS:
        rates = [float(rate) for rate in values["sample_steps_per_sec"]]
        bad = [rate for rate in rates if not rate > 0]
        if bad:
            raise ValueError(f"sample_steps_per_sec must be above 0, got {bad[0]}")
        return CostTable(
            rows=tuple(values["sample_batch_tokens"]),
            seconds=tuple(1 / rate for rate in rates),
            max_rows=int(values["max_batch_tokens"]),
            lookup="floor",
            name=name,
            source="sglang",
        )
    bias = float(values["bias_seconds"])
    if not bias > 0:
        raise ValueError(f"bias_seconds must be above 0, got {bias}")
    # the bias goes into the rows' times: these must be above 0, and theta alone may start at 0
    return CostTable(
        rows=tuple(values["m_probes"]),
        seconds=tuple(bias + float(seconds) for seconds in values["theta_seconds"]),
        request_probes=tuple(values["bs_probes"]),
        request_s=tuple(float(seconds) for seconds in values["alpha_seconds"]),
        name=name,
        source="sglang",
    )


def sglang_values(table: CostTable) -> dict[str, Any]:
    """`table` in the form by rows: rates of the target's pass and the fixed term, at the probes of the table.

    Terms by request and by context have no place in that form and raise `ValueError`; `without_request_terms` first
    says which request count they are to be taken at. SGLang holds a rate up to the next probe, so a table that
    interpolates gets a probe at each row count where that would be off by more than 2 %.
    """
    if table.settle_per_request_s or table.request_probes:
        raise ValueError("the table has a term by requests, which SGLang's form by rows cannot hold")
    probes = list(table.rows) if table.lookup == "floor" else _dense_probes(table)
    return {
        "sample_batch_tokens": probes,
        "sample_steps_per_sec": [1.0 / float(table.verify_s_N[rows] + table.fixed_s) for rows in probes],
        "max_batch_tokens": table.last_row,
    }


def without_request_terms(table: CostTable, requests: int) -> CostTable:
    """`table` with its terms by request frozen at `requests` requests, as part of the fixed time."""
    from dataclasses import replace

    return replace(table, fixed_s=table.overhead_s(requests), settle_per_request_s=0.0, request_probes=(), request_s=())


def write_sglang(path: Path | str, table: CostTable) -> Path:
    """Write `table` for SGLang, whole."""
    return write_json(path, sglang_values(table))


def _dense_probes(table: CostTable) -> list[int]:
    seconds_N = table.verify_s_N + table.fixed_s
    probes = [table.rows[0]]
    measured = set(table.rows)
    for rows in range(table.rows[0] + 1, table.last_row + 1):
        off = abs(float(np.log(seconds_N[rows] / seconds_N[probes[-1]])))
        if rows in measured or off > 0.02:
            probes.append(rows)
    return probes
