"""Which implementation runs, what happens without Triton, and that every kernel compiles for a GPU without one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspec_lab.kernels import dispatch

COMPILE = Path(__file__).with_name("compile_kernels.py")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    base = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], env=base | environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_auto_takes_torch_on_the_cpu_and_unknown_names_are_refused():
    x = torch.zeros(2, 3)
    assert dispatch.resolve("auto", x, None) == "torch"
    assert dispatch.resolve("torch", x) == "torch"
    with pytest.raises(ValueError, match="impl must be 'auto', 'torch' or 'triton', got 'cuda'"):
        dispatch.resolve("cuda", x)


def test_triton_never_falls_back(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    dispatch.triton_missing.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="impl='triton' is not possible: triton and dspec_kernels not installed"):
            dispatch.tv_loss(torch.zeros(1, 4), torch.zeros(1, 4), impl="triton")
        assert float(dispatch.tv_loss(torch.zeros(1, 4), torch.zeros(1, 4))) == 0
    finally:
        dispatch.triton_missing.cache_clear()


def test_kernels_refuse_what_they_cannot_compute(kernel_device):
    wide = torch.zeros(2, 4, dtype=torch.float64, device=kernel_device)
    with pytest.raises(TypeError, match="draft_NV must be float32, float16 or bfloat16, got torch.float64"):
        dispatch.tv_loss(wide, wide, impl="triton")
    rows = torch.zeros(4, 2, device=kernel_device)
    with pytest.raises(ValueError, match="draft_NV must be contiguous along its last axis"):
        dispatch.tv_loss(rows.T, rows.T, impl="triton")


def test_importing_the_dispatcher_loads_no_triton_and_the_kernels_need_no_driver():
    code = "import sys, dspec_lab.kernels.dispatch; assert not any(m.startswith('triton') for m in sys.modules)"
    assert run_python(code).returncode == 0
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (it has no wheel for this platform)")
    files = sorted(path.stem for path in Path(importlib.util.find_spec("dspec_kernels").origin).parent.glob("*.py"))
    assert "tv_loss" in files
    code = "".join(f"import dspec_kernels.{name}\n" for name in files if name != "__init__")
    # an import that compiled, tuned or asked for a device would fail or leave a compiled kernel behind
    code += "import triton\nassert triton.runtime.driver._active is None\n"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_without_gpu_or_interpreter_a_kernel_says_so(kernel_device):
    if kernel_device == "cuda":
        pytest.skip("there is a GPU")
    code = (
        "import torch\nfrom dspec_lab.kernels import dispatch\n"
        "try:\n    dispatch.tv_loss(torch.zeros(1, 4), torch.zeros(1, 4), impl='triton')\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    assert "a Triton kernel got CPU tensors: it needs a GPU" in run_python(code).stdout


def test_every_kernel_compiles_for_a_gpu(kernel_device, tmp_path):
    """The interpreter accepts what the compiler refuses, so each launch is also compiled, down to machine code."""
    done = run_python(COMPILE.read_text(), TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = set(done.stdout.split())
    import dspec_kernels

    source = "".join(path.read_text() for path in Path(dspec_kernels.__file__).parent.glob("*.py"))
    kernels = {
        line.split("def ")[1].split("(")[0]
        for line in source.splitlines()
        if line.startswith("def _") and "_kernel(" in line
    }
    assert len(kernels) >= 12
    assert kernels == compiled
