"""Reference vectors: small ones beside the tests, the full set where ../shared/reference is present.

A test that takes `dspark_case`, `eagle3_case` or `e2e_case` runs once for each folder of that kind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    # before anything imports Triton: its kernels then run in the interpreter, on CPU tensors
    os.environ.setdefault("TRITON_INTERPRET", "1")

from dspec_lab.bench.products import build_way
from dspec_lab.kernels.native_rows import NativeRows

VECTORS = Path(__file__).parent / "vectors"
REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
KINDS = {"dspark_case": ("dspark_", "dflash_"), "eagle3_case": ("eagle3_",), "e2e_case": ("e2e_",)}


@dataclass(frozen=True)
class ReferenceCase:
    """One case folder: manifest, tensors, checkpoint."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def manifest(self) -> dict[str, Any]:
        return json.loads((self.folder / "manifest.json").read_text())

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors of one file; skips where the small set leaves the file out."""
        from safetensors.torch import load_file

        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            pytest.skip(f"{path.name} of {self.folder.name} is not in the small set; it needs ../shared/reference")
        return load_file(path)


def assert_near(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Absolute tolerance, relative to the largest entry where that exceeds 1."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    limit = tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=limit)


@pytest.fixture
def kernel_device() -> Iterator[str]:
    """Where Triton kernels run here. Every `torch.empty` under this fixture comes filled with NaN or huge numbers."""
    pytest.importorskip("triton", reason="Triton is not installed (it has no wheel for this platform)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        from triton.language.standard import zeros
        from triton.runtime.interpreter import InterpretedFunction

        if not isinstance(zeros, InterpretedFunction):
            pytest.fail("Triton was imported before TRITON_INTERPRET=1 was set; set it in the environment of pytest")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield device
    torch.use_deterministic_algorithms(before)


@pytest.fixture(name="assert_near")
def _assert_near():
    return assert_near


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, prefixes in KINDS.items():
        if name not in metafunc.fixturenames:
            continue
        folders = [path for path in sorted(VECTORS.iterdir()) if path.name.startswith(prefixes)]
        cases = [pytest.param(ReferenceCase(path), id=f"small-{path.name}") for path in folders]
        if REFERENCE.is_dir():
            full = [path for path in sorted(REFERENCE.iterdir()) if path.name.startswith(prefixes)]
            cases += [pytest.param(ReferenceCase(path), id=path.name) for path in full]
        else:
            why = f"the full reference set is not at {REFERENCE.parent.name}/{REFERENCE.name} beside the repository"
            cases.append(pytest.param(None, id="full-set", marks=pytest.mark.skip(reason=why)))
        metafunc.parametrize(name, cases)


@pytest.fixture(scope="session")
def built_way(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], NativeRows]:
    """Builds the row ops as a generation of CPUs has them, once a session; skips where they cannot run here."""
    folder, built = tmp_path_factory.mktemp("ways"), dict[str, NativeRows]()

    def build(name: str) -> NativeRows:
        if name not in built:
            try:
                built[name] = build_way(name, folder)
            except LookupError as error:
                pytest.skip(str(error))
        return built[name]

    return build
