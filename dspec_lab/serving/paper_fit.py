"""DeepSeek-V4 Flash and Pro, fitted to what the DSpark paper shows of them (its Figures 7 and 8).

Fitted, 4 numbers a model:
* `fixed_s`, `per_row_s`: time of a step of B rows, from the MTP-1 curve of Figure 7 (every user sees tau / time);
* `logit`, `spread`: the law of DSpark's conditional chances, from the drawn budget curve of Figure 8.
Assumed, not in the paper: MTP-1 gains 1.85 tokens a step; half of the spread is shared by the drafts of a block; the
logit falls by 0.2 a position, which makes the conditional acceptance level over positions (between 0 and 0.3 the
predictions move by 2 points); drafting costs what MTP-1's does.
Predicted, so not fitted: every throughput and speed of DSpark, hence its gains over MTP-1.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from dspec_lab.core.files import data_dir
from dspec_lab.scheduler.cost_table import CostTable

GAMMA = 5
TAU_MTP = 1.85  # assumed; see data/paper/README.md
SHARED = 0.5  # assumed: share of the variance of a chance's logit that a block's drafts have in common
SLOPE = -0.2  # assumed: change of the mean logit per position
FREE = ("fixed_s", "per_row_s", "logit", "spread")
MIN_REQUESTS = 3.0  # Figure 7 below this is a few requests only
MAX_ROWS = 4096
SAMPLES = 4000  # blocks that a law is averaged over


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperFit:
    """The fitted numbers of one model."""

    model: str
    fixed_s: float
    per_row_s: float
    logit: float  # of the first draft's conditional chance, mean
    spread: float  # standard deviation of the logit

    def table(self) -> CostTable:
        """Time of a step, a straight line in the rows."""
        return CostTable(
            rows=(1, 512, MAX_ROWS),
            seconds=tuple(self.fixed_s + self.per_row_s * rows for rows in (1, 512, MAX_ROWS)),
            name=f"DeepSeek-{self.model}, one GPU's share, fitted to Figure 7 of the DSpark paper",
            source="fitted",
            run={"tau_mtp": TAU_MTP, "fixed_s": self.fixed_s, "per_row_s": self.per_row_s},
        )

    def survival(self, samples: int = SAMPLES, seed: int = 0) -> Float[np.ndarray, "B G"]:
        """Survival of sampled blocks."""
        rng = np.random.default_rng(seed)
        shared_B1, own_BG = rng.standard_normal((samples, 1)), rng.standard_normal((samples, GAMMA))
        noise_BG = np.sqrt(SHARED) * shared_B1 + np.sqrt(1 - SHARED) * own_BG
        logit_BG = self.logit + SLOPE * np.arange(GAMMA) + self.spread * noise_BG
        return np.cumprod(1 / (1 + np.exp(-logit_BG)), axis=1)


# what `fit` finds; a test compares
FITS: Mapping[str, PaperFit] = {
    "v4-flash": PaperFit(
        model="v4-flash", fixed_s=0.014646957, per_row_s=3.2823948e-05, logit=1.8207165, spread=1.6752669
    ),
    "v4-pro": PaperFit(model="v4-pro", fixed_s=0.032436723, per_row_s=1.0417741e-04, logit=2.0057982, spread=1.5366666),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A load curve: per number of requests on a GPU."""

    requests_N: Float[np.ndarray, " N"]
    user_tok_per_s_N: Float[np.ndarray, " N"]
    budget_N: Float[np.ndarray, " N"]

    @property
    def throughput_N(self) -> Float[np.ndarray, " N"]:
        """Tokens per second of a GPU."""
        return self.requests_N * self.user_tok_per_s_N

    def throughput_at(self, user_tok_per_s: float) -> float:
        """Throughput where each user sees this rate; `ValueError` outside the curve."""
        return _at(user_tok_per_s, self.user_tok_per_s_N, self.throughput_N, "tok/s a user")

    def user_rate_at(self, throughput: float) -> float:
        """The users' rate where a GPU gives this throughput."""
        return _at(throughput, self.throughput_N, self.user_tok_per_s_N, "tok/s a GPU")


