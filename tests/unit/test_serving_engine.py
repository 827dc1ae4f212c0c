"""The real batch under load, on a random decoder of a few tokens: texts, counts, policies, gating, the profile."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from dspec_lab.config import DecodeConfig
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.scheduler import batch as batch_module
from dspec_lab.scheduler.batch import BatchScheduler
from dspec_lab.scheduler.cost_table import CostTable, DraftCost
from dspec_lab.scheduler.gating import ProbePurse, draft_lengths
from dspec_lab.scheduler.history import HOLD, AcceptanceHistory, Standing
from dspec_lab.scheduler.policies import Delayed, EarlyStop, FixedLength, FullBlock, Retrospective
from dspec_lab.serving import profile
from dspec_lab.serving.compare import PLAIN, against_fixed, compare_policies, take_turns
from dspec_lab.serving.engine import LoadRun, run_load, serve
from dspec_lab.serving.profile import fit_draft_cost, profile_target, time_target
from dspec_lab.serving.workload import ClosedLoop, OpenLoop
from dspec_lab.verifier import ragged
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.ragged import BatchRequest, RaggedBatch
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS, tiny_decoder

TARGET = tiny_decoder(7, seed=1)
DSPARK = NEURAL_DRAFTERS["dspark"](TARGET)
PROMPTS = [[1, 2], [3, 1, 4, 1], [5], [2, 6, 0]]
CONFIG = DecodeConfig(gamma=3, max_new_tokens=12, temperature=0.0)
SHORT = replace(CONFIG, max_new_tokens=6)
DEAR = CostTable(rows=(1, 64), seconds=(0.010, 0.400), draft=DraftCost(per_request_s=0.001))
CHEAP = CostTable(rows=(1, 64), seconds=(0.010, 0.012))
PLAIN_TEXTS = [generate(TARGET, None, ids, CONFIG).token_ids for ids in PROMPTS]


def same_texts(run) -> bool:
    return all(
        text.token_ids == PLAIN_TEXTS[int(name) % len(PROMPTS)] for name, text in run.generations.items()
    )  # fmt: skip


@pytest.mark.parametrize("policy", [None, FixedLength(0), FixedLength(2), EarlyStop(DEAR), Delayed(CHEAP)], ids=str)
def test_texts_are_plain_decodings_and_the_counts_add_up(policy):
    run = run_load(
        TARGET, PROMPTS, CONFIG, ClosedLoop(concurrency=3), drafter=DSPARK, policy=policy, table=DEAR, total=5
    )
    assert same_texts(run) and list(run.generations) == ["0", "1", "2", "3", "4"]
    found = run.summary
    assert found.requests_ended == 5
    assert found.tokens == sum(len(text.token_ids) - 1 for text in run.generations.values())
    assert found.request_rounds == sum(record.requests for record in run.rounds)
    assert found.budget * found.request_rounds == pytest.approx(sum(record.rows for record in run.rounds))
    if policy is None:
        assert found.drafted + 1 == pytest.approx(found.budget) and not run.decisions
    else:
        admitted = sum(decision.admitted for decision in run.decisions)
        assert admitted == sum(record.rows - record.requests for record in run.rounds)
    if policy == FixedLength(0):
        assert found.budget == 1 and found.most_starved_rounds == max(map(len, PLAIN_TEXTS)) - 1


def test_sampled_texts_do_not_depend_on_the_neighbours():
    config = replace(CONFIG, temperature=1.0, seed=4)
    alone = run_load(TARGET, PROMPTS, config, ClosedLoop(concurrency=1), drafter=DSPARK, policy=FullBlock(), total=4)
    crowd = run_load(TARGET, PROMPTS, config, ClosedLoop(concurrency=4), drafter=DSPARK, policy=FullBlock(), total=4)
    assert [t.token_ids for t in alone.generations.values()] == [t.token_ids for t in crowd.generations.values()]


def test_an_open_loop_serves_all_that_arrive_and_keeps_to_its_places():
    load = OpenLoop(arrivals_s=np.array([0.0, 0.0, 0.0, 1e3]), max_active=2)
    run = run_load(TARGET, PROMPTS, CONFIG, load, drafter=DSPARK)
    assert same_texts(run) and len(run.generations) == 4
    assert max(record.requests for record in run.rounds) == 2
    # the last comes after a long pause, which is skipped and in nobody's wait
    assert run.summary.wait_p95_s < 100


def test_plain_decoding_in_a_batch():
    run = run_load(TARGET, PROMPTS, CONFIG, ClosedLoop(concurrency=2), drafter=None, total=4)
    assert same_texts(run) and run.summary.budget == 1 and run.summary.accepted_length == 1
    with pytest.raises(ValueError, match="nothing to decide"):
        run_load(TARGET, PROMPTS, CONFIG, ClosedLoop(concurrency=2), drafter=None, policy=FullBlock())


def test_gating_stops_drafting_where_it_is_dear():
    dear = replace(CHEAP, draft=DraftCost(per_request_s=10.0))
    kept = run_load(TARGET, PROMPTS, CONFIG, ClosedLoop(concurrency=3), drafter=DSPARK, policy=FullBlock(), table=CHEAP,
                    gate=True, total=3)  # fmt: skip
    stopped = run_load(TARGET, PROMPTS, CONFIG, ClosedLoop(concurrency=3), drafter=DSPARK, policy=FullBlock(),
                       table=dear, gate=True, total=3)  # fmt: skip
    assert same_texts(kept) and same_texts(stopped)
    assert stopped.summary.drafted < 0.5 * kept.summary.drafted
    # nobody drafts, not even in a first round: a probe would take far more than its share of the time
    assert stopped.summary.drafted == 0 and stopped.summary.budget == 1


def test_confidences_are_used_where_there_are_any_and_history_elsewhere():
    for drafter, source in ((DSPARK, "confidence"), (PromptLookupDrafter(), "history")):
        scheduler = BatchScheduler(EarlyStop(CHEAP), gamma=3)
        batch = RaggedBatch(TARGET, policy=scheduler)
        batch.join(BatchRequest(request_id="a", prompt_ids=(1, 2, 1, 2, 1, 2, 1), config=CONFIG, drafter=drafter))
        while len(batch):
            batch.step()
        assert {d.source for d in scheduler.decisions if d.drafted} == {source}


def test_confidences_pass_through_the_calibration():
    def hopeless(confidence):
        return confidence * 0

    runs = {
        name: run_load(TARGET, PROMPTS, CONFIG, ClosedLoop(concurrency=2), drafter=DSPARK, policy=EarlyStop(CHEAP),
                       table=CHEAP, calibrate=calibrate, total=2)
        for name, calibrate in (("raw", None), ("hopeless", hopeless))
    }  # fmt: skip
    assert runs["hopeless"].summary.budget == 1 < runs["raw"].summary.budget


def test_a_fixed_length_drafts_no_more_than_it_verifies():
    for policy, drafts in ((FixedLength(1), 1), (FullBlock(), CONFIG.gamma), (EarlyStop(DEAR), CONFIG.gamma)):
        run = run_load(TARGET, PROMPTS, CONFIG, ClosedLoop(concurrency=2), drafter=DSPARK, policy=policy, total=2)
        assert same_texts(run)
        assert run.summary.drafted <= drafts and run.decisions[0].drafted == 2 * drafts


def test_a_lossy_policy_never_decides_on_real_requests():
    with pytest.raises(ValueError, match="not lossless"):
        BatchScheduler(Retrospective(CHEAP), gamma=3)
    with pytest.raises(ValueError, match="needs a cost table"):
        BatchScheduler(FullBlock(), gamma=3, gate=True)


def test_policies_are_compared_with_the_best_fixed_length():
    entries = compare_policies(
        TARGET, PROMPTS, SHORT, DSPARK, [FullBlock(), FixedLength(1), Delayed(CHEAP)], table=CHEAP,
        loads={n: ClosedLoop(concurrency=n) for n in (1, 2)}, repeats=1,
    )  # fmt: skip
    assert [(e.policy, e.requests) for e in entries][:4] == [
        (PLAIN, 1), ("full block", 1), ("fixed-1", 1), ("delayed", 1),
    ]  # fmt: skip
    found = against_fixed(entries)
    assert [f["requests"] for f in found] == [1, 2] and set(found[0]["ratio"]) == {"delayed"}
    best = max(e.throughput for e in entries if e.requests == 1 and e.policy != "delayed")
    assert found[0]["best_fixed_tok_per_s"] == best
    json.dumps([entry.as_dict() for entry in entries], allow_nan=False)


def test_runs_take_turns_and_only_their_own_rounds_count(monkeypatch):
    def runs():
        return {
            name: serve(TARGET, PROMPTS, CONFIG, ClosedLoop(concurrency=2), drafter=DSPARK, policy=policy, total=4)
            for name, policy in (("full", FullBlock()), ("one", FixedLength(1)))
        }

    told = {name: list(steps) for name, steps in runs().items()}
    assert all(0 < a <= b <= 1 for shares in told.values() for a, b in zip(shares, shares[1:], strict=False))
    ends = dict[str, LoadRun]()
    clock = iter(range(10**9))
    monkeypatch.setattr("dspec_lab.serving.engine.time.perf_counter", lambda: float(next(clock)))
    steps = runs()
    while steps:
        for name in list(steps):
            try:
                next(steps[name])
            except StopIteration as end:
                ends[name] = end.value
                del steps[name]
            for _ in range(10**5):
                next(clock)
    assert all(run.summary.longest_gap_s < 10**5 for run in ends.values()), "what others did was counted"
    assert all(0 < text.decode_s < 10**5 for run in ends.values() for text in run.generations.values())
    with pytest.raises(ValueError, match="no prompts"):
        serve(TARGET, [], CONFIG, ClosedLoop(concurrency=2), drafter=DSPARK)
    assert all(same_texts(run) for run in ends.values())
    monkeypatch.undo()
    order = list[str]()

    def noted(name, steps):
        while True:
            order.append(name)
            try:
                yield next(steps)
            except StopIteration as end:
                return end.value

    assert set(take_turns({name: noted(name, steps) for name, steps in runs().items()})) == {"full", "one"}
    counts = [order[: 2 * k].count("one") for k in (1, 4)]
    assert counts[0] == 1 and 2 <= counts[1] <= 6, order


@pytest.mark.parametrize("places", [3, 4])
def test_requests_at_rest_are_decided_on_as_if_they_were_asked_each_round(places, monkeypatch):
    """Where nobody drafts the gate does not look at the requests again: the rounds and texts must not show it."""
    config, shares, waits = replace(CONFIG, max_new_tokens=40, ignore_eos=True), [], []
    real = ProbePurse.add

    def add(self, wanted_B, skipped_B, may_B, table):
        found_B = real(self, wanted_B, skipped_B, may_B, table)
        if (found_B != wanted_B).any():
            waits.append(skipped_B.tolist())
        return found_B

    monkeypatch.setattr(ProbePurse, "add", add)
    # often enough that the same request is probed again
    monkeypatch.setattr("dspec_lab.scheduler.batch.ProbePurse", lambda: ProbePurse(0.05))

    def load() -> tuple[list, list, list]:
        waits.clear()
        run = run_load(
            TARGET, PROMPTS, config, ClosedLoop(concurrency=places), drafter=DSPARK, policy=Delayed(DEAR), table=DEAR,
            gate=True, total=2 * places,
        )  # fmt: skip
        drafted = [(record.requests, record.drafting, record.drafted, record.rows) for record in run.rounds]
        shares.append(np.mean([drafting > 0 for _, drafting, _, _ in drafted]))
        # and how long each had waited whenever one was probed
        return drafted, [text.token_ids for text in run.generations.values()], list(waits)

    rested = load()
    assert any(0 < waited < np.inf for skipped in rested[2] for waited in skipped)
    monkeypatch.setattr(ProbePurse, "rest", lambda self, requests, table: False)
    assert load() == rested
    # there were rounds of both kinds, probes of the purse among them
    assert 0 < shares[0] < 1


def scheduled(rounds: int, *, policy=None, gate: bool = False) -> tuple[BatchScheduler, RaggedBatch]:
    scheduler = BatchScheduler(policy or EarlyStop(CHEAP), gamma=3, table=CHEAP, gate=gate)
    batch = RaggedBatch(TARGET, policy=scheduler, gate=scheduler.draft_lengths if gate else None)
    config = replace(CONFIG, max_new_tokens=60, ignore_eos=True, temperature=1.0)
    for name in "ab":
        batch.join(BatchRequest(request_id=name, prompt_ids=tuple(PROMPTS[0]), config=config, drafter=DSPARK))
    for _ in range(rounds):
        batch.step()
    return scheduler, batch


def break_a_pass(batch: RaggedBatch, monkeypatch) -> None:
    """A round that is begun and never settled."""

    def broken(sessions, feeds):
        raise RuntimeError("the pass broke")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the pass broke"):
        patch.setattr(ragged, "extend_ragged", broken)
        batch.step()


@pytest.mark.parametrize("gate", [False, True])
def test_what_rounds_taught_is_taken_in_every_few_rounds_and_none_is_left_out(gate, monkeypatch):
    taught = list[tuple[list[int], list[int]]]()
    real = AcceptanceHistory.settle

    def settle(self, standing, lens_B, verified_B, accepted_B, chance_BG=None):
        taught.append((verified_B.tolist(), accepted_B.tolist()))
        real(self, standing, lens_B, verified_B, accepted_B, chance_BG)

    monkeypatch.setattr(AcceptanceHistory, "settle", settle)
    policy = FullBlock() if gate else None
    scheduler, batch = scheduled(HOLD, gate=gate, policy=policy)
    assert not taught, "a look holds for some rounds"
    batch.step()
    expected = [
        ([r.gamma for r in records], [r.num_accepted for r in records])
        for records in zip(*(request.result.rounds[:HOLD] for request in batch._active.values()), strict=True)
    ]
    assert taught == expected and any(any(accepted) for _, accepted in taught)
    # who leaves, or comes, ends the hold
    batch.leave("a")
    batch.step()
    assert len(taught) == HOLD + 1
    assert scheduler.decisions[-1].requests == 1


def test_rounds_of_a_request_that_ends_within_a_hold_teach_too(monkeypatch):
    taught = list[list[int]]()
    real = AcceptanceHistory.settle

    def settle(self, standing, lens_B, verified_B, accepted_B, chance_BG=None):
        taught.append(accepted_B.tolist())
        real(self, standing, lens_B, verified_B, accepted_B, chance_BG)

    monkeypatch.setattr(AcceptanceHistory, "settle", settle)
    scheduler, batch = scheduled(HOLD - 1)
    both = list(batch._active.values())
    batch.leave("a")
    batch.step()
    expected = [[r.num_accepted for r in records] for records in zip(*(q.result.rounds for q in both), strict=False)]
    assert len(expected) == HOLD - 1 and taught == expected
    assert scheduler.decisions[-1].requests == 1


def test_a_probe_of_a_batch_at_rest_is_learned_from_in_the_next_round(monkeypatch):
    monkeypatch.setattr("dspec_lab.scheduler.batch.ProbePurse", lambda: ProbePurse(0.05))
    scheduler, settled_at = BatchScheduler(FullBlock(), gamma=3, table=DEAR, gate=True), list[int]()
    real = AcceptanceHistory.settle

    def settle(self, *args):
        settled_at.append(len(scheduler.decisions))
        real(self, *args)

    monkeypatch.setattr(AcceptanceHistory, "settle", settle)
    scheduler._history._all_2G[0] = 1000.0  # that many drafts before, none of them accepted
    batch = RaggedBatch(TARGET, policy=scheduler, gate=scheduler.draft_lengths)
    config = replace(CONFIG, max_new_tokens=60, ignore_eos=True)
    for name in "ab":
        batch.join(BatchRequest(request_id=name, prompt_ids=tuple(PROMPTS[0]), config=config, drafter=DSPARK))
    for _ in range(50):
        batch.step()
    probed_at = [at for at, decision in enumerate(scheduler.decisions) if decision.drafted]
    rests = [after - before for before, after in itertools.pairwise(probed_at)]
    assert len(probed_at) > 3 and min(rests) > 2
    assert settled_at == [at + 1 for at in probed_at if at + 1 < 50]


def test_a_round_that_was_never_settled_is_forgotten_where_the_next_drafts_nothing(monkeypatch):
    monkeypatch.setattr(ProbePurse, "add", lambda self, wanted_B, skipped_B, may_B, table: wanted_B)
    scheduler, batch = scheduled(2, policy=FullBlock(), gate=True)
    break_a_pass(batch, monkeypatch)
    memories = [scheduler._memory[request] for request in batch._active.values()]
    assert all(memory.pending[-1].index == len(memory.rounds) for memory in memories)
    scheduler._look.lengths = [0, 0]
    batch.step()
    assert scheduler.decisions[-1].drafted == 0
    assert [[pending.index for pending in memory.pending] for memory in memories] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(("name", "tells"), [("dspark", True), ("dflash", False)])
def test_the_gate_knows_whether_the_drafter_tells_confidences(name, tells, monkeypatch):
    told, real = list[bool](), batch_module.asked_lengths

    def noted(*args, **options):
        told.append(options["told"])
        return real(*args, **options)

    monkeypatch.setattr(batch_module, "asked_lengths", noted)
    scheduler = BatchScheduler(EarlyStop(CHEAP), gamma=3, table=CHEAP, gate=True)
    batch = RaggedBatch(TARGET, policy=scheduler, gate=scheduler.draft_lengths)
    config, drafter = replace(CONFIG, max_new_tokens=60, ignore_eos=True), NEURAL_DRAFTERS[name](TARGET)
    batch.join(BatchRequest(request_id="a", prompt_ids=tuple(PROMPTS[0]), config=config, drafter=drafter))
    for _ in range(HOLD + 1):
        batch.step()
    assert scheduler.decisions[0].drafted and len(told) > 1 and told[-1] is tells


def test_a_capacity_rests_on_chances_as_they_are_recalled(monkeypatch):
    def verified() -> int:
        scheduler, _ = scheduled(3, policy=Delayed(CHEAP))
        return sum(decision.admitted for decision in scheduler.decisions)

    assert verified()
    monkeypatch.setattr(batch_module, "recalled", lambda old_BG, expected_BG: np.zeros_like(old_BG))
    assert not verified()


@pytest.mark.parametrize("held", [True, False])
def test_a_round_that_was_never_settled_is_no_past_round(held, monkeypatch):
    """Its drafts are drawn again, and a capacity may not rest on what they told the first time."""
    scheduler, batch = scheduled(1)
    memories = [scheduler._memory[request] for request in batch._active.values()]
    before = [list(memory.past) for memory in memories]
    break_a_pass(batch, monkeypatch)
    assert all(len(memory.past) == 2 for memory in memories)
    if not held:
        scheduler._look.rounds = HOLD
    batch.step()
    assert [[memory.past[0]] for memory in memories] == before


def test_a_round_that_was_never_settled_teaches_nothing(monkeypatch):
    scheduler, batch = scheduled(2)
    requests = list(batch._active.values())
    break_a_pass(batch, monkeypatch)
    for _ in range(HOLD):
        batch.step()
    for request in requests:
        indices = [pending.index for pending in scheduler._memory[request].pending]
        assert indices == sorted(set(indices)), "one round was counted twice"
    reached = scheduler._history._all_2G[0, 0]
    settled = sum(len(request.result.rounds) for request in requests)
    waiting = sum(len(scheduler._memory[request].pending) for request in requests)
    assert reached == settled - waiting > 0


def test_the_draft_cost_is_found_again_in_the_rounds_it_made():
    truth = DraftCost(request_probes=(1, 2, 5), request_s=(0.006, 0.007, 0.012), per_token_s=0.0002)
    rounds = [
        {"drafting": n, "drafted": n * drafts, "draft_s": truth.seconds(n, n * drafts)}
        for n in (1, 2, 5) for drafts in (3, 7) for _ in range(4)
    ]  # fmt: skip
    # a busy moment, a number of requests that was hardly seen, and a round without drafts
    rounds[0]["draft_s"] += 0.05
    rounds += [{"drafting": 3, "drafted": 9, "draft_s": 9.0}, {"drafting": 0, "drafted": 0, "draft_s": 0.0}]
    found = fit_draft_cost(rounds, "dspark", joint=True)
    assert found.request_probes == (1, 2, 5) and found.joint is True
    for requests in (1, 2, 5):
        assert found.seconds(requests, 7 * requests) == pytest.approx(truth.seconds(requests, 7 * requests), rel=0.25)
    with pytest.raises(ValueError, match="drafted in 1 rounds: too few"):
        fit_draft_cost(rounds[-2:], "dspark", joint=True)


def test_the_profile_times_every_kind_of_pass_and_rolls_it_back():
    samples = time_target(TARGET, rows=(1, 4, 9), contexts=(8, 24), repeats=2)
    kinds = [(s.rows, s.context_tokens, s.requests) for s in samples]
    shared = [(n, c, -(-n // 8)) for n in (1, 4, 9) for c in (8, 24)]
    assert sorted(kinds) == sorted([*shared, (4, 8, 4), (9, 8, 9)] * 2)
    table = profile_target(
        TARGET, rows=(1, 8), contexts=(8,), repeats=2, drafter=DSPARK, prompts=PROMPTS, config=SHORT
    )  # fmt: skip
    assert table.source == "measured" and len(table.samples) == 6 and table.rows == (1, 8)
    draft = table.draft
    assert draft.drafter == "dspark" and draft.joint is True and draft.fixed_s == draft.per_request_s == 0
    assert draft.request_probes[0] == 1 and draft.request_probes[-1] == 16 and max(draft.request_s) > 0
    assert {row["requests"] for row in table.run["rounds"]} >= {1, 2, 4, 8, 16}
    assert all(row["drafting"] <= row["requests"] <= 16 for row in table.run["rounds"])
    for options, words in (
        (dict(rows=(0, 1)), "at least 1"), (dict(contexts=(60,)), "do not fit 64"), (dict(repeats=0), "repeats"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            time_target(TARGET, **{"rows": (1,), "contexts": (8,), "repeats": 1, **options})


def test_rounds_timed_on_a_slower_machine_are_brought_to_the_pace_of_the_passes(monkeypatch):
    table = CostTable(
        rows=(1, 4), seconds=(0.010, 0.016), request_probes=(1, 2), request_s=(0.0, 0.001), context_s=1e-5
    )
    rounds = [
        {"requests": 1, "rows": 4, "verify_s": 1.5 * (0.016 + 4 * 20 * 1e-5)},
        {"requests": 2, "rows": 2, "verify_s": 1.5 * (0.013 + 2 * 20 * 1e-5)},
        {"requests": 1, "rows": 1, "verify_s": 9.0},
        {"requests": 1, "rows": 5, "verify_s": 1.0},
    ]
    assert profile.pace_of(rounds, table, 20.0) == pytest.approx(1.5)
    assert profile.pace_of([], table, 20.0) == 1.0
    wanted = dict(rows=(1, 8), contexts=(8,), repeats=1, drafter=DSPARK, prompts=PROMPTS, config=SHORT)
    monkeypatch.setattr(profile, "pace_of", lambda *_: 1.0)
    cost, per_request_s, fixed_s, raw = profile.fit_drafter(TARGET, DSPARK, PROMPTS, SHORT)
    monkeypatch.setattr(profile, "fit_drafter", lambda *_, **__: (cost, per_request_s, fixed_s, raw))
    plain = profile_target(TARGET, **wanted)
    monkeypatch.setattr(profile, "pace_of", lambda *_: 2.0)
    halved = profile_target(TARGET, **wanted)
    assert halved.run["pace"] == 2.0 and halved.draft.request_s == tuple(s / 2 for s in plain.draft.request_s)
    assert (halved.draft.per_token_s, halved.fixed_s) == (plain.draft.per_token_s / 2, plain.fixed_s / 2)
    assert halved.settle_per_request_s == plain.settle_per_request_s / 2


def test_a_pass_is_timed_after_others_of_its_size(monkeypatch):
    """Right after a pass of another size one may take longer, which is not what rounds of a steady load take."""
    now, last, real = [0.0], [0], profile.extend_ragged

    def slow_at_first(sessions, feeds):
        rows = sum(map(len, feeds))
        now[0] += 1.0 if rows == last[0] else 5.0
        last[0] = rows
        return real(sessions, feeds)

    monkeypatch.setattr(profile, "extend_ragged", slow_at_first)
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])
    assert {sample.seconds for sample in time_target(TARGET, rows=(1, 4, 9), contexts=(8,), repeats=2)} == {1.0}


def test_a_gate_that_begins_with_short_drafts_learns_that_whole_blocks_pay():
    """Drafting costs more than a pass, 9 of 10 drafts are accepted: 1 does not pay, 7 nearly double the rate."""
    table = CostTable(rows=(1, 8), seconds=(0.014, 0.0155), draft=DraftCost(per_request_s=0.022))
    rng, history, own = np.random.default_rng(0), AcceptanceHistory(7), Standing.new(1, 7)
    assert draft_lengths(np.cumprod(history.chances(own), axis=1), table).tolist() == [0]
    for _ in range(60):
        kept = int(rng.random() < 0.9)
        history.settle(own, np.array([1]), np.array([1]), np.array([kept]))
    assert draft_lengths(np.cumprod(history.chances(own), axis=1), table).tolist() == [7]
