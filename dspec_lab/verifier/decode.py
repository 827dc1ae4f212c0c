"""The decoding loops: plain decoding, and rounds of draft + verify with the same output law."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dspec_lab.config import DecodeConfig
from dspec_lab.core.acceptance import accept_rate
from dspec_lab.core.rejection import LazyLaw, draft_rows, verify, verify_greedy
from dspec_lab.core.sampling import entropy_bits, greedy_ids, law
from dspec_lab.core.streams import Chooser, DraftDraws, RandomStreams
from dspec_lab.core.types import Generation, Proposal, RoundRecord, TokenSource, Verdict
from dspec_lab.drafters.protocol import Commit, Drafter
from dspec_lab.models.protocol import Features, Target, TargetRows, TargetSession
from dspec_lab.verifier.stopping import Ending, TokenDecoder, find_ending, spell

# called after the prefill and after each round with the new tokens and where each came from
OnTokens = Callable[[Sequence[int], Sequence[TokenSource]], None]

# the verdict on one proposal: target rows, proposal, settings, chooser, round
Decide = Callable[[TargetRows, Proposal, DecodeConfig, Chooser, int], Verdict]

# the prefill's token is drawn as the bonus of this round; rounds proper count from 0
PREFILL_ROUND = 2**40


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: Sequence[int],
    config: DecodeConfig,
    *,
    request_id: str = "0",
    tokenizer: TokenDecoder | None = None,
    on_tokens: OnTokens | None = None,
    trace: bool = False,
    chooser: Chooser | None = None,
    decide_with: Decide | None = None,
) -> Generation:
    """Generate after `prompt_ids`; the output law is the target's, whatever the drafter (None: plain decoding).

    With `trace` each round also records 1 - TV and the entropies (slower; never time a traced run). `chooser` replaces
    the random streams (the audit enumerates with it), `decide_with` the verifier's rule (the audit plants faults with it;
    None: `decide`). A `tokenizer` is needed for stop strings and for `text`.
    Raises `ValueError` for an empty prompt, ids outside the vocabulary, a context that does not fit, or a gamma the
    drafter was not trained for; `NonFiniteLogitsError` if the target or drafter gives a row without a law.
    """
    chooser = chooser or RandomStreams(config.seed, request_id)
    request = _Request(target, drafter, prompt_ids, config, chooser, decide_with or decide)
    return request.run(tokenizer, on_tokens, trace)


class _Request:
    """One generation in progress."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompt_ids: Sequence[int],
        config: DecodeConfig,
        chooser: Chooser,
        decide_with: Decide,
    ) -> None:
        prompt_ids = tuple(int(token) for token in prompt_ids)
        if not prompt_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        bad = [token for token in prompt_ids if not 0 <= token < target.vocab_size]
        if bad:
            raise ValueError(f"the prompt holds the token id {bad[0]}; the vocabulary is 0..{target.vocab_size - 1}")
        gamma = config.gamma if drafter is not None else 0
        if drafter is not None and drafter.max_gamma is not None and gamma > drafter.max_gamma:
            raise ValueError(f"{drafter.name} drafts at most {drafter.max_gamma} tokens a round, got gamma {gamma}")
        # the newest token's keys are never needed, so the last round fits exactly
        capacity = len(prompt_ids) + config.max_new_tokens
        if capacity > target.max_context:
            raise ValueError(
                f"{len(prompt_ids)} prompt + {config.max_new_tokens} new tokens exceed the context {target.max_context}"
            )
        self.target, self.drafter, self.config, self.chooser = target, drafter, config, chooser
        self.decide_with = decide_with
        self.gamma, self.sampling = gamma, config.sampling
        self.eos_ids = frozenset() if config.ignore_eos else target.eos_ids
        self.session: TargetSession = target.session(capacity=capacity, taps=drafter.taps if drafter else None)
        self.draft = drafter.start(target, capacity=capacity) if drafter else None
        self.result = Generation(prompt_ids=prompt_ids)

    def run(self, tokenizer: TokenDecoder | None, on_tokens: OnTokens | None, trace: bool) -> Generation:
        result, stop = self.result, self.config.stop_strings
        started = time.perf_counter()
        ending = self._prefill(tokenizer)
        result.prefill_s = time.perf_counter() - started
        if on_tokens:
            on_tokens(list(result.token_ids), list(result.sources))
        started, round_index = time.perf_counter(), 0
        while ending is None:
            had = len(result.token_ids)
            if self.draft is None:
                tokens, sources = [self._plain_token(round_index)], ["plain"]
            else:
                tokens, sources = self._round(round_index, trace)
            result.token_ids += tokens
            result.sources += sources  # type: ignore[arg-type]
            ending = find_ending(
                result.token_ids, len(tokens), eos_ids=self.eos_ids, max_new_tokens=self.config.max_new_tokens,
                stop_strings=stop, decoder=tokenizer,
            )  # fmt: skip
            if ending is not None:
                self._cut(ending, had)
            if on_tokens and len(result.token_ids) > had:
                on_tokens(result.token_ids[had:], result.sources[had:])
            round_index += 1
        result.decode_s = time.perf_counter() - started
        result.finish_reason = ending.reason
        if ending.text is not None:
            result.text = ending.text
        elif tokenizer is not None:
            result.text = spell(tokenizer, result.token_ids)
        return result

    def _prefill(self, tokenizer: TokenDecoder | None) -> Ending | None:
        prompt = self.result.prompt_ids
        rows = self.session.extend(prompt, logit_rows=1)
        if self.sampling.greedy:
            token = greedy_ids(rows.logits_JV)[0]
        else:
            token = self.chooser.categorical("bonus", PREFILL_ROUND, 0, law(rows.logits_JV, self.sampling)[0])
        self.result.token_ids.append(token)
        self.result.sources.append("prefill")
        if self.draft is not None:
            self.draft.commit(Commit((*prompt, token), rows.features))
        ending = find_ending(
            self.result.token_ids, 1, eos_ids=self.eos_ids, max_new_tokens=self.config.max_new_tokens,
            stop_strings=self.config.stop_strings, decoder=tokenizer,
        )  # fmt: skip
        if ending is not None:
            self._cut(ending, 0)
        return ending

    def _plain_token(self, round_index: int) -> int:
        logits_1V = self.session.extend(self.result.token_ids[-1:]).logits_JV
        if self.sampling.greedy:
            return greedy_ids(logits_1V)[0]
        return self.chooser.categorical("plain", round_index, 0, law(logits_1V, self.sampling)[0])

    def _round(self, round_index: int, trace: bool) -> tuple[list[int], list[TokenSource]]:
        assert self.draft is not None
        result = self.result
        start, known = time.perf_counter(), len(result.prompt_ids) + len(result.token_ids)
        # a round gains at most gamma + 1 tokens, and only so many are still wanted
        room = self.config.max_new_tokens - len(result.token_ids) - 1
        gamma = min(self.gamma, room)
        proposal = Proposal(())
        if gamma:
            proposal = self.draft.propose(gamma, self.sampling, DraftDraws(self.chooser, round_index))
            if proposal.gamma > gamma:
                raise ValueError(f"{self.drafter.name} proposed {proposal.gamma} tokens, {gamma} were asked for")  # type: ignore[union-attr]
        drafted = time.perf_counter()
        base = self.session.length
        rows = self.session.extend((result.token_ids[-1], *proposal.token_ids))
        verified = time.perf_counter()
        verdict = self.decide_with(rows, proposal, self.config, self.chooser, round_index)
        kept = proposal.token_ids[: verdict.num_accepted]
        tokens: list[int] = [*kept, verdict.next_token]
        sources: list[TokenSource] = ["draft"] * len(kept) + [verdict.source(proposal.gamma)]
        stop = next((i for i, token in enumerate(kept) if token in self.eos_ids), None)
        considered = proposal
        if stop is not None:
            # what the draft holds behind an accepted end token is neither kept nor judged
            tokens, sources = tokens[: stop + 1], sources[: stop + 1]
            verdict, considered = replace(verdict, num_accepted=stop + 1), proposal.prefix(stop + 1)
        self.session.truncate(base + 1 + verdict.num_accepted)
        settled = time.perf_counter()
        self.draft.commit(Commit(tuple(tokens), _kept_rows(rows.features, 1 + verdict.num_accepted)))
        end = time.perf_counter()
        record = RoundRecord(
            round=round_index,
            context_tokens=known,
            gamma=considered.gamma,
            draft_ids=considered.token_ids,
            num_accepted=verdict.num_accepted,
            num_committed=len(tokens),
            next_token=tokens[-1],
            draft_s=(drafted - start) + (end - settled),
            verify_s=verified - drafted,
            overhead_s=settled - verified,
            confidence=considered.confidence_G,
        )
        if trace:
            add_laws(record, rows, considered, self.config)
        result.rounds.append(record)
        return tokens, sources

    def _cut(self, ending: Ending, had: int) -> None:
        """Drop the tokens behind the end, and their share of the last round's counts."""
        result = self.result
        dropped = len(result.token_ids) - ending.keep
        if dropped <= 0:
            return
        del result.token_ids[ending.keep :], result.sources[ending.keep :]
        # a stop string can reach back over several rounds
        for record in reversed(result.rounds):
            cut = min(dropped, record.num_committed)
            dropped -= cut
            record.num_committed -= cut
            if record.num_committed <= record.num_accepted and cut:
                # as with an accepted end token: what the draft held behind the end is not judged
                _shorten(record, record.num_committed)
            if dropped <= 0:
                break


