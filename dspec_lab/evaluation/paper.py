"""The numbers of the DSpark paper (arXiv 2607.05147), as bundled in data/paper/; its README gives units and errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dspec_lab.core.files import data_dir

if TYPE_CHECKING:
    import pandas as pd

# derived from figures 7 and 8 under assumptions, not printed or drawn in the paper: label them so when shown
ESTIMATES = frozenset({"fig8_implied_sps", "fig8_implied_tau", "fig8_sps_params"})

# its `value` column mixes numbers, formulas and ranges
_TEXT_TABLES = frozenset({"algorithm_facts"})


def paper_table_names() -> tuple[str, ...]:
    """The tables that `paper_table` can read, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.csv")))


def paper_table(name: str) -> pd.DataFrame:
    """One table by its file name without `.csv`, columns as in the file.

    Empty cells are NaN (a fitted line has no spread); in `algorithm_facts` every column is text and an empty cell
    is "". Tables named in `ESTIMATES` are inferred, the others printed or read off a figure.
    """
    import pandas as pd

    known = paper_table_names()
    if name not in known:
        raise ValueError(f"no paper table is called {name!r}; there are {', '.join(known)}")
    path = _folder() / f"{name}.csv"
    if name in _TEXT_TABLES:
        return pd.read_csv(path, dtype=str, keep_default_na=False)
    return pd.read_csv(path, keep_default_na=False, na_values=[""])


def _folder() -> Path:
    folder = data_dir() / "paper"
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder} with the paper's tables")
    return folder
