"""`dspec simulate`, `profile` and `serve-bench`: bad input in one line, and results as JSON."""

from __future__ import annotations

import json

import pytest

from dspec_lab.calibration.calibration import fit_calibration
from dspec_lab.calibration.synthetic import synthetic_rounds
from dspec_lab.cli.main import main
from dspec_lab.scheduler.cost_table import CostTable, save_table


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate"], "name a --preset"),
        (["simulate", "--preset", "v9"], "unknown preset 'v9'"),
        (["simulate", "--preset", "v4-flash", "--policies", "best"], "unknown policy 'best'"),
        (["simulate", "--preset", "v4-flash", "--policies", "oracle"], "not lossless"),
        (["simulate", "--preset", "v4-flash", "--requests", "4,x"], "got 'x'"),
        (["simulate", "--preset", "v4-flash", "--requests", "9999"], "9999 requests need as many"),
        (["simulate", "--preset", "v4-flash", "--seed", "-1"], "seed must be 0 or more, got -1"),
        (["simulate", "--cost-table", "none.json"], "no cost table none.json"),
        (["profile", "--rows", "0"], "row counts must be whole and at least 1, got '0'"),
        (["profile", "--repeats", "0"], "repeats must be at least 1, got 0"),
        (["profile", "--drafter", "nobody"], "unknown drafter 'nobody'"),
        (["serve-bench", "--drafter", "nobody"], "unknown drafter 'nobody'"),
        (["serve-bench", "--drafter", "lookahead", "--burst", "4"], "give --rate too"),
        (["serve-bench", "--drafter", "lookahead", "--rate", "0"], "above 0 a second, got 0"),
        (["serve-bench", "--drafter", "lookahead", "--policies", "retrospective"], "not lossless"),
        (["serve-bench", "--drafter", "lookahead", "--policies", "full", "--cost-table", "x"], "looks at it"),
        (["serve-bench", "--drafter", "lookahead", "--policies", "best+gate"], "unknown policy 'best'"),
        (["serve-bench", "--drafter", "lookahead", "--calibration", "none.json"], "none.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_line(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error


def test_a_simulation_from_an_own_table_as_json(tmp_path, capsys):
    path = save_table(tmp_path / "t.json", CostTable(rows=(1, 64), seconds=(0.01, 0.05), name="toy"))
    arguments = ["simulate", "--cost-table", str(path), "--policies", "full,delayed", "--requests", "2,4"]
    assert main([*arguments, "--request-rounds", "200", "--json", "-"]) == 0
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert [(p["policy"], p["requests"]) for p in found["points"]] == [
        ("full block", 2), ("full block", 4), ("delayed", 2), ("delayed", 4),
    ]  # fmt: skip
    assert all(p["throughput_tok_per_s"] > 0 and p["lossless"] for p in found["points"])
    assert "paper" not in found and found["run"]["settings"]["policies"] == "full,delayed"
    assert "delayed" in out.err


def test_a_flat_table_is_refused(tmp_path, capsys):
    path = save_table(tmp_path / "flat.json", CostTable(rows=(1, 64), seconds=(0.01, 0.01)))
    assert main(["simulate", "--cost-table", str(path), "--policies", "early-stop"]) == 2
    assert "can trim nothing" in capsys.readouterr().err


@pytest.fixture
def calibration_file(tmp_path):
    rounds = synthetic_rounds(600, (1.5, 1.5, 1.5), prompts=12, drafter="dspark")
    return str(fit_calibration(rounds, resamples=100).save(tmp_path / "c.json"))


def test_serve_bench_takes_a_calibration_only_where_it_is_of_use(calibration_file, capsys):
    for arguments, words in (
        (["--drafter", "lookahead"], "was fitted for the drafter 'dspark', not for lookahead"),
        (["--drafter", "dspark", "--policies", "full,fixed-2"], "no policy of full,fixed-2 looks at confidences"),
        (["--drafter", "dspark", "--gamma", "5"], "calibrates 3 positions, gamma is 5"),
        # without --gamma the drafter's reach is taken, and the next check speaks
        (
            ["--drafter", "dspark", "--policies", "threshold-0.5", "--cost-table", "t"],
            "no policy of threshold-0.5 looks",
        ),
    ):
        assert main(["serve-bench", *arguments, "--calibration", calibration_file]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, error
