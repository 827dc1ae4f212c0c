"""The simulator beside the real engine, point by point, on a random decoder of a few tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dspec_lab.cli.main import main
from dspec_lab.config import DecodeConfig
from dspec_lab.core.files import write_json
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.scheduler.cost_table import CostTable, DraftCost
from dspec_lab.scheduler.policies import Delayed, EarlyStop, FixedLength, FullBlock
from dspec_lab.serving.compare import compare_policies
from dspec_lab.serving.measured import measure_acceptance, parse_measured
from dspec_lab.serving.validate import validate
from dspec_lab.serving.workload import ClosedLoop
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS, tiny_decoder

TARGET = tiny_decoder(7, seed=1)
PROMPTS = [[1, 2, 1, 2, 1], [3, 1, 4, 1], [5], [2, 6, 0, 2, 6]]
DOMAINS = ["math", "chat", "chat", "math"]
CONFIG = DecodeConfig(gamma=3, max_new_tokens=14, temperature=0.0)
TABLE = CostTable(rows=(1, 64), seconds=(0.010, 0.100), draft=DraftCost(per_request_s=0.0004, per_token_s=0.0002))
WAVES = 2


def record_of(drafter) -> dict:
    policies = [FullBlock(), FixedLength(1), FixedLength(2), EarlyStop(TABLE), Delayed(TABLE)]
    entries = compare_policies(
        TARGET, PROMPTS, CONFIG, drafter, policies, gated=policies[3:], table=TABLE, repeats=1,
        loads={n: ClosedLoop(concurrency=n) for n in (1, 3)}, total=lambda places: WAVES * places,
    )  # fmt: skip
    measured = measure_acceptance(TARGET, drafter, PROMPTS, DOMAINS, CONFIG)
    settings = {"rate": None, "max_new_tokens": CONFIG.max_new_tokens}
    return {
        "rows": [entry.as_dict() for entry in entries],
        "cost_table": TABLE.as_dict(),
        "acceptance": measured.as_dict(),
        "run": {"settings": settings, "model": TARGET.name},
    }


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(json.dumps(record_of(NEURAL_DRAFTERS["dspark"](TARGET)), allow_nan=False))


def test_what_is_measured_at_every_token_is_what_rounds_do():
    drafter = PromptLookupDrafter()
    measured = measure_acceptance(TARGET, drafter, PROMPTS, DOMAINS, CONFIG)
    for ids, text in zip(PROMPTS, measured.texts, strict=True):
        run = generate(TARGET, drafter, ids, CONFIG)
        at, found, wanted = 0, [], []
        for one in run.rounds:
            found.append(text.accepted[at])
            wanted.append(one.num_accepted)
            at += one.num_committed
        assert found == wanted and at == len(text.accepted) == len(run.token_ids) - 1
    assert sum(map(sum, (text.accepted for text in measured.texts))) > 0
    assert parse_measured(json.loads(json.dumps(measured.as_dict()))) == measured
    shares = measured.by_domain()
    assert list(shares) == ["math", "chat"] and shares["math"]["texts"] == 2
    with pytest.raises(ValueError, match="temperature 0, got 1"):
        measure_acceptance(TARGET, drafter, PROMPTS, DOMAINS, replace(CONFIG, temperature=1.0))


def test_the_simulator_repeats_the_engines_rounds_and_reports_its_error(record):
    points = validate(record)
    assert [(p.policy, p.requests) for p in points] == [(row["policy"], row["requests"]) for row in record["rows"]]
    for point in points:
        # the same rounds: only their times are predicted
        if "delayed" not in point.policy and "early" not in point.policy:
            assert point.simulated_accepted_length == pytest.approx(point.engine_accepted_length, abs=1e-12), point
            assert point.simulated_budget == pytest.approx(point.engine_budget, abs=1e-12), point
        assert point.simulated_accepted_length == pytest.approx(point.engine_accepted_length, rel=0.1), point
        assert point.simulated_budget == pytest.approx(point.engine_budget, rel=0.1), point
        wanted = point.simulated_tok_per_s / point.engine_tok_per_s - 1
        assert point.throughput_error == pytest.approx(wanted)
        seconds = 1e-3 * point.simulated_round_ms
        mean_requests = point.simulated_tok_per_s * seconds / point.simulated_accepted_length
        assert mean_requests == pytest.approx(point.requests)
    assert {p.policy for p in points} >= {"plain", "early-stop + gate", "delayed + gate"}


def test_the_command_prints_the_error_of_each_point(record, tmp_path, capsys):
    path = write_json(tmp_path / "serve.json", record)
    assert main(["simulate", "--validate", str(path), "--json", "-"]) == 0
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert len(found["points"]) == len(record["rows"]) and "off by" in out.err
    errors = sorted(abs(point["throughput_error"]) for point in found["points"])
    assert found["largest_error"] == errors[-1]
    left, pace = 0.0, found["pace_by_requests"]
    for requests, factor in pace.items():
        ratios = [1 + p["throughput_error"] for p in found["points"] if p["requests"] == int(requests)]
        assert min(ratios) <= factor <= max(ratios)
        left = max(left, *(abs(ratio / factor - 1) for ratio in ratios))
    assert found["largest_error_left"] == pytest.approx(left) and found["median_error_left"] <= left


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"acceptance": None}, "holds no acceptance"),
        ({"cost_table": None}, "holds no cost_table"),
        ({"acceptance": {"texts": []}}, "no measured acceptance"),
        ({"run": {"settings": {"rate": 2.0}}}, "only closed loops"),
    ],
    ids=str,
)
def test_a_record_that_lacks_something_is_refused(record, change, words, tmp_path, capsys):
    path = write_json(tmp_path / "serve.json", {**record, **change})
    assert main(["simulate", "--validate", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error


def test_validation_takes_everything_from_its_record(capsys):
    assert main(["simulate", "--validate", "x.json", "--preset", "v4-flash"]) == 2
    assert "leave out --preset" in capsys.readouterr().err
