"""Tree verification: several candidates per position, one target pass with a tree mask, the same output law.

At a node the candidates are tried in the order they were drawn. Each rejection leaves a residual law for the target
and, as candidates are drawn without replacement, a law without that token for the drafter; if all fail, the token comes
from the last residual. With one candidate per node this is token-wise verification of a chain.

Ref: Miao et al. 2023 (SpecInfer, arXiv:2305.09781) for trees; Jeon et al. 2024 (arXiv:2402.14160) for recursive
rejection of candidates drawn without replacement.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspec_lab.config import DecodeConfig
from dspec_lab.core.rejection import RESIDUAL_FLOOR, LazyLaw, TargetRowsLaw, accept_chance
from dspec_lab.core.streams import Chooser, DraftDraws, RandomStreams
from dspec_lab.core.types import Generation, Proposal, RoundRecord, TokenSource
from dspec_lab.drafters.protocol import Commit, Drafter
from dspec_lab.kernels.rows import BLOCK, RowMarkers
from dspec_lab.models.decoder import DecoderSession, LeanDecoder
from dspec_lab.models.protocol import Features, TargetRows
from dspec_lab.verifier.request import Request
from dspec_lab.verifier.stopping import TokenDecoder

MAX_NODES = 63  # bits of a marker


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Candidates as nodes 1..n; node 0 is the anchor, the newest known token.

    Node i holds `token_ids[i - 1]` and hangs on `parents[i - 1]` < i. `draft_probs[i]` is the law [V] that the children
    of node i were drawn from, one after the other without replacement, in rising node order; a node that is missing
    there has children chosen without sampling (one-hot q).
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    draft_probs: Mapping[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"{len(self.token_ids)} nodes but {len(self.parents)} parents")
        if len(self.token_ids) > MAX_NODES:
            raise ValueError(f"a tree holds at most {MAX_NODES} drafts, got {len(self.token_ids)}")
        taken = set()
        for node, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True), 1):
            if not 0 <= parent < node:
                raise ValueError(f"the parent of node {node} must lie in 0..{node - 1}, got {parent}")
            if token < 0:
                raise ValueError(f"node {node} holds the token id {token}; ids are never negative")
            if (parent, token) in taken:
                raise ValueError(f"node {parent} has two children with the token {token}")
            taken.add((parent, token))

    def children(self, node: int) -> list[int]:
        """Nodes that hang on `node`, in the order they were drawn."""
        return [child for child, parent in enumerate(self.parents, 1) if parent == node]

    def depths(self) -> list[int]:
        """Distance from the anchor of nodes 0..n."""
        depth = [0]
        for parent in self.parents:
            depth.append(depth[parent] + 1)
        return depth


def verify_tree(
    target_rows: TargetRowsLaw, tree: DraftTree, chooser: Chooser, round_index: int
) -> tuple[tuple[int, ...], int]:
    """(nodes of the accepted path, extra token); row i of `target_rows` is the target's law after node i."""
    node, path = 0, list[int]()
    while True:
        target_V = target_rows[node]
        draft_V = tree.draft_probs.get(node)
        draft_V = None if draft_V is None else draft_V.to(target_V)
        children = tree.children(node)
        for child in children:
            token = tree.token_ids[child - 1]
            if token >= target_V.shape[0]:
                raise ValueError(f"node {child} holds the token id {token}; the vocabulary ends at {len(target_V) - 1}")
            if chooser.bernoulli("accept", round_index, child - 1, _accept(target_V, draft_V, token)):
                path.append(child)
                node = child
                break
            target_V, draft_V = _without(target_V, draft_V, token)
        else:
            purpose = "replacement" if children else "bonus"
            return tuple(path), chooser.categorical(purpose, round_index, 0, target_V)


def _accept(target_V: Tensor, draft_V: Tensor | None, token: int) -> float:
    if draft_V is None:
        return float(target_V[token])
    return accept_chance(float(target_V[token]), float(draft_V[token]))


def _without(target_V: Tensor, draft_V: Tensor | None, token: int) -> tuple[Tensor, Tensor | None]:
    """The laws after `token` was rejected: the target's residual, and the drafter's without that token."""
    if draft_V is None:
        left_V = target_V.clone()
        left_V[token] = 0.0
    else:
        left_V = (target_V - draft_V).clamp_min(0)
    mass = left_V.sum()
    if float(mass) > RESIDUAL_FLOOR:
        target_V = left_V / mass
    if draft_V is not None:
        draft_V = draft_V.clone()
        draft_V[token] = 0.0
        rest = draft_V.sum()
        draft_V = draft_V / rest if float(rest) > 0 else draft_V
    return target_V, draft_V


