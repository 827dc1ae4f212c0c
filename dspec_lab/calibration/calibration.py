"""A fitted calibration: its maps, where it came from, and its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dspec_lab.calibration.maps import Method, PositionMap, TemperatureMap, apply_maps, map_from_json
from dspec_lab.calibration.metrics import BINS
from dspec_lab.calibration.records import Rounds
from dspec_lab.calibration.score import RESAMPLES, Score, score_survival
from dspec_lab.calibration.split import refuse_leakage, split_by_prompt
from dspec_lab.calibration.sts import Labels, fit_maps
from dspec_lab.core.files import file_hash, read_json, write_json

FORMAT = "dspec_lab calibration 1"
SHAPE_BINS = 10  # of the confidence histogram that drift is judged by


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What a calibration was fitted on. Shares are 0..1."""

    drafter: str
    drafter_hash: str | None  # sha256 of the checkpoint's weights, where they were given
    temperature: float  # sampling temperature of the traces
    data: tuple[str, ...]  # file names
    data_hashes: tuple[str, ...]  # sha256
    date_utc: str
    seed: int
    bins: int
    labels: Labels
    fit_rounds: int
    held_out_rounds: int
    fit_prompts: tuple[str, ...]
    held_out_prompts: tuple[str, ...]
    domain_shares: Mapping[str, float]  # of the rounds fitted on
    confidence_shares: tuple[tuple[float, ...], ...]  # by position, over ten equal bins of the raw confidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Maps for positions 1..gamma, with the held-out scores of survival before and after them."""

    method: Method
    maps: tuple[PositionMap, ...]
    provenance: Provenance
    before: tuple[Score, ...] = ()
    after: tuple[Score, ...] = ()

    def __post_init__(self) -> None:
        if not self.maps:
            raise ValueError("a calibration needs a map for at least one position")
        wrong = [m.method for m in self.maps if m.method != self.method]
        if wrong:
            raise ValueError(f"a calibration of the method {self.method} holds a {wrong[0]} map")

    @property
    def gamma(self) -> int:
        """Positions that have a map."""
        return len(self.maps)

    @property
    def reads_entropy(self) -> bool:
        """Whether the maps read the draft's entropy beside its confidence."""
        return self.method == "entropy"

    def confidences(
        self, confidence_IG: Float[np.ndarray, "I G"], entropy_IG: Float[np.ndarray, "I G"] | None = None
    ) -> Float[np.ndarray, "I G"]:
        """Calibrated conditional chances of raw ones. They must be raw: nothing here can tell.

        `entropy_IG`, in bits, is that of the draft laws; entropy maps need it, the others do not look at it.
        """
        return apply_maps(self.maps, confidence_IG, entropy_IG)

    def apply(self, rounds: Rounds) -> Rounds:
        """The rounds with calibrated confidences; refuses rounds of another drafter or calibrated ones."""
        if rounds.calibrated:
            raise ValueError(f"the confidences of {rounds.drafter!r} are calibrated already; a second time is wrong")
        if rounds.drafter != self.provenance.drafter:
            raise ValueError(f"fitted for the drafter {self.provenance.drafter!r}, got rounds of {rounds.drafter!r}")
        calibrated_IG = self.confidences(rounds.confidence_IG, rounds.draft_entropy_IG)
        return replace(rounds, confidence_IG=calibrated_IG, calibrated=True)

    def judge(self, rounds: Rounds, *, resamples: int = RESAMPLES) -> tuple[list[Score], list[Score]]:
        """Scores of survival (before, after) on rounds whose prompts the fit has not seen; refuses others."""
        refuse_leakage(self.provenance.fit_prompts, rounds.prompts)
        bins, seed = self.provenance.bins, self.provenance.seed
        after = self.apply(rounds)
        return tuple(  # type: ignore[return-value]
            score_survival(rounds, c_IG, bins=bins, resamples=resamples, seed=seed)
            for c_IG in (rounds.confidence_IG, after.confidence_IG)
        )

    def engine_table(self) -> dict[str, Any]:
        """Temperatures as serving engines read them; ECE lists are the held-out ones. Other methods have none."""
        if self.method != "temperature":
            raise ValueError(f"engines read temperatures only, this calibration is {self.method}")
        return {
            "temperatures": [m.temperature for m in self.maps if isinstance(m, TemperatureMap)],
            "dataset": ", ".join(self.provenance.data),
            "num_samples": self.provenance.fit_rounds,
            "ece_before": [score.ece for score in self.before if score.position is not None],
            "ece_after": [score.ece for score in self.after if score.position is not None],
        }

    def save(self, path: Path | str) -> Path:
        """Write the calibration as JSON, whole."""
        content = {
            "format": FORMAT,
            "method": self.method,
            "maps": [m.as_json() for m in self.maps],
            "provenance": asdict(self.provenance),
            "held_out": {"before": [asdict(s) for s in self.before], "after": [asdict(s) for s in self.after]},
        }
        return write_json(path, content)


