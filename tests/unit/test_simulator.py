"""The simulator against what can be worked out by hand, against the paper's figures, and its speed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dspec_lab.scheduler.cost_table import CostTable, DraftCost
from dspec_lab.scheduler.gating import ProbePurse
from dspec_lab.scheduler.history import HOLD, AcceptanceHistory
from dspec_lab.scheduler.policies import Delayed, EarlyStop, FixedLength, FullBlock, Oracle
from dspec_lab.serving.acceptance import Domain, ParametricAcceptance, TraceAcceptance
from dspec_lab.serving.paper_fit import FITS, TAU_MTP, column, fixed_curve, large_batch_curve, paper_rows
from dspec_lab.serving.presets import PRESETS, load_preset
from dspec_lab.serving.roofline import GPUS, QWEN3_4B, roofline_table
from dspec_lab.serving.simulator import SimConfig, simulate
from dspec_lab.serving.sweep import against_paper, sweep
from dspec_lab.serving.workload import ClosedLoop, OpenLoop, burst_arrivals, poisson_arrivals

TABLE = CostTable(rows=(1, 400), seconds=(0.010, 0.050), draft=DraftCost(fixed_s=0.001, per_request_s=0.0001))


def steady(chance: float, gamma: int = 3, **options) -> ParametricAcceptance:
    """Every draft accepted with the same chance."""
    logit = float(np.log(chance / (1 - chance)))
    return ParametricAcceptance((Domain(name="all", logit_G=(logit,) * gamma, **options),))


def run(**options):
    settings = dict(load=ClosedLoop(concurrency=20), policy=FullBlock(), table=TABLE, acceptance=steady(0.8))
    return simulate(SimConfig(**{**settings, "max_rounds": 200, "tokens": 400, **options}))


def test_a_steady_load_is_what_the_formulas_say():
    found = run()
    tau = 1 + 0.8 + 0.8**2 + 0.8**3
    seconds = float(TABLE.verify_s_N[80]) + 0.001 + 20 * 0.0001
    assert found.round_s == pytest.approx(seconds, rel=1e-9)
    assert found.budget == 4 and found.drafted == 3 and found.concurrency == pytest.approx(20)
    assert found.accepted_length == pytest.approx(tau, rel=0.03)
    assert found.throughput_tok_per_s == pytest.approx(20 * found.accepted_length / seconds, rel=1e-9)
    assert found.user_p50_tok_per_s == pytest.approx(tau / seconds, rel=0.05)
    assert found.wasted_rows == pytest.approx(1 - tau / 4, abs=0.02)


def test_plain_decoding_drafts_nothing_and_a_fixed_length_of_0_pays_for_drafts():
    plain, none = run(policy=None), run(policy=FixedLength(0))
    assert plain.accepted_length == none.accepted_length == 1 and plain.budget == none.budget == 1
    assert plain.drafted == 0 and none.drafted == 3
    assert none.round_s == pytest.approx(plain.round_s + 0.003)


def test_every_request_gets_its_tokens_and_no_more():
    found = run(load=OpenLoop(arrivals_s=np.zeros(7), max_active=3), tokens=50, lengths="fixed", max_rounds=10_000)
    assert found.requests_ended == 7 and found.tokens == 350


def test_an_open_loop_waits_in_line_and_skips_idle_time():
    rng = np.random.default_rng(1)
    crowd = run(load=OpenLoop(arrivals_s=burst_arrivals(5.0, 40, 20, rng), max_active=4), tokens=60, max_rounds=10_000)
    calm = run(load=OpenLoop(arrivals_s=poisson_arrivals(0.2, 10, rng), max_active=4), tokens=60, max_rounds=10_000)
    assert crowd.requests_ended == 40 and calm.requests_ended == 10
    assert crowd.wait_p95_s > 0.5 and calm.wait_p95_s < 0.05
    assert calm.concurrency < 1.5 < crowd.concurrency


def test_arrivals_have_the_rate_asked_for():
    rng = np.random.default_rng(2)
    assert poisson_arrivals(4.0, 4000, rng)[-1] == pytest.approx(1000, rel=0.06)
    bursts = burst_arrivals(4.0, 4000, 8, rng)
    assert bursts[-1] == pytest.approx(1000, rel=0.15) and (np.diff(bursts) == 0).mean() == pytest.approx(
        7 / 8, abs=0.01
    )
    for bad in ((0.0, 3), (1.0, 0)):
        with pytest.raises(ValueError):
            poisson_arrivals(*bad, rng)


def test_scheduling_beats_every_fixed_length_where_confidences_vary():
    table = CostTable(rows=(1, 400), seconds=(0.010, 0.100))
    acceptance = steady(0.7, 5, round_sd=1.2, position_sd=1.2)
    options = dict(table=table, acceptance=acceptance, load=ClosedLoop(concurrency=60), max_rounds=120)
    fixed = max(run(policy=FixedLength(n), **options).throughput_tok_per_s for n in range(6))
    bound = run(policy=Oracle(), **options).throughput_tok_per_s
    for policy in (EarlyStop(table), Delayed(table)):
        assert 1.02 * fixed < run(policy=policy, **options).throughput_tok_per_s < bound


def test_gating_stops_drafting_that_does_not_pay_and_looks_again():
    dear = CostTable(rows=(1, 400), seconds=(0.010, 0.050), draft=DraftCost(per_request_s=0.010))
    without, gated = (run(table=dear, acceptance=steady(0.3), gate=gate, max_rounds=200) for gate in (False, True))
    assert gated.throughput_tok_per_s > 1.5 * without.throughput_tok_per_s
    assert 0 < gated.drafted < 0.5, "a skipped request drafts again now and then"
    cheap = CostTable(rows=(1, 400), seconds=(0.010, 0.050), draft=DraftCost(per_request_s=1e-5))
    assert run(table=cheap, gate=True).drafted == 3


@pytest.mark.parametrize("tokens", [2, 40])
def test_rounds_of_ended_requests_teach_too(tokens, monkeypatch):
    taught = list[int]()
    real = AcceptanceHistory.settle

    def settle(self, standing, lens_B, *rest):
        taught.append(len(lens_B))
        real(self, standing, lens_B, *rest)

    monkeypatch.setattr(AcceptanceHistory, "settle", settle)
    found = run(load=ClosedLoop(concurrency=4), total=40, tokens=tokens, lengths="fixed", learn=True)
    assert found.requests_ended == 40
    # all but those of the last rounds, after which nobody asks
    assert found.request_rounds - 4 * HOLD <= sum(taught) <= found.request_rounds


def test_a_probe_is_learned_from_in_the_next_round(monkeypatch):
    drafted, settled_at = list[int](), list[int]()
    real, add = AcceptanceHistory.settle, ProbePurse.add

    def settle(self, *args):
        settled_at.append(len(drafted))
        real(self, *args)

    def noted(self, *args):
        found_B = add(self, *args)
        drafted.append(int(found_B.sum()))
        return found_B

    monkeypatch.setattr(AcceptanceHistory, "settle", settle)
    monkeypatch.setattr(ProbePurse, "add", noted)
    dear = CostTable(rows=(1, 400), seconds=(0.010, 0.400), draft=DraftCost(fixed_s=0.0001))
    run(load=ClosedLoop(concurrency=20), acceptance=steady(0.02), table=dear, gate=True, tokens=10_000)
    probed_at = [at for at, count in enumerate(drafted) if count == 1][3:-1]
    assert len(probed_at) > 3 and all(b - a > HOLD for a, b in itertools.pairwise(probed_at))
    assert {at + 1 for at in probed_at} <= set(settled_at)


def test_a_capacity_rests_on_chances_as_they_are_recalled(monkeypatch):
    assert run(policy=Delayed(TABLE), learn=True).budget > 1
    monkeypatch.setattr("dspec_lab.serving.simulator.recalled", lambda old_BG, expected_BG: np.zeros_like(old_BG))
    assert run(policy=Delayed(TABLE), learn=True).budget == 1


def test_wrong_confidences_cost_throughput():
    table = CostTable(rows=(1, 400), seconds=(0.010, 0.100))
    good, bad = (
        run(
            table=table, policy=EarlyStop(table), load=ClosedLoop(concurrency=60), max_rounds=120,
            acceptance=steady(0.6, 5, position_sd=1.5, confidence_bias=bias),
        ).throughput_tok_per_s
        for bias in (0.0, 4.0)
    )  # fmt: skip
    assert good > 1.05 * bad


def trace_row(request: str, round_: int, context: int, chances: list[float]) -> dict:
    return {
        "request_id": request, "round": round_, "context_tokens": context,
        "accept_prob": chances, "confidence": chances,
    }  # fmt: skip


def test_a_trace_is_replayed_by_place_in_the_text():
    rows = [trace_row("a", 0, 10, [1.0, 1.0]), trace_row("a", 1, 13, [0.0, 0.0]), trace_row("a", 2, 14, [1.0, 0.0])]
    law = TraceAcceptance(rows)
    state = law.start(1, np.random.default_rng(0))
    state.begin(np.array([0]))
    at = [state.draw(np.array([0]), np.array([n]))[1][0].tolist() for n in range(6)]
    # the traced text is 5 tokens long here (10 to 14), then it starts over
    assert at == [[1, 1], [1, 1], [1, 1], [0, 0], [1, 0], [1, 1]]
    found = run(acceptance=law, policy=FullBlock(), max_rounds=500)
    # rounds begin at 0 (+3), 3 (+1), 4 (+2, into the next lap's token 1), 1, ...
    assert 1.5 < found.accepted_length < 2.5
    with pytest.raises(ValueError, match="no drafted position"):
        TraceAcceptance([trace_row("a", 0, 1, [])])
    with pytest.raises(ValueError, match="gamma 3 is more"):
        TraceAcceptance(rows, gamma=3)


def test_a_simulation_repeats_with_its_seed():
    assert run(seed=3) == run(seed=3) and run(seed=3) != run(seed=4)


def test_what_cannot_be_simulated_is_refused():
    flat = CostTable(rows=(1, 400), seconds=(0.01, 0.01))
    for options, words in (
        (dict(policy=EarlyStop(flat), table=flat), "can trim nothing"),
        (dict(policy=None, gate=True), "nothing to gate"),
        (dict(tokens=0), "at least 1, got 0"),
        (dict(load=ClosedLoop(concurrency=500)), "500 requests need as many"),
    ):
        with pytest.raises(ValueError, match=words):
            run(**options)
    with pytest.raises(ValueError, match="unknown preset 'v5'"):
        load_preset("v5")
    with pytest.raises(ValueError, match="add up to 1, got 2"):
        ParametricAcceptance((Domain(name="a", logit_G=(0.0,)), Domain(name="b", logit_G=(0.0,))))


@pytest.mark.parametrize(("model", "tolerance"), [("v4-flash", 0.15), ("v4-pro", 0.25)])
def test_the_fitted_numbers_give_the_papers_curves(model, tolerance):
    fit, sla = FITS[model], {"v4-flash": 80.0, "v4-pro": 35.0}[model]
    requests_N = np.arange(5.0, 260.0, 5.0)
    ours = large_batch_curve(fit.survival(), fit.table(), requests_N)
    mtp = fixed_curve(TAU_MTP, 2, fit.table(), requests_N)
    drawn = paper_rows("fig8_budget", model=model, method="dspark", kind="fit")
    off = np.interp(column(drawn, "concurrency"), requests_N, ours.budget_N) - column(drawn, "verification_budget")
    assert np.abs(off).max() < 0.5
    anchor = next(r for r in paper_rows("fig7_anchors", model=model) if float(r["sla_tps_per_user"]) == sla)
    base = mtp.throughput_at(sla)
    gain, speed = ours.throughput_at(sla) / base - 1, ours.user_rate_at(base) / sla - 1
    assert gain == pytest.approx(float(anchor["printed_throughput_gain_pct"]) / 100, rel=tolerance)
    assert speed == pytest.approx(float(anchor["printed_tps_gain_pct"]) / 100, rel=tolerance)
    assert base == pytest.approx(float(anchor["mtp_throughput_per_gpu"]), rel=0.1)


def test_the_event_simulation_agrees_with_the_paper_too():
    preset = load_preset("v4-flash")
    points = sweep(preset, [Delayed(preset.table)], (60, 100, 200, 240), request_rounds=12_000)
    found = against_paper(points, preset, "delayed")
    assert abs(found["throughput_gain"]["relative_error"]) < 0.15, found
    assert abs(found["speed_gain"]["relative_error"]) < 0.15, found
    assert found["budget_largest_error_tokens"] < 0.5
    with pytest.raises(ValueError, match="no point of the policy"):
        against_paper(points, preset, "early-stop")


def test_rooflines_bend_where_computing_overtakes_reading():
    for name, gpu in GPUS.items():
        table = roofline_table(gpu, context_tokens=0, launch_s=0.0)
        bend = table.run["bend_rows"]
        read_s = QWEN3_4B.parameters * 2 / gpu.bytes_per_s
        assert bend == pytest.approx(gpu.flops_per_s / gpu.bytes_per_s, abs=1), name
        assert table.verify_s_N[1] == pytest.approx(read_s) and table.verify_s_N[bend] == pytest.approx(read_s)
        assert table.verify_s_N[8 * bend] == pytest.approx(8 * read_s, rel=0.01)
    assert {"h100", "h200", "a6000", "cpu"} < set(PRESETS)


def test_many_requests_at_once():
    preset = load_preset("v4-flash")
    config = SimConfig(
        load=ClosedLoop(concurrency=500), policy=Delayed(preset.table), table=preset.table,
        acceptance=preset.acceptance, max_rounds=40, warm_up=0.0,
    )  # fmt: skip
    assert simulate(config).request_rounds == 20_000