def large_batch_curve(
    survival_BG: Float[np.ndarray, "B G"], table: CostTable, requests_N: Float[np.ndarray, " N"]
) -> Curve:
    """The scheduler's curve for large batches of calibrated chances, where noise between rounds averages out.

    Each point: the share of drafts that maximises tokens per second.
    """
    falling_N = np.sort(survival_BG, axis=None)[::-1]
    per_request_N = np.arange(len(falling_N) + 1) / len(survival_BG)
    gained_N = 1 + np.concatenate([[0.0], np.cumsum(falling_N)]) / len(survival_BG)
    row_N = np.arange(table.last_row + 1)
    budgets, speeds = [], []
    for requests in requests_N:
        seconds_N = np.interp(requests * (1 + per_request_N), row_N[1:], table.verify_s_N[1:])
        best = int((gained_N / seconds_N).argmax())
        budgets.append(1 + per_request_N[best])
        speeds.append(gained_N[best] / seconds_N[best])
    return Curve(requests_N=requests_N, user_tok_per_s_N=np.array(speeds), budget_N=np.array(budgets))


def fixed_curve(accepted_length: float, rows: int, table: CostTable, requests_N: Float[np.ndarray, " N"]) -> Curve:
    """The curve of a method that always verifies `rows` rows a request and gains `accepted_length`."""
    seconds_N = np.interp(requests_N * rows, np.arange(1, table.last_row + 1), table.verify_s_N[1:])
    return Curve(
        requests_N=requests_N,
        user_tok_per_s_N=accepted_length / seconds_N,
        budget_N=np.full(len(requests_N), float(rows)),
    )


def fit(model: str) -> PaperFit:
    """Fit one model anew (some seconds): a line to MTP-1's Figure 7, then two numbers to DSpark's budget curve."""
    from scipy.optimize import minimize

    frontier = paper_rows("fig7_frontier", model=model, method="mtp", kind="fit")
    speed_N, throughput_N = column(frontier, "tps_per_user"), column(frontier, "throughput_per_gpu")
    many_N = throughput_N / speed_N > MIN_REQUESTS
    speed_N, throughput_N = speed_N[many_N], throughput_N[many_N]
    step_s_N, row_N = TAU_MTP / speed_N, 2 * throughput_N / speed_N
    # least squares of the relative error
    design_N2 = np.stack([np.ones_like(row_N), row_N], 1) / step_s_N[:, None]
    fixed_s, per_row_s = np.linalg.lstsq(design_N2, np.ones_like(row_N), rcond=None)[0].tolist()
    budget = paper_rows("fig8_budget", model=model, method="dspark", kind="fit")
    requests_N, wanted_N = column(budget, "concurrency"), column(budget, "verification_budget")

    def made(x: np.ndarray) -> PaperFit:
        logit, spread = (float(value) for value in x)
        return PaperFit(model=model, fixed_s=fixed_s, per_row_s=per_row_s, logit=logit, spread=abs(spread))

    def loss(x: np.ndarray) -> float:
        candidate = made(x)
        curve = large_batch_curve(candidate.survival(1500), candidate.table(), requests_N)
        return float(np.mean((curve.budget_N - wanted_N) ** 2))

    starts = ([2.0, 2.0], [2.0, 1.2])
    found = [minimize(loss, x, method="Nelder-Mead", options={"maxiter": 80}) for x in starts]
    return made(min(found, key=lambda result: result.fun).x)


def paper_rows(table: str, **wanted: str) -> list[dict[str, str]]:
    """Rows of a table in data/paper whose columns have these values."""
    path = data_dir() / "paper" / f"{table}.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]
    if not rows:
        raise ValueError(f"{path.name} has no rows with {wanted}")
    return rows


def column(rows: list[dict[str, str]], name: str) -> Float[np.ndarray, " N"]:
    """One column as numbers."""
    return np.array([float(row[name]) for row in rows])


def _at(x: float, x_N: np.ndarray, y_N: np.ndarray, unit: str) -> float:
    order = np.argsort(x_N)
    if not x_N[order[0]] <= x <= x_N[order[-1]]:
        raise ValueError(f"{x:g} {unit} lies outside the curve, {x_N[order[0]]:g} to {x_N[order[-1]]:g}")
    return float(np.interp(x, x_N[order], y_N[order]))
