"""What defines a neural drafter besides its weights: frozen, without torch. Read from and written to config.json."""

from dataclasses import dataclass
from typing import Literal

from dspec_lab.models.family import ModelSpec

HeadType = Literal["vanilla", "gated", "rnn"]
HEAD_TYPES: tuple[HeadType, ...] = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockArchitecture:
    """A DSpark drafter; DFlash is the one with Markov rank 0 and no confidence head."""

    spec: ModelSpec  # sizes of the draft layers
    target_hidden_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # 0-based layer outputs, -1 is the embedding
    block_size: int  # slots of a block: the anchor and block_size - 1 masks
    mask_token_id: int
    num_anchors: int = 512  # training anchors per sequence
    markov_rank: int = 0  # 0: no sequential head
    markov_head_type: HeadType | None = None
    confidence_head: bool = False
    confidence_with_markov: bool = False
    sample_from_anchor: bool = True  # slot k proposes the token k + 1 places on; else k places, from slot 1
    draft_vocab_size: int | None = None  # None: the whole target vocabulary
    context_window: int | None = None  # context positions before the anchor that are seen; None for all

    def __post_init__(self) -> None:
        _check_vocabulary(self.spec, self.draft_vocab_size)
        _check_layer_ids(self.target_layer_ids, self.num_target_layers)
        if self.block_size < 1 or self.max_gamma < 1:
            raise ValueError(f"block_size {self.block_size} leaves no slot to propose from")
        if not 0 <= self.mask_token_id < self.spec.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.spec.vocab_size}")
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank must be 0 or more, got {self.markov_rank}")
        if self.markov_rank and self.markov_head_type not in HEAD_TYPES:
            raise ValueError(f"markov_head_type must be one of {', '.join(HEAD_TYPES)}, got {self.markov_head_type!r}")
        if not self.markov_rank and self.markov_head_type is not None:
            raise ValueError(f"markov_head_type {self.markov_head_type!r} needs a markov_rank above 0")
        if self.confidence_with_markov and not (self.confidence_head and self.markov_rank):
            raise ValueError("confidence_head_with_markov needs a confidence head and a markov_rank above 0")
        if self.num_anchors < 1:
            raise ValueError(f"num_anchors must be at least 1, got {self.num_anchors}")
        if self.context_window is not None and self.context_window < 1:
            raise ValueError(f"context_window must be at least 1, got {self.context_window}")

    @property
    def first_slot(self) -> int:
        """First slot that proposes a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def max_gamma(self) -> int:
        """Tokens that one block proposes."""
        return self.block_size - self.first_slot

    @property
    def feature_width(self) -> int:
        """Width of the concatenated tapped layers."""
        return len(self.target_layer_ids) * self.target_hidden_size


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainArchitecture:
    """A drafter that runs one token at a time on its own hidden state: EAGLE-3 or multi-token prediction (MTP)."""

    kind: Literal["eagle3", "mtp"]
    spec: ModelSpec
    target_hidden_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...] = ()  # EAGLE-3 only; MTP reads the target's last hidden state
    ttt_length: int = 7  # steps of training-time test, and the longest proposal
    step_loss_decay: float = 0.8
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        _check_vocabulary(self.spec, self.draft_vocab_size)
        if self.kind not in ("eagle3", "mtp"):
            raise ValueError(f"kind must be 'eagle3' or 'mtp', got {self.kind!r}")
        if self.kind == "eagle3":
            _check_layer_ids(self.target_layer_ids, self.num_target_layers)
        elif self.target_layer_ids:
            raise ValueError(f"an MTP drafter reads the last hidden state only, got layer ids {self.target_layer_ids}")
        if self.kind == "mtp" and self.target_hidden_size != self.spec.hidden_size:
            raise ValueError(
                f"an MTP drafter is as wide as its target ({self.target_hidden_size}), got {self.spec.hidden_size}"
            )
        if self.ttt_length < 1:
            raise ValueError(f"ttt_length must be at least 1, got {self.ttt_length}")
        if not 0 < self.step_loss_decay <= 1:
            raise ValueError(f"step_loss_decay must lie in (0, 1], got {self.step_loss_decay}")

    @property
    def max_gamma(self) -> int:
        """Longest proposal: as many steps as were trained."""
        return self.ttt_length

    @property
    def feature_width(self) -> int:
        """Width of what the target hands over for each token."""
        return max(len(self.target_layer_ids), 1) * self.target_hidden_size


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaArchitecture:
    """Parallel heads on the target's last hidden state; head k proposes the token k + 1 places after that state."""

    spec: ModelSpec
    num_target_layers: int
    medusa_num_heads: int = 4
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        _check_vocabulary(self.spec, self.draft_vocab_size)
        if self.medusa_num_heads < 1:
            raise ValueError(f"medusa_num_heads must be at least 1, got {self.medusa_num_heads}")

    @property
    def max_gamma(self) -> int:
        """One token per head."""
        return self.medusa_num_heads


Architecture = BlockArchitecture | ChainArchitecture | MedusaArchitecture


def _check_vocabulary(spec: ModelSpec, draft_vocab_size: int | None) -> None:
    if draft_vocab_size is not None and not 1 <= draft_vocab_size <= spec.vocab_size:
        raise ValueError(f"draft_vocab_size {draft_vocab_size} does not fit the vocabulary of {spec.vocab_size}")


def _check_layer_ids(layer_ids: tuple[int, ...], num_target_layers: int) -> None:
    if not layer_ids:
        raise ValueError("target_layer_ids is empty; the drafter would see nothing of the target")
    if any(later <= earlier for earlier, later in zip(layer_ids, layer_ids[1:], strict=False)):
        raise ValueError(f"target_layer_ids must rise strictly, got {list(layer_ids)}")
    for layer in layer_ids:
        if not -1 <= layer < num_target_layers - 1:
            raise ValueError(
                f"target layer id {layer} is out of range: -1 (embedding) to {num_target_layers - 2} are allowed for "
                f"a target of {num_target_layers} layers"
            )
