"""The record of a run can be written as JSON and says what made a number: settings, versions, machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
import torch

from dspec_lab import __version__
from dspec_lab.bench import record
from dspec_lab.bench.record import usable_cores, wanted_threads


@dataclass(frozen=True, kw_only=True)
class Settings:
    gamma: int = 7
    file: Path = Path("p.jsonl")
    domains: tuple[str, ...] = ("math", "code")


def test_a_record_holds_settings_seed_versions_and_machine():
    made = record.run_record(Settings(), 3, dtype="bf16", model="tiny")
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["settings"] == {"gamma": 7, "file": "p.jsonl", "domains": ["math", "code"]}
    assert (made["seed"], made["dtype"], made["model"]) == (3, "bf16", "tiny")
    assert made["versions"]["torch"] == torch.__version__ and made["versions"]["dspec_lab"] == __version__
    assert made["threads"] == torch.get_num_threads()
    assert (made["gpu"] is not None) == torch.cuda.is_available()
    assert made["cpu"] and made["cpu_cores"] >= 1
    assert datetime.fromisoformat(made["date_utc"]).tzinfo is not None


def test_a_library_that_is_not_installed_is_none(monkeypatch):
    monkeypatch.setattr(record, "LIBRARIES", ("torch", "no-such-library"))
    assert record.versions()["no-such-library"] is None


def test_a_record_does_not_load_torch():
    code = (
        "import sys\nfrom dspec_lab.bench.record import run_record\n"
        "made = run_record({}, None)\nassert 'torch' not in sys.modules\n"
        "assert made['threads'] is None and made['versions']['torch']"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_json_cannot_hold_is_refused_by_type():
    with pytest.raises(TypeError, match="Tensor cannot be recorded"):
        record.run_record({"weights": torch.ones(2)}, None)


def test_threads_are_those_of_the_environment_or_one_for_each_core(monkeypatch):
    for text, threads in (("3", 3), ("2,1", 2), ("", usable_cores())):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert wanted_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    with pytest.raises(ValueError, match="OMP_NUM_THREADS must be .* got '0'"):
        wanted_threads()
