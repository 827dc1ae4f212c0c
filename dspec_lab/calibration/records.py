"""Rounds of a trace as arrays: what was proposed, how sure the drafter was, what the verifier kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from dspec_lab.core.files import data_dir

# a drafter whose confidences are calibrated already carries this in its name, and so do its traces
CALIBRATED_MARK = "+sts"
# one whose blocks were cut by a confidence threshold
THRESHOLD_MARK = "@"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Rounds of one drafter at one sampling temperature. Entries past a round's `gamma` are NaN.

    `confidence_IG` is conditional: c_k, the chance that draft k survives given that all before it did. A trace that
    lacks a column (a drafter without confidence head, an untraced law) has NaN throughout.
    """

    drafter: str
    temperature: float
    prompt_I: np.ndarray  # text
    domain_I: np.ndarray  # text
    gamma_I: Int[np.ndarray, " I"]
    num_accepted_I: Int[np.ndarray, " I"]
    confidence_IG: Float[np.ndarray, "I G"]
    accept_prob_IG: Float[np.ndarray, "I G"]  # 1 - TV
    target_entropy_IG: Float[np.ndarray, "I G"]  # bits
    draft_entropy_IG: Float[np.ndarray, "I G"]
    draft_s_I: Float[np.ndarray, " I"]
    verify_s_I: Float[np.ndarray, " I"]
    overhead_s_I: Float[np.ndarray, " I"]
    calibrated: bool = False

    def __len__(self) -> int:
        return len(self.gamma_I)

    @property
    def widest(self) -> int:
        """Most drafts in one round."""
        return self.confidence_IG.shape[1]

    @property
    def prompts(self) -> tuple[str, ...]:
        """Ids of the prompts, sorted."""
        return tuple(sorted(set(self.prompt_I.tolist())))

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains that occur, sorted."""
        return tuple(sorted(set(self.domain_I.tolist())))

    @property
    def has_confidence(self) -> bool:
        """Whether every proposed position has a confidence."""
        return len(self) > 0 and bool(np.isfinite(self.confidence_IG[self.proposed_IG]).all())

    @property
    def proposed_IG(self) -> Bool[np.ndarray, "I G"]:
        """Whether the round proposed a draft k."""
        return np.arange(self.widest)[None] < self.gamma_I[:, None]

    @property
    def survived_IG(self) -> Bool[np.ndarray, "I G"]:
        """Whether drafts 1..k were all accepted; false where k was not proposed."""
        return np.arange(self.widest)[None] < self.num_accepted_I[:, None]

    @property
    def reached_IG(self) -> Bool[np.ndarray, "I G"]:
        """Whether k was proposed and drafts 1..k-1 were all accepted, so that the verdict on k itself is known."""
        return self.proposed_IG & (np.arange(self.widest)[None] <= self.num_accepted_I[:, None])

    def select(self, mask_I: Bool[np.ndarray, " I"]) -> Rounds:
        """The rounds of a mask."""
        arrays = {name: getattr(self, name)[mask_I] for name in _ARRAYS}
        return replace(self, **arrays)

    def of_domain(self, domain: str) -> Rounds:
        """The rounds of one domain; `all` keeps every one."""
        if domain == "all":
            return self
        if domain not in self.domains:
            raise ValueError(f"no round of the domain {domain!r}; there are {', '.join(self.domains)}")
        return self.select(self.domain_I == domain)

    def prompt_index(self) -> tuple[Int[np.ndarray, " I"], int]:
        """(number of each round's prompt from 0, number of prompts): prompts are the independent units."""
        names, index_I = np.unique(self.prompt_I, return_inverse=True)
        return index_I, len(names)


_ARRAYS = tuple(name for name in Rounds.__dataclass_fields__ if name.endswith(("_I", "_IG")))
_LISTS = {
    "confidence": "confidence_IG",
    "accept_prob": "accept_prob_IG",
    "target_entropy_bits": "target_entropy_IG",
    "draft_entropy_bits": "draft_entropy_IG",
}
_TIMES = ("draft_s", "verify_s", "overhead_s")


def survival(conditional_IG: Float[np.ndarray, "I G"]) -> Float[np.ndarray, "I G"]:
    """a_k = prod_{i<=k} c_i; NaN past the end of a round. Ref: DSpark (arXiv:2607.05147), section 3."""
    return np.cumprod(conditional_IG, axis=1)


def trace_paths(names: Sequence[str] = ()) -> list[Path]:
    """Recorded traces by file name in the data folder's `traces` (or by path); all of that folder where none is named.

    `FileNotFoundError` says what is missing.
    """
    folder = data_dir() / "traces"
    paths = [folder / name for name in names] or sorted(folder.glob("*.parquet"))
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        there = ", ".join(path.name for path in sorted(folder.glob("*.parquet"))) or "none"
        raise FileNotFoundError(f"no trace {missing[0] if missing else folder}; recorded are {there}")
    return paths


def read_rounds(paths: Sequence[Path | str], *, drafter: str | None = None, temperature: float | None = None) -> Rounds:
    """The rounds of one drafter at one temperature from trace files.

    `drafter` and `temperature` may be left out where the files hold one only; otherwise `ValueError` lists them.
    """
    from datasets import concatenate_datasets

    from dspec_lab.verifier.trace import read_trace

    if not paths:
        raise ValueError("no trace file was given")
    table = concatenate_datasets([read_trace(path) for path in paths])
    # selections of rows are kept as an index beside the table; this settles them
    arrow = table.flatten_indices().data.table if table._indices is not None else table.data.table
    columns: dict[str, Any] = {}
    for name in ("drafter", "temperature", "prompt_id", "domain", "gamma", "num_accepted", *_TIMES):
        columns[name] = arrow.column(name).to_numpy()
    lengths, flat = {}, {}
    for name in _LISTS:
        column = arrow.column(name).combine_chunks()
        flat[name] = np.asarray(column.flatten().to_numpy(zero_copy_only=False), dtype=np.float64)
        lengths[name] = np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
    return _choose(_rounds(columns, flat, lengths), columns, drafter, temperature)


def rounds_of_rows(
    rows: Sequence[Mapping[str, Any]], *, drafter: str | None = None, temperature: float | None = None
) -> Rounds:
    """The same from trace rows in memory (`verifier.trace.trace_rows`)."""
    if not rows:
        raise ValueError("no round was given")
    columns = {
        name: np.array([row[name] for row in rows])
        for name in ("drafter", "temperature", "prompt_id", "domain", "gamma", "num_accepted", *_TIMES)
    }
    lengths = {name: np.array([len(row[name]) for row in rows]) for name in _LISTS}
    flat = {name: np.array([x for row in rows for x in row[name]], dtype=np.float64) for name in _LISTS}
    return _choose(_rounds(columns, flat, lengths), columns, drafter, temperature)


def _rounds(columns: Mapping[str, Any], flat: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray]) -> Rounds:
    gamma_I = np.asarray(columns["gamma"], dtype=np.int64)
    accepted_I = np.asarray(columns["num_accepted"], dtype=np.int64)
    if (accepted_I > gamma_I).any() or (accepted_I < 0).any():
        at = int(np.flatnonzero((accepted_I > gamma_I) | (accepted_I < 0))[0])
        raise ValueError(f"row {at} of the trace accepts {accepted_I[at]} of {gamma_I[at]} drafts")
    lists = {}
    for name, attribute in _LISTS.items():
        bad_I = (lengths[name] != gamma_I) & (lengths[name] != 0)
        if bad_I.any():
            at = int(np.flatnonzero(bad_I)[0])
            raise ValueError(f"row {at} of the trace has {lengths[name][at]} values of {name} for {gamma_I[at]} drafts")
        lists[attribute] = _padded(flat[name], lengths[name], max(1, int(gamma_I.max())))
    for name, attribute in (("confidence", "confidence_IG"), ("accept_prob", "accept_prob_IG")):
        wrong = lists[attribute][(lists[attribute] < 0) | (lists[attribute] > 1)]
        if wrong.size:
            raise ValueError(f"{name} holds {wrong[0]}, which is no probability")
    return Rounds(
        drafter="", temperature=0.0,
        prompt_I=np.asarray(columns["prompt_id"]).astype(str), domain_I=np.asarray(columns["domain"]).astype(str),
        gamma_I=gamma_I, num_accepted_I=accepted_I, **lists,
        **{f"{name}_I": np.asarray(columns[name], dtype=np.float64) for name in _TIMES},
    )  # fmt: skip


