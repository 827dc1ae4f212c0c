"""Shared by all tests: axis and type checks on every function of the package, one thread setting, the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# before any module of the package is imported: shapes and types in its signatures are then checked at each call
install_import_hook("dspec_lab", "beartype.beartype")


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    """torch uses as many threads as OMP_NUM_THREADS says, else as many as there are cores for this process."""
    import torch

    from dspec_lab.bench.record import wanted_threads

    torch.set_num_threads(wanted_threads())


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """Folder of the default model, its hashes checked. Nothing is fetched here: `make test` does that first."""
    from dspec_lab.models.fetch import default_model_folder, ensure_smollm2

    if not default_model_folder().is_dir():
        pytest.skip(f"the default model is not in {default_model_folder().parent}; run: dspec fetch smollm2")
    return ensure_smollm2()