def widen(proposal: Proposal, width: int, vocab_size: int, draws: DraftDraws) -> DraftTree:
    """A tree around a chain: at each position `width - 1` more candidates beside the drafted token, without children.

    A sampled draft's candidates are drawn from its own rows without replacement; a greedy one's are its next best
    tokens, for which it must give logits (over a reduced vocabulary with the ids of its tokens). Width 1 is the chain
    itself.
    """
    if width < 1:
        raise ValueError(f"a tree needs a width of at least 1, got {width}")
    gamma, dense = proposal.gamma, proposal.draft_probs_GV
    if gamma + gamma * (width - 1) > MAX_NODES:
        raise ValueError(f"{gamma} positions of width {width} make {gamma * width} drafts; a tree holds {MAX_NODES}")
    logits, ids = proposal.draft_logits_GV, proposal.logit_ids_V
    if width > 1 and gamma and dense is None:
        if logits is None:
            raise ValueError("the drafter gives no logits to take further candidates from")
        covered = vocab_size if ids is None else len(ids)
        if logits.shape[-1] != covered:
            raise ValueError(f"the drafter gives {logits.shape[-1]} logits a position for {covered} tokens")
    tokens, parents, laws = list[int](), list[int](), dict[int, Tensor]()
    spine = 0
    for k, token in enumerate(proposal.token_ids):
        parent, chosen = spine, [token]
        if dense is not None:
            laws[parent] = dense[k]
            left_V = dense[k].clone()
            left_V[token] = 0.0
            for extra in range(1, width):
                if not float(left_V.sum()) > 0:
                    break
                chosen.append(draws.categorical(extra * gamma + k, left_V))
                left_V[chosen[-1]] = 0.0
        elif width > 1:
            best_C = logits[k].topk(min(width, logits.shape[-1])).indices  # type: ignore[index,union-attr]
            best = (best_C if ids is None else ids[best_C]).tolist()
            chosen += [other for other in best if other != token][: width - 1]
        for index, candidate in enumerate(chosen):
            tokens.append(candidate)
            parents.append(parent)
            if index == 0:
                spine = len(tokens)
    return DraftTree(tuple(tokens), tuple(parents), laws)


