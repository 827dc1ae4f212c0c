"""The benchmark script: it says when there is no GPU, and its checks and baselines run at small sizes here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspec_lab.bench import kernel_traffic
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


def test_its_bytes_are_those_that_the_package_counts(bench):
    fp32 = torch.float32
    for case, counted in (
        (bench.accept_case("cpu", 2, 3, 50, fp32, logits=False), kernel_traffic.accept_residual_traffic(2, 3, 50)),
        (bench.markov_case("cpu", 4, 60, 8, fp32), kernel_traffic.markov_step_traffic(4, 60, 8, 4)),
        (
            bench.attention_case("cpu", 1, 3, 80, 2, 1, 16, fp32),
            kernel_traffic.ragged_attention_traffic(1, 4, 80, 2, 1, 16, 4),
        ),
        (bench.compact_case("cpu", 2, 3, 2, 8, 5, fp32), kernel_traffic.compact_kv_traffic(2, 5, 3, 2, 8, 4)),
        (bench.tv_case("cpu", 2, 70, fp32), kernel_traffic.tv_loss_traffic(2, 70, 4)),
    ):
        assert case.moved_bytes == counted.fused_bytes, case.op


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
