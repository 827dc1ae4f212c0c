"""One drafting pass for many requests gives each what its own session proposes, bit for bit on the native row ops."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dspec_lab.calibration.drafters import ThresholdDrafter
from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.files import data_dir
from dspec_lab.core.streams import DraftDraws, RandomStreams
from dspec_lab.core.types import Proposal
from dspec_lab.drafters import backbone, block_rows, dspark, together
from dspec_lab.drafters.architecture import BlockArchitecture
from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.cache import RowCache
from dspec_lab.drafters.dflash import DFlashDrafter
from dspec_lab.drafters.dspark import BlockSession, DSparkDrafter
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.drafters.protocol import Commit, DraftAsk
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.family import model_spec
from dspec_lab.models.protocol import Features
from dspec_lab.verifier.batch_audit import ragged_row
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.ragged import BatchRequest, RaggedBatch, generate_batch
from dspec_lab.verifier.request import Request
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS, tiny_config, tiny_decoder

VOCAB = 41
TARGET = tiny_decoder(VOCAB, seed=2)
KINDS: dict[str, dict] = {
    "vanilla": dict(markov_head_type="vanilla", markov_rank=5, confidence_head=True),
    "gated": dict(markov_head_type="gated", markov_rank=5, confidence_head=True, confidence_with_markov=False),
    "rnn": dict(markov_head_type="rnn", markov_rank=5, confidence_head=True),
    "masks only": dict(markov_head_type="rnn", markov_rank=4, sample_from_anchor=False),
    "reduced": dict(markov_head_type="vanilla", markov_rank=4, confidence_head=True, draft_vocab_size=23),
    "window": dict(markov_head_type="vanilla", markov_rank=4, confidence_head=True, context_window=6),
    "dflash": {},
}


def block_drafter(kind: str, *, layers: int = 2, dtype: torch.dtype = torch.float32) -> DSparkDrafter:
    arch = BlockArchitecture(
        spec=model_spec(tiny_config(VOCAB, layers)), target_hidden_size=16, num_target_layers=TARGET.num_layers,
        target_layer_ids=(0, 1), block_size=5, mask_token_id=0, **KINDS[kind],
    )  # fmt: skip
    model, generator = BlockDraftModel(arch).eval(), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    if model.target_ids_W is not None:
        model.keep_tokens(torch.randperm(VOCAB, generator=generator)[: model.draft_vocab_size].sort().values)
    model.cast_matrices(dtype)
    return DFlashDrafter(model) if kind == "dflash" else DSparkDrafter(model)


@dataclass
class Twins:
    """One request's session twice, told the same: one proposes alone, one with the others."""

    alone: BlockSession
    joint: BlockSession
    streams: RandomStreams
    sampling: SamplingConfig

    def ask(self, session: BlockSession, gamma: int, round_index: int) -> DraftAsk:
        draws = DraftDraws(self.streams, round_index)
        return DraftAsk(session=session, gamma=gamma, sampling=self.sampling, draws=draws)


SAMPLING = (
    SamplingConfig(), SamplingConfig(temperature=1.0), SamplingConfig(temperature=0.6, top_k=7),
    SamplingConfig(temperature=1.3, top_p=0.8),
)  # fmt: skip


def twins(drafter: DSparkDrafter, number: int) -> Twins:
    sessions = [drafter.start(TARGET, capacity=60) for _ in range(2)]
    found = Twins(*sessions, RandomStreams(number, f"r{number}"), SAMPLING[number % len(SAMPLING)])
    told(found, tuple((3 * number + 5 * j) % VOCAB for j in range(2 + 4 * (number % 4))), first=True)
    return found


def told(pair: Twins, token_ids: tuple[int, ...], *, first: bool = False) -> None:
    count = len(token_ids) - first
    generator = torch.Generator().manual_seed(sum(token_ids) + 97 * pair.alone.context_length)
    rows_NF = torch.randn(count, 32, generator=generator)
    for session in (pair.alone, pair.joint):
        session.commit(Commit(token_ids, Features(tapped_NF=rows_NF, last_ND=None)))