def fit_calibration(
    rounds: Rounds,
    method: Method = "temperature",
    *,
    held_out: float = 0.5,
    seed: int = 0,
    bins: int = BINS,
    labels: Labels = "outcome",
    resamples: int = RESAMPLES,
    data: Sequence[Path | str] = (),
    drafter_hash: str | None = None,
) -> Calibration:
    """Fit on some prompts, judge on the others. `data` names the trace files, which are hashed."""
    fit, judge = split_by_prompt(rounds, held_out=held_out, seed=seed)
    maps = fit_maps(fit, method, bins=bins, labels=labels)
    provenance = Provenance(
        drafter=rounds.drafter,
        drafter_hash=drafter_hash,
        temperature=rounds.temperature,
        data=tuple(Path(path).name for path in data),
        data_hashes=tuple(file_hash(path) for path in data),
        date_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=seed,
        bins=bins,
        labels=labels,
        fit_rounds=len(fit),
        held_out_rounds=len(judge),
        fit_prompts=fit.prompts,
        held_out_prompts=judge.prompts,
        domain_shares={name: float((fit.domain_I == name).mean()) for name in fit.domains},
        confidence_shares=confidence_shares(fit),
    )
    fitted = Calibration(method=method, maps=maps, provenance=provenance)
    before, after = fitted.judge(judge, resamples=resamples)
    return replace(fitted, before=tuple(before), after=tuple(after))


def confidence_shares(rounds: Rounds) -> tuple[tuple[float, ...], ...]:
    """Shares of the raw confidences by position, over ten equal bins of 0..1."""
    shares = []
    for k in range(rounds.widest):
        values_N = rounds.confidence_IG[rounds.proposed_IG[:, k], k]
        counts = np.histogram(values_N, bins=SHAPE_BINS, range=(0, 1))[0]
        shares.append(tuple((counts / max(1, counts.sum())).tolist()))
    return tuple(shares)


def load_calibration(path: Path | str) -> Calibration:
    """The calibration of a file; `ValueError` says what is wrong with it."""
    content = read_json(path)
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is no calibration: its format is not {FORMAT!r}")
    try:
        method, held = content["method"], content["held_out"]
        maps = tuple(map_from_json(method, value) for value in content["maps"])
        before, after = (tuple(_record(Score, value) for value in held[name]) for name in ("before", "after"))
        provenance = _record(Provenance, content["provenance"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is a broken calibration: {error!r}") from error
    return Calibration(method=method, maps=maps, provenance=provenance, before=before, after=after)


def _record(cls: type, value: Any) -> Any:
    unknown = set(value) ^ {field.name for field in fields(cls)}
    if unknown:
        raise ValueError(f"{cls.__name__} lacks or has too much: {', '.join(sorted(unknown))}")
    return cls(**{name: _tuples(item) for name, item in value.items()})


def _tuples(value: Any) -> Any:
    # JSON has lists only
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
