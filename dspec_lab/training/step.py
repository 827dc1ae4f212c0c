"""The loss of a micro-batch, and one optimiser step over several of them, alike for one process and for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.chain_model import ChainDraftModel
from dspec_lab.drafters.layers import bf16_products
from dspec_lab.drafters.medusa_model import MedusaDraftModel
from dspec_lab.drafters.vocabulary import DraftModel
from dspec_lab.training.anchors import Anchors
from dspec_lab.training.chain_losses import medusa_loss, ttt_loss
from dspec_lab.training.data import Batch
from dspec_lab.training.losses import LossReport, LossWeights, Ratio, dspark_loss
from dspec_lab.training.train_config import TrainConfig
from dspec_lab.training.vocabulary_sample import VocabularySample, sample_vocabulary


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A batch with the anchors drawn in it (None for drafters without blocks) and the step's part of the vocabulary."""

    batch: Batch
    anchors: Anchors | None
    vocabulary: VocabularySample | None
    num_slots: int | None  # tokens proposed; None: all


def loss_weights(config: TrainConfig) -> LossWeights:
    """The loss of a block drafter, as configured."""
    return LossWeights(
        ce=config.loss_ce,
        l1=config.loss_l1,
        confidence=config.loss_confidence if config.confidence_head else 0.0,
        slot_decay_gamma=config.slot_decay_gamma,
        confidence_through_backbone=config.confidence_through_backbone,
    )


def micro_loss(model: DraftModel, micro: MicroBatch, config: TrainConfig) -> LossReport:
    """The drafter's training loss on one micro-batch, its products in the precision asked for."""
    with bf16_products(config.precision == "bf16"):
        return _loss(model, micro, config)


def _loss(model: DraftModel, micro: MicroBatch, config: TrainConfig) -> LossReport:
    batch, vocabulary = micro.batch, micro.vocabulary
    if isinstance(model, BlockDraftModel):
        if micro.anchors is None or batch.tapped_BTF is None:
            missing = "anchors" if micro.anchors is None else "tapped features"
            raise ValueError(f"a block drafter trains on anchors and tapped features, the batch has no {missing}")
        return dspark_loss(
            model,
            batch.tapped_BTF,
            batch.input_ids_BT,
            batch.loss_mask_BT,
            batch.last_BTD,
            micro.anchors,
            loss_weights(config),
            teacher_lse_BT=batch.lse_BT,
            vocabulary=vocabulary,
            num_slots=None if micro.num_slots is None else micro.num_slots + model.arch.first_slot,
        )
    if isinstance(model, ChainDraftModel):
        features_BTF = batch.tapped_BTF if model.arch.target_layer_ids else batch.last_BTD
        if features_BTF is None:
            raise ValueError(f"the drafter reads layers {model.arch.target_layer_ids}, the batch has none of them")
        return ttt_loss(
            model,
            features_BTF,
            batch.input_ids_BT,
            batch.loss_mask_BT,
            batch.last_BTD,
            batch.lengths_B,
            num_steps=micro.num_slots,
            teacher_lse_BT=batch.lse_BT,
            vocabulary=vocabulary,
        )
    if not isinstance(model, MedusaDraftModel):
        raise TypeError(f"{type(model).__name__} is no drafter's model")
    return medusa_loss(
        model,
        batch.loss_mask_BT,
        batch.last_BTD,
        head_decay=config.step_loss_decay,
        teacher_lse_BT=batch.lse_BT,
        vocabulary=vocabulary,
    )


def step_vocabulary(
    model: DraftModel,
    batches: Sequence[Batch],
    frequent_ids_N: Tensor,
    num_drawn: int,
    generator: torch.Generator,
) -> VocabularySample:
    """The part of the draft vocabulary for one step: frequent tokens, those of the batches and of their laws' tops."""
    ids = [frequent_ids_N]
    for batch in batches:
        ids += [batch.input_ids_BT[batch.loss_mask_BT], batch.top_BTX[batch.loss_mask_BT].flatten()]
    ids_N = torch.cat(ids)
    index_N = model.to_draft_ids(ids_N[ids_N >= 0].unique())
    return sample_vocabulary(model.draft_vocab_size, index_N, num_drawn, generator)


class Processes:
    """What the optimiser step asks of other processes. This one is alone."""

    count = 1
    rank = 0

    def sum_(self, values: Tensor) -> Tensor:
        """`values`, now summed over all processes."""
        return values

    def wait(self) -> None:
        """Return once all processes are here."""


class AcceleratedProcesses(Processes):
    """Processes started by `accelerate launch` or torchrun."""

    def __init__(self, accelerator: object) -> None:
        self._accelerator = accelerator
        self.count = int(accelerator.num_processes)  # type: ignore[attr-defined]
        self.rank = int(accelerator.process_index)  # type: ignore[attr-defined]

    def sum_(self, values: Tensor) -> Tensor:
        return self._accelerator.reduce(values, reduction="sum")  # type: ignore[attr-defined]

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()  # type: ignore[attr-defined]


def optimiser_step(
    model: DraftModel,
    parameters: Sequence[Tensor],
    optimiser: torch.optim.Optimizer,
    micros: Sequence[MicroBatch],
    config: TrainConfig,
    rate: float,
    processes: Processes,
) -> tuple[dict[str, Ratio], float]:
    """(metrics, gradient norm) of one step at learning rate `rate`.

    The loss is the mean over all micro-batches and processes, each weighing as much as what it supervises: gradients
    of sums are added up and divided once, so how the batch is cut changes nothing but rounding.
    """
    optimiser.zero_grad(set_to_none=True)
    weight, pooled = 0.0, {}
    for micro in micros:
        report = micro_loss(model, micro, config)
        if not torch.isfinite(report.total):
            raise ArithmeticError(f"the training loss is {float(report.total.detach())}; try a lower learning_rate")
        (report.total * report.weight).backward()
        weight += report.weight
        pooled = add_metrics(pooled, report.metrics)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if processes.count > 1:
        grads = [parameter.grad for parameter in parameters]
        flat = torch.cat([grad.flatten() for grad in grads] + [grads[0].new_tensor([weight])])
        flat = processes.sum_(flat)
        weight, at = float(flat[-1]), 0
        for grad in grads:
            grad.copy_(flat[at : at + grad.numel()].view_as(grad))
            at += grad.numel()
    for parameter in parameters:
        parameter.grad /= weight
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm)
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.step()
    return pooled, float(norm)


def add_metrics(sums: dict[str, Ratio], more: dict[str, Ratio]) -> dict[str, Ratio]:
    """Metrics pooled over batches: numerators and denominators are added."""
    merged = dict(sums)
    for name, ratio in more.items():
        held = merged.get(name, Ratio(0.0, 0.0))
        merged[name] = Ratio(held.num + ratio.num, held.den + ratio.den)
    return merged