def _shorten(record: RoundRecord, length: int) -> None:
    """Cut the proposal of `record` to its first `length` tokens, all of them accepted."""
    record.gamma = record.num_accepted = length
    record.draft_ids = record.draft_ids[:length]
    record.next_token = record.draft_ids[-1] if length else record.next_token
    for name in ("confidence", "accept_prob", "target_entropy_bits", "draft_entropy_bits"):
        values = getattr(record, name)
        if values is not None:
            setattr(record, name, values[:length])


def decide(rows: TargetRows, proposal: Proposal, config: DecodeConfig, chooser: Chooser, round_index: int) -> Verdict:
    """The verifier's verdict on one proposal, given the target's rows (the anchor's and one per draft)."""
    if config.temperature == 0:
        return verify_greedy(rows.logits_JV, proposal)
    return verify(LazyLaw(rows.logits_JV, config.sampling), proposal, chooser, round_index, config.verification)


def add_laws(record: RoundRecord, rows: TargetRows, proposal: Proposal, config: DecodeConfig) -> None:
    """Fill in 1 - TV and the entropies of a round.

    `accept_prob` is 1 - TV of the laws that were sampled (after temperature and filters). The entropies are those of
    the models' own laws at temperature 1, so that they say something at temperature 0 too; a drafter without a law
    (n-gram match) has none.
    """
    gamma = proposal.gamma
    logits_GV = rows.logits_JV[:gamma]
    if gamma == 0:
        record.accept_prob, record.target_entropy_bits, record.draft_entropy_bits = (), (), ()
        return
    target_GV = law(logits_GV, config.sampling)
    record.accept_prob = tuple(accept_rate(target_GV, draft_rows(proposal, target_GV)).clamp(0, 1).tolist())
    record.target_entropy_bits = tuple(entropy_bits(logits_GV).tolist())
    if proposal.draft_logits_GV is not None:
        record.draft_entropy_bits = tuple(entropy_bits(proposal.draft_logits_GV.float()).tolist())


def _kept_rows(features: Features | None, count: int) -> Features | None:
    if features is None:
        return None
    return Features(
        tapped_NF=None if features.tapped_NF is None else features.tapped_NF[:count],
        last_ND=None if features.last_ND is None else features.last_ND[:count],
    )


def encode_chat(tokenizer: object, turns: Sequence[str], replies: Sequence[str] = ()) -> list[int]:
    """Token ids of a chat up to and including turn `len(replies)`, the generation prompt included.

    `tokenizer` is a transformers tokenizer with a chat template.
    """
    if len(replies) >= len(turns):
        raise ValueError(f"{len(replies)} replies leave no turn to answer among {len(turns)}")
    messages = []
    for index, turn in enumerate(turns[: len(replies) + 1]):
        if not turn.strip():
            raise ValueError(f"turn {index} of the prompt is empty")
        messages.append({"role": "user", "content": turn})
        if index < len(replies):
            messages.append({"role": "assistant", "content": replies[index]})
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)  # type: ignore[attr-defined]
    return [int(token) for token in ids]