@torch.inference_mode()
def extend_tree(session: DecoderSession, anchor: int, tree: DraftTree) -> TargetRows:
    """Feed the anchor and all nodes in one pass, each seeing the context and its own ancestors; a row per node 0..n.

    Afterwards the session holds all of them; `keep_path` must follow.
    """
    decoder, base, count = session.decoder, session.length, 1 + len(tree.token_ids)
    if base + count > session.cache.capacity:
        raise ValueError(f"{base} + {count} tokens do not fit a cache of {session.cache.capacity}")
    ancestors = [0]
    for node, parent in enumerate(tree.parents, 1):
        ancestors.append(ancestors[parent] | 1 << (node - 1))
    device = decoder.device
    zeros_N = torch.zeros(count, dtype=torch.int64, device=device)
    markers = RowMarkers(
        owner_N=zeros_N,
        place_N=torch.arange(base, base + count, device=device),
        first_N=zeros_N,
        prefix_N=torch.full((count,), base + 1, device=device),
        ancestors_N=torch.tensor(ancestors, device=device),
        span=-(-(base + count) // BLOCK) * BLOCK,
    )
    ids_N = torch.tensor((anchor, *tree.token_ids), device=device)
    positions_N = torch.tensor([base + depth for depth in tree.depths()], device=device)
    rows_ND, tapped_NF = decoder.run_rows(ids_N, positions_N, [session.cache], markers, session.taps)
    session.cache.length += count
    features = None
    if session.taps:
        features = Features(tapped_NF=tapped_NF, last_ND=rows_ND if session.taps.last_hidden else None)
    return TargetRows(logits_JV=decoder.logits(rows_ND), features=features)


def keep_path(session: DecoderSession, count: int, path: Sequence[int]) -> None:
    """After `extend_tree` of `count` rows: keep the anchor and the nodes of `path`, on consecutive places."""
    base = session.length - count
    if list(path) != sorted(set(path)) or (path and not 1 <= path[0] <= path[-1] < count):
        raise ValueError(f"a path must rise within 1..{count - 1}, got {list(path)}")
    source = torch.tensor([base + node for node in path], dtype=torch.int64, device=session.decoder.device)
    place = slice(base + 1, base + 1 + len(path))
    for layer in session.cache.layers:
        key, value = layer.keys[0], layer.values[0]
        # indexing with a tensor copies, so reading and writing one region is safe
        key[:, :, place] = key[:, :, source]
        value[:, place] = value[:, source]
    session.truncate(base + 1 + len(path))


def generate_tree(
    target: LeanDecoder,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    config: DecodeConfig,
    *,
    width: int = 2,
    request_id: str = "0",
    tokenizer: TokenDecoder | None = None,
    chooser: Chooser | None = None,
) -> Generation:
    """`verifier.decode.generate` with `width` candidates per drafted position, verified as a tree in one pass.

    In the round records `gamma` counts positions, not nodes; `verified_rows` has the rows sent to the target.
    """
    if config.verification != "token":
        raise ValueError(f"a tree is verified token-wise, not by the rule {config.verification!r}")
    # the prompt gives the first token and the last round its own, so no round drafts more than this
    asked = min(config.gamma, max(config.max_new_tokens - 2, 0)) * width
    if width < 1 or asked > MAX_NODES:
        raise ValueError(f"a tree holds 1..{MAX_NODES} drafts, gamma {config.gamma} and width {width} ask for {asked}")
    request = TreeRequest(
        target, drafter, prompt_ids, config, chooser or RandomStreams(config.seed, request_id), tokenizer=tokenizer
    )
    request.width = width
    # at most gamma x width + 1 rows are fed where gamma + 1 tokens are still wanted
    request.make_room(config.gamma * (width - 1))
    request.begin()
    while not request.ended:
        request.tree_round()
    return request.result


class TreeRequest(Request):
    """A request whose rounds verify trees. Drafting, endings and records are those of `Request`."""

    width: int = 1

    def make_room(self, nodes: int) -> None:
        """A tree is longer than what is kept of it: give the cache room for it."""
        capacity = len(self.result.prompt_ids) + self.config.max_new_tokens + nodes
        target: LeanDecoder = self.target  # type: ignore[assignment]
        if capacity > target.max_context:
            raise ValueError(
                f"{capacity} tokens with the tree do not fit {target.name}, which takes {target.max_context}"
            )
        self.session = target.session(capacity=capacity, taps=self.drafter.taps if self.drafter else None)

    def tree_round(self) -> None:
        """Draft, widen, verify in one pass, settle."""
        started = time.perf_counter()
        self.next_rows()
        proposal = self.proposal
        draws = DraftDraws(self.chooser, self._round_index)
        tree = widen(proposal, self.width, self.target.vocab_size, draws)
        drafted = time.perf_counter()
        session: DecoderSession = self.session  # type: ignore[assignment]
        known, count = len(self.result.prompt_ids) + len(self.result.token_ids), 1 + len(tree.token_ids)
        rows = extend_tree(session, self.result.token_ids[-1], tree)
        verified = time.perf_counter()
        path, extra = verify_tree(LazyLaw(rows.logits_JV, self.sampling), tree, self.chooser, self._round_index)
        kept = [tree.token_ids[node - 1] for node in path]
        end = next((i for i, token in enumerate(kept) if token in self.eos_ids), None)
        bonus = not tree.children(path[-1] if path else 0)
        tokens, sources = (
            [*kept, extra],
            list[TokenSource](["draft"] * len(kept) + ["bonus" if bonus else "replacement"]),
        )
        positions = proposal.gamma
        if end is not None:
            path, tokens, sources, positions = path[: end + 1], tokens[: end + 1], sources[: end + 1], end + 1
        keep_path(session, count, path)
        settled = time.perf_counter()
        rows_kept = [0, *path]
        features = rows.features
        if features is not None:
            features = Features(
                tapped_NF=None if features.tapped_NF is None else features.tapped_NF[rows_kept],
                last_ND=None if features.last_ND is None else features.last_ND[rows_kept],
            )
        self.draft.commit(Commit(tuple(tokens), features))  # type: ignore[union-attr]
        committed = time.perf_counter()
        self.result.rounds.append(
            RoundRecord(
                round=self._round_index,
                context_tokens=known,
                gamma=positions,
                # an accepted candidate beside the chain stands where the chain's token was
                draft_ids=(*kept[: len(path)], *proposal.token_ids[len(path) : positions]),
                num_accepted=len(path),
                num_committed=len(tokens),
                next_token=tokens[-1],
                draft_s=(drafted - started) + (committed - settled),
                verify_s=verified - drafted,
                overhead_s=settled - verified,
                verified_rows=count,
            )
        )
        self._round_index += 1
        self._add(tokens, sources)
