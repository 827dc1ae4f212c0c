"""Ragged batched verification: many requests, each with its own context and draft length, in one target pass.

All rows are flattened into one; which row sees which is carried by markers, not by padding. Requests have their own
drafter, seed, temperature, caps and random streams, and join or leave between rounds. Those that share a block drafter
draft in one pass (`drafters.together`). Otherwise each request runs the code that a single one runs
(`verifier.request.Request`), so its output does not depend on its neighbours: on the CPU's native row ops bit for bit,
elsewhere up to rounding. There a pass of more rows than the compiled product takes (`most_rows`) is run in parts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from dspec_lab.config import DecodeConfig
from dspec_lab.core.streams import RandomStreams
from dspec_lab.core.types import Generation, Proposal
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.drafters.together import Drafted, propose_together
from dspec_lab.kernels.rows import BLOCK, RowMarkers, row_runs
from dspec_lab.models.decoder import DecoderSession, LeanDecoder
from dspec_lab.models.protocol import Features, Taps, TargetRows
from dspec_lab.verifier.request import OnTokens, Request
from dspec_lab.verifier.stopping import TokenDecoder

# decides how many drafts of each active request are verified this round, given the requests after drafting; or how many
# its drafter is asked for, given them before
LengthPolicy = Callable[[Sequence[Request]], Sequence[int]]


NOTHING = Drafted(Proposal(()), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """What one request of a batch asks for. `drafter` None is plain decoding."""

    request_id: str
    prompt_ids: tuple[int, ...]
    config: DecodeConfig
    drafter: Drafter | None = None
    on_tokens: OnTokens | None = None


@dataclass(frozen=True, slots=True)
class BatchRound:
    """One pass of the batch, as measured (seconds)."""

    requests: int
    rows: int  # tokens sent to the target: sum of 1 + drafts
    draft_s: float
    verify_s: float
    settle_s: float
    drafting: int = 0  # requests that drafted
    drafted: int = 0  # tokens they drafted, before a policy cut


class RaggedBatch:
    """The requests that share passes of one lean decoder."""

    def __init__(
        self,
        target: LeanDecoder,
        *,
        tokenizer: TokenDecoder | None = None,
        policy: LengthPolicy | None = None,
        gate: LengthPolicy | None = None,
        trace: bool = False,
    ) -> None:
        self.target, self._tokenizer, self._policy, self._gate = target, tokenizer, policy, gate
        self._trace = trace
        self._active: dict[str, Request] = {}
        self._ended: dict[str, Generation] = {}  # not handed out yet
        self.rounds: list[BatchRound] = []

    def __len__(self) -> int:
        return len(self._active)

    def join(self, wanted: BatchRequest) -> Generation | None:
        """Read the prompt and take part from the next round on; the result already if the first token ended it."""
        if wanted.request_id in self._active:
            raise ValueError(f"request {wanted.request_id!r} is in the batch already")
        streams = RandomStreams(wanted.config.seed, wanted.request_id)
        request = Request(
            self.target, wanted.drafter, wanted.prompt_ids, wanted.config, streams,
            tokenizer=self._tokenizer, on_tokens=wanted.on_tokens, trace=self._trace,
        )  # fmt: skip
        request.begin()
        if request.ended:
            return request.result
        self._active[wanted.request_id] = request
        return None

    def leave(self, request_id: str) -> Generation:
        """Take a request out before its end; its result so far."""
        if request_id not in self._active:
            raise ValueError(f"request {request_id!r} is not in the batch")
        return self._active.pop(request_id).result

    def step(self) -> dict[str, Generation]:
        """One round for every active request; the results of those that ended.

        A request that cannot be settled (its rows are not finite, say) is taken out and its error raised, with its id
        in a note. The others have had their round and may go on; results of those that ended come with the next call.
        """
        if self._active:
            self._round()
        ended, self._ended = self._ended, {}
        return ended

    def _round(self) -> None:
        names, requests = list(self._active), list(self._active.values())
        start, rest = time.perf_counter(), False
        if self._gate is not None:
            asked = self._gate(requests)
            for request, length in zip(requests, asked, strict=True):
                request.gamma = length
            rest = not any(asked)
        feeds = [request.rest() for request in requests] if rest else _draft(requests)
        drafts = [len(feed) - 1 for feed in feeds]
        if self._policy is not None:
            lengths = self._policy(requests)
            for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
                if length != drafts[i]:
                    request.limit(length)
                    feeds[i] = feeds[i][: 1 + length]
        drafted = time.perf_counter()
        rows = extend_ragged([request.session for request in requests], feeds)  # type: ignore[misc]
        verified = time.perf_counter()
        # a request's share of the pass, by its rows
        per_row = (verified - drafted) / sum(map(len, feeds))
        failed: dict[str, Exception] = {}
        for i, (name, request) in enumerate(zip(names, requests, strict=True)):
            # whoever is shown tokens (`on_tokens`) may take requests out, this one too
            if self._active.get(name) is not request:
                continue
            try:
                over = request.take(rows[i], per_row * len(feeds[i]))
            except Exception as error:
                # raised below, when the neighbours are settled
                self._active.pop(name, None)
                failed[name] = error
                continue
            if over and self._active.get(name) is request:
                self._ended[name] = self._active.pop(name).result
        self.rounds.append(
            BatchRound(
                requests=len(requests),
                rows=sum(map(len, feeds)),
                draft_s=drafted - start,
                verify_s=verified - drafted,
                settle_s=time.perf_counter() - verified,
                drafting=sum(count > 0 for count in drafts),
                drafted=sum(drafts),
            )
        )
        if failed:
            error = next(iter(failed.values()))
            error.add_note(f"in {', '.join(map(repr, failed))} of the batch")
            raise error


def _draft(requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """`Request.next_rows` of all, with one drafting pass where requests can share it."""
    asks = [request.ask() for request in requests]
    answers = iter(propose_together([ask for ask in asks if ask is not None]))
    feeds = []
    for request, ask in zip(requests, asks, strict=True):
        answer = NOTHING if ask is None else next(answers)
        feeds.append(request.rows_of(ask, answer.proposal, answer.seconds))
    return feeds


@torch.inference_mode()
def extend_ragged(sessions: Sequence[DecoderSession], feeds: Sequence[Sequence[int]]) -> list[TargetRows]:
    """Feed `feeds[i]` to session i, all in one pass; the rows of each, as its own `extend` would give them.

    Where the row ops take `most_rows` rows a pass, more are run in parts, each of whole feeds. The sessions must belong
    to one decoder and differ. Raises `ValueError` for an empty feed or one that does not fit its cache.
    """
    if len(sessions) != len(feeds) or not sessions:
        raise ValueError(f"{len(sessions)} sessions but {len(feeds)} feeds")
    decoder = sessions[0].decoder
    for i, (session, feed) in enumerate(zip(sessions, feeds, strict=True)):
        if session.decoder is not decoder:
            raise ValueError(f"session {i} belongs to the decoder {session.decoder.name}, not to {decoder.name}")
        if not feed or session.length + len(feed) > session.cache.capacity:
            raise ValueError(
                f"session {i}: {len(feed)} tokens after {session.length} do not fit a cache of {session.cache.capacity}"
            )
    caches = len({id(session.cache) for session in sessions})
    if caches != len(sessions):
        raise ValueError(f"{len(sessions)} sessions share {caches} caches; each needs one of its own")
    found = list[TargetRows]()
    for part in row_runs([len(feed) for feed in feeds], decoder.ops.most_rows):
        found += _one_pass(decoder, sessions[part], feeds[part])
    return found


def _one_pass(
    decoder: LeanDecoder, sessions: Sequence[DecoderSession], feeds: Sequence[Sequence[int]]
) -> list[TargetRows]:
    owner, place = list[int](), list[int]()
    for i, (session, feed) in enumerate(zip(sessions, feeds, strict=True)):
        owner += [i] * len(feed)
        place += range(session.length, session.length + len(feed))
    device = decoder.device
    ids = [token for feed in feeds for token in feed]
    ids_N, owner_N, place_N, zeros_N = torch.tensor([ids, owner, place, [0] * len(ids)], device=device)
    markers = RowMarkers(
        owner_N=owner_N,
        place_N=place_N,
        first_N=zeros_N,
        prefix_N=place_N + 1,
        ancestors_N=zeros_N,
        span=-(-(max(place) + 1) // BLOCK) * BLOCK,
    )
    first = sessions[0].taps
    alike = all(session.taps is first for session in sessions)
    layers = list(first.layers) if alike else sorted({layer for session in sessions for layer in session.taps.layers})
    caches = [session.cache for session in sessions]
    rows_ND, tapped_NF = decoder.run_rows(ids_N, place_N, caches, markers, Taps(layers=tuple(layers)))
    counts, width = [len(feed) for feed in feeds], decoder.hidden_size
    logits, hidden = decoder.logits(rows_ND).split(counts), rows_ND.split(counts)
    tapped = [None] * len(feeds) if tapped_NF is None else tapped_NF.split(counts)
    found = []
    for session, count, logits_JV, mine_ND, mine_NF in zip(sessions, counts, logits, hidden, tapped, strict=True):
        session.cache.length += count
        features, taps = None, session.taps
        if taps:
            if not taps.layers:
                mine_NF = None
            elif not alike and mine_NF is not None and list(taps.layers) != layers:
                # each session gets the layers it asked for
                parts = [layers.index(layer) for layer in taps.layers]
                mine_NF = torch.cat([mine_NF[:, part * width : (part + 1) * width] for part in parts], -1)
            features = Features(tapped_NF=mine_NF, last_ND=mine_ND if taps.last_hidden else None)
        found.append(TargetRows(logits_JV=logits_JV, features=features))
    return found


def generate_batch(
    target: LeanDecoder,
    requests: Iterable[BatchRequest],
    *,
    max_active: int = 16,
    tokenizer: TokenDecoder | None = None,
    policy: LengthPolicy | None = None,
    trace: bool = False,
) -> dict[str, Generation]:
    """Results by request id; at most `max_active` share a pass, and a new one joins as soon as one has ended.

    With `trace` the rounds carry 1 - TV and entropies.
    """
    if max_active < 1:
        raise ValueError(f"max_active must be at least 1, got {max_active}")
    waiting = deque(requests)
    ids = [wanted.request_id for wanted in waiting]
    if len(set(ids)) != len(ids):
        raise ValueError(f"request ids must differ, got {ids}")
    batch, results = RaggedBatch(target, tokenizer=tokenizer, policy=policy, trace=trace), dict[str, Generation]()
    while waiting or len(batch):
        while waiting and len(batch) < max_active:
            wanted = waiting.popleft()
            result = batch.join(wanted)
            if result is not None:
                results[wanted.request_id] = result
        results |= batch.step()
    return {request_id: results[request_id] for request_id in ids}
