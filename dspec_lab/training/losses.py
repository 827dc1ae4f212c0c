"""The block drafter's training loss, with its numerators, denominators and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.training.anchors import Anchors, Mask, block_labels
from dspec_lab.training.teacher import Teacher
from dspec_lab.training.terms import ROWS_PER_CHUNK, RowTerms, model_row_terms
from dspec_lab.training.vocabulary_sample import VocabularySample

DENOMINATOR_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """Weights of the block drafter's loss. DFlash is ce 1, l1 0, confidence 0."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    slot_decay_gamma: float | None = 4.0  # slot k weighs exp(-k / gamma); None: all slots alike
    confidence_through_backbone: bool = True  # whether the confidence term's gradient reaches the draft layers

    def __post_init__(self) -> None:
        if min(self.ce, self.l1, self.confidence) < 0 or self.ce + self.l1 <= 0:
            raise ValueError(f"loss weights must be 0 or more, with ce or l1 above 0, got {self}")
        if self.slot_decay_gamma is not None and self.slot_decay_gamma <= 0:
            raise ValueError(f"slot_decay_gamma must be above 0 or None, got {self.slot_decay_gamma}")


@dataclass(frozen=True, slots=True)
class Ratio:
    """A mean kept as its two sums, so that it can be pooled over batches and processes."""

    num: float
    den: float

    @property
    def value(self) -> float:
        """num / den, NaN for an empty mean."""
        return self.num / self.den if self.den else float("nan")


@dataclass(frozen=True, slots=True)
class LossReport:
    """The loss to differentiate, and what it is made of."""

    total: Tensor
    metrics: dict[str, Ratio] = field(default_factory=dict)
    weight: float = 1.0  # what `total` was divided by: a mean over several batches weighs each by it


def dspark_loss(
    model: BlockDraftModel,
    features_BTF: Float[Tensor, "B T F"],
    input_ids_BT: Int[Tensor, "B T"],
    loss_mask_BT: Mask,
    last_hidden_BTD: Float[Tensor, "B T D"],
    anchors: Anchors,
    weights: LossWeights,
    *,
    teacher_lse_BT: Float[Tensor, "B T"] | None = None,
    vocabulary: VocabularySample | None = None,
    num_slots: int | None = None,
    sum_over_processes: Callable[[Tensor], Tensor] | None = None,
    num_processes: int = 1,
    rows_per_chunk: int = ROWS_PER_CHUNK,
) -> LossReport:
    """w_ce CE + w_l1 L1 + w_conf CONF over the supervised slots of the given anchors' blocks.

    Each term is a mean with slot weights w = exp(-k / gamma) over the whole batch, all processes included: numerators
    stay local, denominators are summed, and the total is multiplied by the number of processes, since gradients are
    averaged. `last_hidden_BTD` is after the target's final norm. A term of weight 0 takes no part in the gradient.
    `num_slots` shortens the blocks; `vocabulary` estimates the sums over the draft vocabulary.

    Ref: DSpark (arXiv:2607.05147), section 3.3; here k counts from 0.
    """
    arch = model.arch
    num_slots = arch.block_size if num_slots is None else num_slots
    labels = block_labels(input_ids_BT, loss_mask_BT, anchors, num_slots - arch.first_slot)
    anchor_ids_BA = input_ids_BT.gather(1, anchors.positions_BA)
    slots_BASD = model.train_hidden(features_BTF, anchor_ids_BA, anchors.positions_BA, num_slots=num_slots)
    hidden_BAGD = slots_BASD[:, :, arch.first_slot :]
    feature_BAGR = None
    if model.markov_head is not None:
        feature_XGR = model.markov_head.features(labels.previous_ids_BAG.flatten(0, 1), hidden_BAGD.flatten(0, 1))
        feature_BAGR = feature_XGR.view(*hidden_BAGD.shape[:3], -1)

    supervised_BAG = labels.supervised_BAG
    rows = supervised_BAG.nonzero(as_tuple=True)
    batch_N = rows[0]
    teacher_N = batch_N * input_ids_BT.shape[1] + labels.teacher_index_BAG[rows]
    teacher = Teacher(model, last_hidden_BTD, teacher_lse_BT, vocabulary)
    teacher.prepare(teacher_N)
    terms = model_row_terms(
        model,
        hidden_BAGD[rows],
        None if feature_BAGR is None else feature_BAGR[rows],
        teacher,
        teacher_N,
        labels.label_ids_BAG[rows],
        rows_per_chunk=rows_per_chunk,
    )
    confidence_N = None
    if model.confidence_head is not None:
        confidence_N = _confidence_rows(model, hidden_BAGD, labels.previous_ids_BAG, rows, weights)
    return _reduce_block_terms(
        terms, confidence_N, supervised_BAG, rows, weights, sum_over_processes or (lambda x: x), num_processes
    )