def assert_same(got: Proposal, wanted: Proposal) -> None:
    assert got.token_ids == wanted.token_ids
    for name in ("draft_probs_GV", "draft_logits_GV", "logit_ids_V"):
        mine, other = getattr(got, name), getattr(wanted, name)
        assert (mine is None) == (other is None)
        if mine is None:
            continue
        if TARGET.ops.name == "native":
            assert torch.equal(mine, other), name
        torch.testing.assert_close(mine, other)
    if TARGET.ops.name == "native":
        assert got.confidence_G == wanted.confidence_G
    assert (got.confidence_G is None) == (wanted.confidence_G is None)


def play(pairs: list[Twins], rounds: int = 4) -> None:
    """Rounds in which requests draft different lengths, sit out, leave, and come anew."""
    for number in range(rounds):
        most = pairs[0].alone.model.arch.max_gamma
        gammas = [(i + 2 * number) % (most + 1) for i in range(len(pairs))]
        pairs_now = list(zip(pairs, gammas, strict=True))
        found = together.propose_together([pair.ask(pair.joint, gamma, number) for pair, gamma in pairs_now])
        for (pair, gamma), got in zip(pairs_now, found, strict=True):
            wanted = pair.alone.propose(gamma, pair.sampling, DraftDraws(pair.streams, number))
            assert_same(got.proposal, wanted)
            assert got.proposal.gamma == gamma and got.seconds >= 0
        for i, (pair, gamma) in enumerate(pairs_now):
            told(pair, tuple((11 * i + number + j) % VOCAB for j in range(1 + (i + number) % (gamma + 1))))
        # one leaves, another joins
        pairs = [*pairs[1:], twins(DSparkDrafter(pairs[0].alone.model), 20 + number)]


