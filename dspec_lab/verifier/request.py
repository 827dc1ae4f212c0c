"""One request in progress: propose, let the target verify, settle. The same code serves one request and a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dspec_lab.config import DecodeConfig
from dspec_lab.core.acceptance import accept_rate
from dspec_lab.core.rejection import LazyLaw, draft_rows, verify, verify_greedy
from dspec_lab.core.sampling import entropy_bits, greedy_ids, law
from dspec_lab.core.streams import Chooser, DraftDraws
from dspec_lab.core.types import Generation, Proposal, RoundRecord, TokenSource, Verdict
from dspec_lab.drafters.protocol import Commit, DraftAsk, Drafter
from dspec_lab.models.protocol import Features, Target, TargetRows, TargetSession
from dspec_lab.verifier.stopping import Ending, TokenDecoder, find_ending, spell

# called after the prefill and after each round with the new tokens and where each came from
OnTokens = Callable[[Sequence[int], Sequence[TokenSource]], None]

# the verdict on one proposal: target rows, proposal, settings, chooser, round
Decide = Callable[[TargetRows, Proposal, DecodeConfig, Chooser, int], Verdict]

NOTHING = Proposal(())
BARE = Verdict(num_accepted=0, next_token=0).source(0)  # where the token of a round without drafts comes from

# the prefill's token is drawn as the bonus of this round; rounds proper count from 0
PREFILL_ROUND = 2**40


class Request:
    """A generation in progress. `begin`, then `next_rows` and `take` in turn until `take` says that it ended."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompt_ids: Sequence[int],
        config: DecodeConfig,
        chooser: Chooser,
        *,
        decide_with: Decide | None = None,
        tokenizer: TokenDecoder | None = None,
        on_tokens: OnTokens | None = None,
        trace: bool = False,
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
        self.decide_with = decide_with or decide
        self.gamma, self.sampling = gamma, config.sampling
        self.eos_ids = frozenset() if config.ignore_eos else target.eos_ids
        self.session: TargetSession = target.session(capacity=capacity, taps=drafter.taps if drafter else None)
        self.draft = drafter.start(target, capacity=capacity) if drafter else None
        self.result = Generation(prompt_ids=prompt_ids)

        self._tokenizer, self._on_tokens, self._trace = tokenizer, on_tokens, trace
        self._proposal, self._round_index = Proposal(()), 0
        self._draft_s = self._decode_start = 0.0
        self.ended = False

    def begin(self) -> None:
        """Read the prompt and draw the first token, which may already end the request."""
        started, prompt = time.perf_counter(), self.result.prompt_ids
        rows = self.session.extend(prompt, logit_rows=1)
        if self.sampling.greedy:
            token = greedy_ids(rows.logits_JV)[0]
        else:
            token = self.chooser.categorical("bonus", PREFILL_ROUND, 0, law(rows.logits_JV, self.sampling)[0])
        if self.draft is not None:
            self.draft.commit(Commit((*prompt, token), rows.features))
        self.result.prefill_s = time.perf_counter() - started
        self._decode_start = time.perf_counter()
        self._add([token], ["prefill"])

    def next_rows(self) -> tuple[int, ...]:
        """Draft, and give the tokens the target must be fed now: the newest one and the drafts."""
        start, ask, proposal = time.perf_counter(), self.ask(), Proposal(())
        if ask is not None:
            proposal = ask.session.propose(ask.gamma, ask.sampling, ask.draws)
        return self.rows_of(ask, proposal, time.perf_counter() - start)

    def ask(self) -> DraftAsk | None:
        """What the drafter is to be asked for now; None where nothing is to be drafted."""
        # a round gains at most gamma + 1 tokens, and only so many are still wanted
        gamma = min(self.gamma, self.config.max_new_tokens - len(self.result.token_ids) - 1)
        if self.draft is None or not gamma:
            return None
        draws = DraftDraws(self.chooser, self._round_index)
        return DraftAsk(session=self.draft, gamma=gamma, sampling=self.sampling, draws=draws)

    def rows_of(self, ask: DraftAsk | None, proposal: Proposal, draft_s: float) -> tuple[int, ...]:
        """Take the answer to `ask` and the time it took; the tokens the target must be fed now."""
        wanted = 0 if ask is None else ask.gamma
        if proposal.gamma > wanted:
            raise ValueError(f"the drafter proposed {proposal.gamma} tokens, {wanted} were asked for")
        self._proposal, self._draft_s = proposal, draft_s
        return (self.result.token_ids[-1], *proposal.token_ids)

    def rest(self) -> tuple[int, ...]:
        """The same in a round in which nothing is drafted."""
        self._proposal, self._draft_s = NOTHING, 0.0
        return (self.result.token_ids[-1],)

    @property
    def proposal(self) -> Proposal:
        """What was drafted this round."""
        return self._proposal

    def limit(self, length: int) -> None:
        """Send only the first `length` drafts to the target. The length must not depend on the tokens that are cut."""
        self._proposal = self._proposal.prefix(length)

    def take(self, rows: TargetRows, verify_s: float = 0.0) -> bool:
        """Settle the round with the target's rows for the tokens fed; True when the request has ended.

        The session has been fed all of them; it is rolled back here to what is kept.
        """
        if self.draft is None:
            tokens, sources = [self._plain_token(rows)], ["plain"]
        else:
            tokens, sources = self._settle(rows, verify_s)
        self._round_index += 1
        self._add(tokens, sources)  # type: ignore[arg-type]
        return self.ended

    def _plain_token(self, rows: TargetRows) -> int:
        if self.sampling.greedy:
            return greedy_ids(rows.logits_JV)[0]
        return self.chooser.categorical("plain", self._round_index, 0, law(rows.logits_JV, self.sampling)[0])

    def _settle(self, rows: TargetRows, verify_s: float) -> tuple[list[int], list[TokenSource]]:
        if not self._proposal.token_ids:
            return self._settle_bare(rows, verify_s)
        start, proposal, result = time.perf_counter(), self._proposal, self.result
        base = self.session.length - 1 - proposal.gamma
        verdict = self.decide_with(rows, proposal, self.config, self.chooser, self._round_index)
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
        self.draft.commit(Commit(tuple(tokens), _kept_rows(rows.features, 1 + verdict.num_accepted)))  # type: ignore[union-attr]
        end = time.perf_counter()
        record = RoundRecord(
            round=self._round_index,
            context_tokens=len(result.prompt_ids) + len(result.token_ids),
            gamma=considered.gamma,
            draft_ids=considered.token_ids,
            num_accepted=verdict.num_accepted,
            num_committed=len(tokens),
            next_token=tokens[-1],
            draft_s=self._draft_s + (end - settled),
            verify_s=verify_s,
            overhead_s=settled - start,
            confidence=considered.confidence_G,
        )
        if self._trace:
            add_laws(record, rows, considered, self.config)
        result.rounds.append(record)
        return tokens, sources

    def _settle_bare(self, rows: TargetRows, verify_s: float) -> tuple[list[int], list[TokenSource]]:
        """`_settle` of a round without drafts, of which a request at rest has many: nothing to keep or to roll back."""
        start, proposal, result = time.perf_counter(), self._proposal, self.result
        if self.sampling.greedy and self.decide_with is decide:
            token, source = greedy_ids(rows.logits_JV, what="target (draft position 0)")[0], BARE
        else:
            verdict = self.decide_with(rows, proposal, self.config, self.chooser, self._round_index)
            if verdict.num_accepted:
                raise ValueError(f"a verdict accepts {verdict.num_accepted} drafts of a round that had none")
            token, source = verdict.next_token, verdict.source(0)
        settled = time.perf_counter()
        self.draft.commit(Commit((token,), rows.features))  # type: ignore[union-attr]
        record = RoundRecord(
            round=self._round_index,
            context_tokens=len(result.prompt_ids) + len(result.token_ids),
            gamma=0,
            draft_ids=(),
            num_accepted=0,
            num_committed=1,
            next_token=token,
            draft_s=self._draft_s + (time.perf_counter() - settled),
            verify_s=verify_s,
            overhead_s=settled - start,
            confidence=proposal.confidence_G,
        )
        if self._trace:
            add_laws(record, rows, proposal, self.config)
        result.rounds.append(record)
        return [token], [source]

    def _add(self, tokens: Sequence[int], sources: Sequence[TokenSource]) -> None:
        result, had = self.result, len(self.result.token_ids)
        result.token_ids += tokens
        result.sources += sources
        ending = find_ending(
            result.token_ids, len(tokens), eos_ids=self.eos_ids, max_new_tokens=self.config.max_new_tokens,
            stop_strings=self.config.stop_strings, decoder=self._tokenizer,
        )  # fmt: skip
        if ending is not None:
            self._cut(ending)
        if self._on_tokens and len(result.token_ids) > had:
            self._on_tokens(result.token_ids[had:], result.sources[had:])
        if ending is None:
            return
        self.ended = True
        result.decode_s = time.perf_counter() - self._decode_start
        result.finish_reason = ending.reason
        if ending.text is not None:
            result.text = ending.text
        elif self._tokenizer is not None:
            result.text = spell(self._tokenizer, result.token_ids)

    def _cut(self, ending: Ending) -> None:
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
    given = features.tapped_NF if features.last_ND is None else features.last_ND
    if given is None or len(given) == count:
        return features
    return Features(
        tapped_NF=None if features.tapped_NF is None else features.tapped_NF[:count],
        last_ND=None if features.last_ND is None else features.last_ND[:count],
    )