def _confidence_rows(
    model: BlockDraftModel,
    hidden_BAGD: Tensor,
    previous_ids_BAG: Tensor,
    rows: tuple[Tensor, ...],
    weights: LossWeights,
) -> Tensor:
    hidden_ND, previous_NR = hidden_BAGD[rows], None
    if model.confidence_head.uses_previous:
        previous_NR = model.markov_head.embed(previous_ids_BAG[rows])
    if not weights.confidence_through_backbone:
        hidden_ND = hidden_ND.detach()
        previous_NR = None if previous_NR is None else previous_NR.detach()
    with torch.set_grad_enabled(torch.is_grad_enabled() and weights.confidence > 0):
        return model.confidence_head(hidden_ND, previous_NR)


def _reduce_block_terms(
    terms: RowTerms,
    confidence_N: Tensor | None,
    supervised_BAG: Tensor,
    rows: tuple[Tensor, ...],
    weights: LossWeights,
    sum_over_processes: Callable[[Tensor], Tensor],
    num_processes: int,
) -> LossReport:
    slot_N = rows[-1]
    decay = weights.slot_decay_gamma
    w_N = torch.ones_like(terms.accept_rate_N) if decay is None else torch.exp(-slot_N.float() / decay)
    den = w_N.sum()
    shared_den = sum_over_processes(den.clone()) + DENOMINATOR_FLOOR
    metrics: dict[str, Ratio] = {}
    total = terms.accept_rate_N.new_zeros(())

    def add(name: str, weight: float, value_N: Tensor) -> Tensor:
        num = (w_N * value_N).sum()
        metrics[name] = pooled(num, den)
        # an unused term must not even pass on a NaN
        return weight * num / shared_den if weight > 0 else torch.zeros_like(den)

    total = total + add("ce_loss", weights.ce, terms.cross_entropy_N)
    total = total + add("l1_loss", weights.l1, terms.l1_N)
    if confidence_N is not None:
        accept_N = terms.accept_rate_N
        bce_N = F.binary_cross_entropy_with_logits(confidence_N, accept_N, reduction="none")
        total = total + add("confidence_loss", weights.confidence, bce_N)
        with torch.no_grad():
            gap_N = torch.sigmoid(confidence_N) - accept_N
            metrics["confidence_abs_error"] = pooled((w_N * gap_N.abs()).sum(), den)
            metrics["confidence_bias"] = pooled((w_N * gap_N).sum(), den)
            survival_gap_N = (
                spread_rows(torch.sigmoid(confidence_N), supervised_BAG).cumprod(-1)
                - spread_rows(accept_N, supervised_BAG).cumprod(-1)
            )[rows]
            metrics["confidence_cumprod_bias"] = pooled((w_N * survival_gap_N).sum(), den)
    elif weights.confidence > 0:
        raise ValueError(f"the confidence loss has weight {weights.confidence} but the drafter has no confidence head")
    with torch.no_grad():
        accept_BAG = spread_rows(terms.accept_rate_N, supervised_BAG)
        hit_BAG = spread_rows(terms.greedy_hit_N.float(), supervised_BAG)
        for k in range(accept_BAG.shape[-1]):
            count = supervised_BAG[..., k].sum()
            metrics[f"accept_rate@{k}"] = pooled(accept_BAG[..., k].sum(), count)
            metrics[f"greedy_hit@{k}"] = pooled(hit_BAG[..., k].sum(), count)
        used_BA = supervised_BAG.any(-1)
        metrics["tau_probabilistic"] = pooled((1 + accept_BAG.cumprod(-1).sum(-1))[used_BA].sum(), used_BA.sum())
        metrics["tau_greedy"] = pooled((1 + hit_BAG.cumprod(-1).sum(-1))[used_BA].sum(), used_BA.sum())
    return LossReport(total=total * num_processes, metrics=metrics, weight=float(shared_den))


def spread_rows(values_N: Tensor, mask: Tensor) -> Tensor:
    """Row values back at their places, 0 elsewhere."""
    spread = torch.zeros(mask.shape, dtype=values_N.dtype, device=values_N.device)
    spread[mask] = values_N
    return spread


def pooled(num: Tensor, den: Tensor) -> Ratio:
    """A metric from its two sums."""
    return Ratio(float(num.detach()), float(den.detach()))