@pytest.mark.parametrize("path", ["rows", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_joint_pass_gives_each_request_its_own_proposal(
    kind: str, dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = block_drafter(kind, dtype=dtype)
    if path == "torch":
        monkeypatch.setattr(backbone, "rows_serve", lambda model: False)
    elif not block_rows.rows_serve(drafter.model):
        pytest.skip("the compiled row ops are not here")
    assert isinstance(drafter.start(TARGET, capacity=9).cache, RowCache) == (path == "rows")
    play([twins(drafter, number) for number in range(4)], rounds=3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_row_ops_draft_as_torch_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = block_drafter(kind)
    if not block_rows.rows_serve(drafter.model):
        pytest.skip("the compiled row ops are not here")
    rows = [twins(drafter, number) for number in range(3)]
    monkeypatch.setattr(backbone, "rows_serve", lambda model: False)
    plain = [twins(drafter, number) for number in range(3)]
    greedy = SamplingConfig()
    for number in range(5):  # a window of 6 moves on within these rounds
        for mine, other in zip(rows, plain, strict=True):
            got, wanted = (
                pair.alone.propose(3, greedy, DraftDraws(pair.streams, number)) for pair in (mine, other)
            )  # fmt: skip
            assert got.token_ids == wanted.token_ids
            torch.testing.assert_close(got.draft_logits_GV, wanted.draft_logits_GV, rtol=0, atol=2e-5)
            for pair in (mine, other):
                told(pair, tuple((7 * number + j) % VOCAB for j in range(1 + number % 4)))


def test_more_rows_than_one_product_takes_are_drafted_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, passes = block_drafter("rnn"), []
    real = together.hidden_blocks
    monkeypatch.setattr(together, "_most_rows", lambda model: 128)

    def watched(model, caches, anchors):  # type: ignore[no-untyped-def]
        passes.append(len(caches))
        return real(model, caches, anchors)

    monkeypatch.setattr(together, "hidden_blocks", watched)
    play([twins(drafter, number) for number in range(30)], rounds=1)
    # 25 draft in the first round: 5 slots each, 128 rows at most
    assert passes[:1] == [25] and max(passes) <= 128 // 5
    passes.clear()
    pairs = [twins(drafter, number) for number in range(27)]
    together.propose_together([pair.ask(pair.joint, 5, 0) for pair in pairs])
    assert passes == [13, 14]
    # row ops without such a number draft all of them in one
    monkeypatch.setattr(together, "_most_rows", lambda model: together.LARGEST_PASS)
    passes.clear()
    together.propose_together([pair.ask(pair.alone, 5, 0) for pair in pairs])
    assert passes == [27]


def test_a_request_that_has_waited_long_takes_in_its_context_as_it_does_alone() -> None:
    drafter = block_drafter("window")
    pairs = [twins(drafter, number) for number in range(3)]
    for number in range(8):
        told(pairs[1], tuple((number + j) % VOCAB for j in range(5)))
    play(pairs, rounds=2)


@pytest.mark.parametrize("planted", ["rows", "cache", "state"])
def test_a_mix_up_of_two_requests_is_seen(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [twins(block_drafter("rnn"), 0)]
    pairs += [twins(DSparkDrafter(pairs[0].alone.model), number) for number in (1, 2, 3)]
    if planted == "rows":
        real = together.hidden_blocks
        monkeypatch.setattr(together, "hidden_blocks", lambda *given: real(*given)[[1, 0, 2]])
    elif planted == "cache":
        real_append = together.append_contexts
        monkeypatch.setattr(
            together, "append_contexts",
            lambda model, caches, features: real_append(model, caches, [*features[:1], *features[:0:-1]]),
        )  # fmt: skip
        for pair in pairs:
            told(pair, (int(pair.streams.seed) + 1, 2))
    else:
        head = pairs[0].alone.model.markov_head
        real_step = head.step  # type: ignore[union-attr]

        def stepped(e_BR, hidden_BD, state_BR):  # type: ignore[no-untyped-def]
            return real_step(e_BR, hidden_BD, None if state_BR is None else state_BR.flip(0))

        monkeypatch.setattr(head, "step", stepped)
    with pytest.raises(AssertionError):
        play(pairs, rounds=2)


def batch_requests(drafters: list, count: int) -> list[BatchRequest]:
    return [
        BatchRequest(
            request_id=f"r{i}",
            prompt_ids=tuple((2 + i + 3 * j) % VOCAB for j in range(1 + 3 * (i % 5))),
            config=DecodeConfig(
                gamma=1 + i % 4, temperature=(0.0, 1.0, 0.7)[i % 3], top_k=(0, 6)[i % 2],
                max_new_tokens=7 + 2 * (i % 4), seed=i // 2, verification=("token", "block")[i % 2],
            ),
            drafter=drafters[i % len(drafters)],
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("max_active", [2, 5, 12])
def test_texts_of_a_batch_are_those_of_single_requests(max_active: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = block_drafter("rnn")
    cut = ThresholdDrafter(shared, 0.3)
    drafters = [shared, cut, shared, block_drafter("dflash"), PromptLookupDrafter(), NEURAL_DRAFTERS["eagle3"](TARGET)]
    requests, sizes = batch_requests([*drafters, None], 12), []
    real = together.propose_blocks
    monkeypatch.setattr(together, "propose_blocks", lambda asks: sizes.append(len(asks)) or real(asks))
    found = generate_batch(TARGET, requests, max_active=max_active)
    assert max(sizes, default=0) >= min(max_active, 3)
    for wanted in requests:
        alone = generate(TARGET, wanted.drafter, wanted.prompt_ids, wanted.config, request_id=wanted.request_id)
        got = found[wanted.request_id]
        assert (got.token_ids, got.sources) == (alone.token_ids, alone.sources)
        for mine, other in zip(got.rounds, alone.rounds, strict=True):
            assert (mine.draft_ids, mine.num_accepted, mine.confidence) == (
                other.draft_ids, other.num_accepted, other.confidence,
            )  # fmt: skip


def test_the_audit_of_batches_drafts_in_joint_passes_and_sees_a_mix_up(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, real = [], together.hidden_blocks
    monkeypatch.setattr(together, "hidden_blocks", lambda *given: passes.append(1) or real(*given).flip(0))
    row = ragged_row(seed=0)
    assert len(passes) > 5
    # two requests draft from each other's context: their texts are others at temperatures above 0
    assert row.verdict == "FAIL" and 1 <= len(row.details["changed"]) <= 4


def test_gate_policy_and_counts_work_as_one_by_one() -> None:
    drafter, asked = block_drafter("vanilla"), []

    def gate(active) -> list[int]:  # type: ignore[no-untyped-def]
        asked.append([(i + len(asked)) % 3 for i in range(len(active))])
        return asked[-1]

    def policy(active) -> list[int]:  # type: ignore[no-untyped-def]
        return [min(1, request.proposal.gamma) for request in active]

    batch = RaggedBatch(TARGET, policy=policy, gate=gate)
    config = DecodeConfig(gamma=4, max_new_tokens=12, ignore_eos=True)
    for i in range(4):
        batch.join(BatchRequest(request_id=str(i), prompt_ids=(i, 3), config=config, drafter=drafter))
    results: dict = {}
    while len(batch):
        results |= batch.step()
    for i in range(4):
        assert results[str(i)].token_ids == generate(TARGET, None, (i, 3), config).token_ids
    for wanted, record in zip(asked[:3], batch.rounds, strict=False):
        assert (record.drafting, record.drafted) == (sum(n > 0 for n in wanted), sum(wanted))
        assert record.rows == record.requests + record.drafting


def test_bad_asks_are_named() -> None:
    first, second = twins(block_drafter("rnn"), 0), twins(block_drafter("dflash"), 1)
    with pytest.raises(ValueError, match="sessions of one block drafter"):
        together.propose_blocks([first.ask(first.joint, 1, 0), second.ask(second.joint, 1, 0)])
    with pytest.raises(ValueError, match=r"at least 1 token, got \[2, 0\]"):
        other = twins(DSparkDrafter(first.alone.model), 2)
        together.propose_blocks([first.ask(first.joint, 2, 0), other.ask(other.joint, 0, 0)])
    with pytest.raises(ValueError, match="cannot draft gamma = 6"):
        together.propose_together([pair.ask(pair.joint, 6, 0) for pair in (first, other)])
    fresh = first.alone.model
    with pytest.raises(ValueError, match="before the prompt was committed"):
        sessions = [DSparkDrafter(fresh).start(TARGET, capacity=9) for _ in range(2)]
        together.propose_together([first.ask(session, 1, 0) for session in sessions])
    assert together.propose_together([]) == []


def test_the_trained_drafter_proposes_the_same_in_a_joint_pass(default_model_dir: Path) -> None:
    from dspec_lab.checkpoints.drafters import open_drafter

    folder = data_dir() / "checkpoints" / "smollm2" / "dspark"
    target = LeanDecoder.from_folder(default_model_dir, dtype=torch.bfloat16)
    drafter = open_drafter(folder, target)
    requests = []
    for i in range(3):
        config = DecodeConfig(gamma=7 - 2 * i, temperature=float(i % 2), max_new_tokens=20, seed=i, ignore_eos=True)
        prompt = tuple((311 * i + 17 * j) % 4000 + 20 for j in range(5 + 3 * i))
        requests.append([Request(target, drafter, prompt, config, RandomStreams(i, str(i))) for _ in range(2)])
        for request in requests[-1]:
            request.begin()
    for _ in range(2):
        asks = [joint.ask() for _, joint in requests]
        found = together.propose_together([ask for ask in asks if ask is not None])
        for (alone, joint), ask, got in zip(requests, asks, found, strict=True):
            feed = alone.next_rows()
            assert_same(got.proposal, alone.proposal)
            assert joint.rows_of(ask, got.proposal, got.seconds) == feed
            for request in (alone, joint):
                request.take(request.session.extend(feed))
            assert alone.result.token_ids == joint.result.token_ids


def test_rows_that_wait_do_not_keep_their_passes_alive() -> None:
    session = block_drafter("vanilla").start(TARGET, capacity=60)
    session.commit(Commit((1, 2, 3), Features(tapped_NF=torch.randn(2, 32), last_ND=None)))
    passes = [torch.randn(50, 32) for _ in range(2 * dspark.FRESH + 3)]
    for number, whole_NF in enumerate(passes):
        session.commit(Commit((number,), Features(tapped_NF=whole_NF[number : number + 1], last_ND=None)))
    alive = {rows_NF.untyped_storage().data_ptr() for rows_NF in (*session._waiting, *session._fresh)}
    assert len(alive & {whole_NF.untyped_storage().data_ptr() for whole_NF in passes}) < dspark.FRESH
    expected = torch.stack([whole_NF[number] for number, whole_NF in enumerate(passes)])
    assert torch.equal(session.hand_over(), expected) and session.hand_over() is None
