"""The benchmark script: it says when there is no GPU, and its checks and baselines run at small sizes here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspec_lab.kernels import dispatch

SCRIPT = Path(__file__).parents[2] / "kernels" / "benchmarks" / "bench_kernels.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_case_passes_its_check_and_its_baselines_run(kernel_device, bench):
    ops = set()
    for case in bench.cases(kernel_device, small=True):
        case.check()
        for baseline in case.baselines.values():
            baseline()
        assert case.moved_bytes > 0 and case.compiled is not None or case.op == "compact_kv"
        ops.add(case.op)
    assert len(ops) == 7


def test_a_wrong_kernel_is_not_timed(kernel_device, bench, monkeypatch):
    case = bench.compact_case(kernel_device, 2, 1, 1, 8, 5, torch.float32)
    monkeypatch.setattr(dispatch, "compact_kv", lambda *args, **options: None)
    with pytest.raises(AssertionError, match="a row moved wrongly"):
        case.check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "bench_kernels: no GPU here, so there is nothing to time\n"
