"""Records that pass between drafter, target and verifier, and the axis letters used in tensor names.

One letter, one meaning, everywhere in the package:

`B` sequence, `T` context position, `G` draft position (gamma of them), `J` verified row (gamma + 1), `N` flattened
token, `V` vocabulary, `D` width, `A` anchor, `L` tapped layer, `H` attention head, `K` key/value head, `S` key
position (cached and new), `E` width of one head, `F` concatenated tapped features (L x D), `R` Markov rank,
`M` inner width of the MLP, `I` recorded round, `C` bin of a histogram, `X` grid point or resample, `1` singleton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

TokenSource = Literal["prefill", "plain", "draft", "replacement", "bonus"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter offers in one round, with the law its tokens were drawn from.

    Two legal kinds. `dense`: token k was drawn from row k of `draft_probs_GV`, and that very tensor goes to the
    verifier. `one_hot` (`draft_probs_GV` is None): the tokens were chosen without regard to the target's own draw
    (n-gram match, greedy draft), so q has all its mass on them.
    """

    token_ids: tuple[int, ...]
    draft_probs_GV: Tensor | None = None  # fp32 or wider, rows sum to 1, after the sampling filters
    draft_logits_GV: Tensor | None = None  # raw logits, for traces and a tree's next best tokens
    logit_ids_V: Tensor | None = None  # target ids of the logits' columns where they cover a reduced vocabulary
    confidence_G: tuple[float, ...] | None = None  # conditional survival c_k in [0, 1]

    def __post_init__(self) -> None:
        bad = [token for token in self.token_ids if token < 0]
        if bad:
            raise ValueError(f"a proposal holds the token id {bad[0]}; ids are never negative")
        rows = None if self.draft_probs_GV is None else self.draft_probs_GV.shape[0]
        if rows is not None and rows != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} drafted tokens but {rows} rows of draft probabilities")
        if self.confidence_G is not None and len(self.confidence_G) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} drafted tokens but {len(self.confidence_G)} confidences")

    @property
    def gamma(self) -> int:
        """Tokens proposed in this round."""
        return len(self.token_ids)

    @property
    def kind(self) -> Literal["one_hot", "dense"]:
        """How the verifier must read q."""
        return "one_hot" if self.draft_probs_GV is None else "dense"

    def prefix(self, length: int) -> Proposal:
        """The first `length` tokens with their rows. The length must not depend on the tokens that are cut."""
        if not 0 <= length <= self.gamma:
            raise ValueError(f"cannot keep {length} of {self.gamma} drafted tokens")
        if length == self.gamma:
            return self
        return Proposal(
            token_ids=self.token_ids[:length],
            draft_probs_GV=None if self.draft_probs_GV is None else self.draft_probs_GV[:length],
            draft_logits_GV=None if self.draft_logits_GV is None else self.draft_logits_GV[:length],
            logit_ids_V=self.logit_ids_V,
            confidence_G=None if self.confidence_G is None else self.confidence_G[:length],
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier decided in one round."""

    num_accepted: int  # 0..gamma, without the extra token
    next_token: int  # replacement at the first rejection, else bonus

    def source(self, gamma: int) -> TokenSource:
        """Whether `next_token` is a replacement or a bonus."""
        return "bonus" if self.num_accepted == gamma else "replacement"


@dataclass(slots=True)
class RoundRecord:
    """One draft + verify cycle, as measured. Times are wall-clock seconds."""

    round: int
    context_tokens: int  # tokens known before the round, the anchor included
    gamma: int  # tokens proposed and verified
    draft_ids: tuple[int, ...]
    num_accepted: int
    num_committed: int  # tokens kept from this round after end tokens and length caps
    next_token: int
    draft_s: float
    verify_s: float
    overhead_s: float  # everything else in the round
    confidence: tuple[float, ...] | None = None
    accept_prob: tuple[float, ...] | None = None  # 1 - TV per position; traced runs only
    target_entropy_bits: tuple[float, ...] | None = None
    draft_entropy_bits: tuple[float, ...] | None = None
    verified_rows: int | None = None  # rows sent to the target where that is not gamma + 1 (trees)


@dataclass(slots=True)
class Generation:
    """The result of one request."""

    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    sources: list[TokenSource] = field(default_factory=list)  # one per token
    rounds: list[RoundRecord] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    text: str | None = None  # decoded and cut before a stop string, where a tokenizer was given
    prefill_s: float = 0.0
    decode_s: float = 0.0  # from the end of the prefill to the last token

    @property
    def num_proposed(self) -> int:
        """Drafted tokens sent to the target."""
        return sum(record.gamma for record in self.rounds)

    @property
    def num_accepted(self) -> int:
        """Drafts that the verifier accepted (before end tokens cut the text)."""
        return sum(record.num_accepted for record in self.rounds)

    @property
    def num_committed(self) -> int:
        """Tokens gained in rounds; the first token comes from the prefill and is not among them."""
        return sum(record.num_committed for record in self.rounds)
