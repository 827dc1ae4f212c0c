"""One drafting pass for all requests of a round that share a block drafter (DSpark, DFlash).

Blocks of R requests run as R x block_size rows through every matrix at once, so each weight is read once a round. Each
request keeps what is its own: draft cache, positions, attention, random streams, temperature. The rows of a matrix
product do not depend on their neighbours in the native row ops, so there a proposal is, bit for bit, the one that the
session's own `propose` gives (with silu activations); elsewhere it is so up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspec_lab.core.types import Proposal
from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.block_rows import append_rows, block_rows, greedy_walk
from dspec_lab.drafters.cache import DraftCache, RowCache
from dspec_lab.drafters.choose import TokenChooser
from dspec_lab.drafters.dspark import BlockSession
from dspec_lab.drafters.layers import attend, rotate
from dspec_lab.drafters.protocol import DraftAsk, DraftSession, SessionView
from dspec_lab.kernels.rows import row_ops, row_runs

LARGEST_PASS = 1024  # rows of a joint pass, which bounds the memory of their logits


@dataclass(frozen=True, slots=True)
class Drafted:
    """The answer to one `DraftAsk`."""

    proposal: Proposal
    seconds: float  # that it took, or its equal share of a pass for several


def propose_together(asks: Sequence[DraftAsk]) -> list[Drafted]:
    """What each session's own `propose` gives, in the order of `asks`.

    Sessions of one block drafter share a pass, of at most `LARGEST_PASS` rows or as many as the row ops take; all
    others propose one after another.
    """
    found: dict[int, Drafted] = {}
    shared: dict[int, list[int]] = {}
    for i, ask in enumerate(asks):
        core = _drafting_session(ask.session)
        key = id(core.model) if isinstance(core, BlockSession) and drafts_jointly(core) and ask.gamma > 0 else ~i
        shared.setdefault(key, []).append(i)
    for members in shared.values():
        core = _drafting_session(asks[members[0]].session)
        most = _most_blocks(core.model) if isinstance(core, BlockSession) else 1
        # passes of nearly equal size
        passes = -(-len(members) // most)
        for n in range(passes):
            part = members[n * len(members) // passes : (n + 1) * len(members) // passes]
            start = time.perf_counter()
            if len(part) == 1:
                ask = asks[part[0]]
                proposals = [ask.session.propose(ask.gamma, ask.sampling, ask.draws)]
            else:
                proposals = propose_blocks([asks[i] for i in part])
            share = (time.perf_counter() - start) / len(part)
            found |= {i: Drafted(proposal, share) for i, proposal in zip(part, proposals, strict=True)}
    return [found[i] for i in range(len(asks))]


def _most_blocks(model: BlockDraftModel) -> int:
    return max(1, _most_rows(model) // model.arch.block_size)


def _most_rows(model: BlockDraftModel) -> int:
    most = row_ops("auto", model.fc.weight.device).most_rows
    return LARGEST_PASS if most is None else min(most, LARGEST_PASS)


def drafts_jointly(session: DraftSession) -> bool:
    """Whether `propose_together` can draft for this session in a pass with others."""
    # not for a subclass: it may propose in another way
    return type(_drafting_session(session)) is BlockSession


@torch.inference_mode()
def propose_blocks(asks: Sequence[DraftAsk]) -> list[Proposal]:
    """`propose` of sessions of one block drafter, in one pass; each is asked for at least one token."""
    sessions = [_drafting_session(ask.session) for ask in asks]
    blocks = [session for session in sessions if isinstance(session, BlockSession)]
    if not asks or len(blocks) != len(asks) or len({id(session.model) for session in blocks}) != 1:
        names = [type(session).__name__ for session in sessions]
        raise ValueError(f"a joint pass needs sessions of one block drafter, got {names}")
    if min(ask.gamma for ask in asks) < 1:
        raise ValueError(f"each session must be asked for at least 1 token, got {[ask.gamma for ask in asks]}")
    model, caches = blocks[0].model, [session.cache for session in blocks]
    anchors = [session.anchor_for(ask.gamma) for session, ask in zip(blocks, asks, strict=True)]
    append_contexts(model, caches, [session.hand_over() for session in blocks])
    hidden_RGD = hidden_blocks(model, caches, anchors)
    choosers = [TokenChooser(model, ask.sampling, ask.draws) for ask in asks]
    proposals = _walk(model, hidden_RGD, anchors, [ask.gamma for ask in asks], choosers)
    return [_as_seen(ask.session, proposal) for ask, proposal in zip(asks, proposals, strict=True)]


def append_contexts(
    model: BlockDraftModel, caches: Sequence[DraftCache], features: Sequence[Float[Tensor, "_ F"] | None]
) -> None:
    """`append_context` of each cache with its own features (None: nothing new), few rows in joint products."""
    if all(isinstance(cache, RowCache) for cache in caches):
        given = [pair for pair in zip(caches, features, strict=True) if pair[1] is not None]
        for part in row_runs([rows_NF.shape[0] for _, rows_NF in given], _most_rows(model)):
            append_rows(model, [cache for cache, _ in given[part]], [rows_NF for _, rows_NF in given[part]])
        return
    waiting: list[tuple[DraftCache, Tensor]] = []
    rows, most = 0, _most_rows(model)
    for cache, features_NF in zip(caches, features, strict=True):
        if features_NF is None:
            continue
        if features_NF.shape[0] > most:
            # another product than the one for few rows, and enough work for a pass of its own
            model.append_context(cache, features_NF)
            continue
        seen_NF = features_NF[cache.make_room(features_NF.shape[0]) :]
        if rows + seen_NF.shape[0] > most:
            _append(model, waiting)
            waiting, rows = [], 0
        waiting.append((cache, seen_NF))
        rows += seen_NF.shape[0]
    if rows:
        _append(model, waiting)


def _append(model: BlockDraftModel, waiting: Sequence[tuple[DraftCache, Tensor]]) -> None:
    counts = [features_NF.shape[0] for _, features_NF in waiting]
    context_1ND = model.context(torch.cat([features_NF for _, features_NF in waiting]))[None]
    positions_1N = torch.cat(
        [torch.arange(cache.length, cache.length + features_NF.shape[0]) for cache, features_NF in waiting]
    )[None].to(context_1ND.device)
    cos_1NE, sin_1NE = model.rotary.at(positions_1N, context_1ND)
    for index, layer in enumerate(model.layers):
        k_1NKE, v_1NKE = layer.self_attn.project_context(context_1ND)
        k_1NKE = rotate(k_1NKE, cos_1NE[:, :, None], sin_1NE[:, :, None])
        keys, values = k_1NKE.transpose(1, 2).split(counts, dim=2), v_1NKE.transpose(1, 2).split(counts, dim=2)
        for (cache, _), keys_1KTE, values_1KTE in zip(waiting, keys, values, strict=True):
            cache.write(index, 0, keys_1KTE, values_1KTE)
    for (cache, _), count in zip(waiting, counts, strict=True):
        cache.advance(count)


def hidden_blocks(
    model: BlockDraftModel, caches: Sequence[DraftCache], anchors: Sequence[int]
) -> Float[Tensor, "R G D"]:
    """`block_hidden` of each cache and anchor: all blocks' rows through the matrices at once.

    Attention goes block by block, unless the compiled row ops serve.
    """
    if all(isinstance(cache, RowCache) for cache in caches):
        return block_rows(model, caches, anchors)
    size, device = model.arch.block_size, model.fc.weight.device
    ids_RG = torch.full((len(caches), size), model.arch.mask_token_id, device=device)
    ids_RG[:, 0] = torch.tensor(anchors, device=device)
    x_RGD = model.embed(ids_RG)
    positions_RG = torch.tensor([cache.length for cache in caches], device=device)[:, None] + torch.arange(
        size, device=device
    )
    cos_RGE, sin_RGE = model.rotary.at(positions_RG, x_RGD)
    cos_RG1E, sin_RG1E = cos_RGE[:, :, None], sin_RGE[:, :, None]
    for index, layer in enumerate(model.layers):
        attention = layer.self_attn
        q_RGHE, k_RGKE, v_RGKE = attention.project(layer.input_layernorm(x_RGD))
        q_RGHE, k_RGKE = rotate(q_RGHE, cos_RG1E, sin_RG1E), rotate(k_RGKE, cos_RG1E, sin_RG1E)
        attended = []
        for r, cache in enumerate(caches):
            mine = slice(r, r + 1)
            cache.write(index, 0, k_RGKE[mine].transpose(1, 2), v_RGKE[mine].transpose(1, 2))
            keys_1KSE, values_1KSE = cache.read(index, size)
            attended.append(attend(q_RGHE[r], keys_1KSE, values_1KSE, attention.shape.score_scale, causal=False))
        x_RGD = layer.finish(x_RGD, torch.cat(attended))
    return model.norm(x_RGD)


def _walk(
    model: BlockDraftModel,
    hidden_RGD: Tensor,
    anchors: Sequence[int],
    gammas: Sequence[int],
    choosers: Sequence[TokenChooser],
) -> list[Proposal]:
    """`BlockDraftModel.draft` of all blocks, slot by slot for those that still draft."""
    # longest first: who still drafts at a slot is always a beginning of this order
    order = sorted(range(len(gammas)), key=lambda r: -gammas[r])
    counts = [sum(gamma > k for gamma in gammas) for k in range(max(gammas))]
    starts = [sum(counts[:k]) for k in range(len(counts))]
    rows_N = _slot_rows(order, counts, hidden_RGD.shape[1], model.arch.first_slot).to(hidden_RGD.device)
    hidden_ND = hidden_RGD.flatten(0, 1)[rows_N]
    base_NW = model.head_logits(hidden_ND)
    if all(chooser.greedy for chooser in choosers):
        walked = greedy_walk(model, base_NW, [anchors[r] for r in order], counts)
        if walked is not None:
            return _greedy_proposals(model, hidden_ND, base_NW, walked, order, gammas, starts, choosers)
    head, state_BR = model.markov_head, None
    if head is not None and (state_1R := head.initial_state()) is not None:
        state_BR = state_1R.expand(len(order), -1)
    previous_B = torch.tensor([anchors[r] for r in order], device=base_NW.device)
    tokens: list[list[int]] = [[] for _ in order]
    logits, embedded = [], []
    for k, count in enumerate(counts):
        here = slice(starts[k], starts[k] + count)
        logits_BW = base_NW[here]
        if head is not None:
            e_BR = head.embed(previous_B[:count])
            feature_BR, state_BR = head.step(e_BR, hidden_ND[here], None if state_BR is None else state_BR[:count])
            logits_BW = head.bias(feature_BR).add_(logits_BW)
            embedded.append(e_BR)
        picked = [choosers[order[j]].pick(k, logits_BW[j : j + 1]) for j in range(count)]
        previous_B = model.to_target_ids(torch.tensor(picked, device=base_NW.device))
        for j, token in enumerate(previous_B.tolist()):
            tokens[j].append(token)
        logits.append(logits_BW)
    confidence_N = None
    if model.confidence_head is not None:
        previous_NR = torch.cat(embedded) if model.confidence_head.uses_previous else None
        confidence_N = model.confidence_head(hidden_ND, previous_NR)
    found: dict[int, Proposal] = {}
    for j, r in enumerate(order):
        logits_GW = torch.cat([logits[k][j : j + 1] for k in range(gammas[r])])
        confidence_G = None
        if confidence_N is not None:
            confidence_G = torch.stack([confidence_N[starts[k] + j] for k in range(gammas[r])])
        found[r] = choosers[r].proposal(tuple(tokens[j]), logits_GW, confidence_G)
    return [found[r] for r in range(len(order))]


def _greedy_proposals(
    model: BlockDraftModel,
    hidden_ND: Tensor,
    logits_NW: Tensor,
    walked: tuple[list[int], Tensor | None],
    order: Sequence[int],
    gammas: Sequence[int],
    starts: Sequence[int],
    choosers: Sequence[TokenChooser],
) -> list[Proposal]:
    """The proposals of blocks whose tokens, slot by slot, are known."""
    tokens_N, embedded_NR = walked
    confidence_N = None
    if model.confidence_head is not None:
        confidence_N = model.confidence_head(hidden_ND, embedded_NR if model.confidence_head.uses_previous else None)
    found: dict[int, Proposal] = {}
    for j, r in enumerate(order):
        mine = [start + j for start in starts[: gammas[r]]]
        found[r] = choosers[r].proposal(
            tuple(tokens_N[n] for n in mine),
            logits_NW if len(order) == 1 else logits_NW[mine],
            None if confidence_N is None else confidence_N if len(order) == 1 else confidence_N[mine],
        )
    return [found[r] for r in range(len(order))]


def _slot_rows(order: Sequence[int], counts: Sequence[int], size: int, first: int) -> Int[Tensor, " N"]:
    """Which rows of the flattened blocks are asked for, slot by slot: block `order[j]`, for the first `counts[k]` j."""
    return torch.tensor([order[j] * size + first + k for k, count in enumerate(counts) for j in range(count)])


def _drafting_session(session: DraftSession) -> DraftSession:
    """The session behind its views."""
    while _is_view(session):
        session = session.inner
    return session


def _as_seen(session: DraftSession, proposal: Proposal) -> Proposal:
    """The proposal of the innermost session as `session` shows it."""
    return session.seen(_as_seen(session.inner, proposal)) if _is_view(session) else proposal


def _is_view(session: DraftSession) -> TypeGuard[SessionView]:
    # asked for each request of each round, where isinstance would go through the protocol's members
    return hasattr(type(session), "seen")