def _padded(flat_N: np.ndarray, lengths_I: np.ndarray, width: int) -> np.ndarray:
    values_IG = np.full((len(lengths_I), width), np.nan)
    values_IG[np.arange(width)[None] < lengths_I[:, None]] = flat_N
    return values_IG


def _choose(rounds: Rounds, columns: Mapping[str, Any], drafter: str | None, temperature: float | None) -> Rounds:
    names_I = np.asarray(columns["drafter"]).astype(str)
    name = _only("drafter", sorted(set(names_I.tolist())), drafter)
    heat_I = np.asarray(columns["temperature"], dtype=np.float64).round(6)
    there = sorted(set(heat_I[names_I == name].tolist()))
    heat = _only("temperature", there, None if temperature is None else round(float(temperature), 6))
    kept = rounds.select((names_I == name) & (heat_I == heat))
    return replace(kept, drafter=name, temperature=heat, calibrated=CALIBRATED_MARK in name)


def _only(what: str, there: list[Any], wanted: Any) -> Any:
    if wanted is None and len(there) > 1:
        raise ValueError(f"the trace holds more than one {what}, name one of {', '.join(map(str, there))}")
    if wanted is not None and wanted not in there:
        raise ValueError(f"the trace has no {what} {wanted!r}; it has {', '.join(map(str, there))}")
    return there[0] if wanted is None else wanted
