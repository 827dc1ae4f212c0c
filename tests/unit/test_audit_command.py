"""`dspec audit` passes, catches every planted fault, and says so in its exit status and JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def audit(tmp_path: Path, *options: str) -> tuple[int, dict, str]:
    """Exit status, JSON and error text of one run. A process of its own, without the tests' type checks: they make
    enumerations many times slower."""
    out = tmp_path / "audit.json"
    done = subprocess.run(
        [sys.executable, "-m", "dspec_lab.cli.main", "audit", "--no-model", "--json", str(out), *options],
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, json.loads(out.read_text()) if out.exists() else {}, done.stderr


def test_the_quick_audit_passes_and_catches_every_planted_fault(tmp_path: Path) -> None:
    status, report, errors = audit(tmp_path, "--quick")
    assert status == 0, errors
    rows = report["rows"]
    honest = [row for row in rows if row["expected"] != "FAIL"]
    planted = [row for row in rows if row["expected"] == "FAIL"]
    assert len(honest) >= 30 and len(planted) >= 10
    assert {row["verdict"] for row in planted} == {"FAIL"}
    assert "FAIL" not in {row["verdict"] for row in honest}
    assert "pass" in {row["verdict"] for row in honest}
    caught = " ".join(row["subject"] for row in planted)
    for fault in ("unfiltered q", "greedy match", "residual without q", "bonus from q", "KV off by one", "look-ahead"):
        assert fault in caught


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--drafters", "nonsense"), "nonsense"), (("--seed", "-1"), "-1")],
)
def test_bad_input_is_one_line_that_names_it(tmp_path: Path, options: tuple[str, ...], named: str) -> None:
    status, report, errors = audit(tmp_path, *options)
    assert status == 2 and not report
    assert named in errors and errors.count("\n") == 1
