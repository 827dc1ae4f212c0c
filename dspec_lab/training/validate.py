"""Measures on held-out prompts: acceptance by position and expected accepted length, by domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dspec_lab.drafters.vocabulary import DraftModel
from dspec_lab.training.anchors import sample_anchors
from dspec_lab.training.data import Batch, TrainSequence
from dspec_lab.training.losses import Ratio
from dspec_lab.training.step import MicroBatch, add_metrics, micro_loss
from dspec_lab.training.train_config import TrainConfig

GREEDY = "greedy"  # suffix of the measures over responses sampled at temperature 0


@torch.no_grad()
def validate(
    model: DraftModel, config: TrainConfig, sequences: Sequence[TrainSequence], load: Callable[[int], Batch]
) -> dict[str, dict[str, Any]]:
    """Measures by domain, `all` first. `load(i)` gives sequence i alone as a batch.

    `tau` is 1 plus the mean survival summed over positions, 1 - TV at each (the law of sampling at temperature 1).
    `tau_greedy` counts agreement of the largest tokens, over greedy responses only: an estimate of the accepted
    length at temperature 0, for blocks that start anywhere. The whole draft vocabulary is used, and the same anchors
    each time.
    """
    model.eval()
    sums: dict[str, dict[str, Ratio]] = {"all": {}}
    for index, sequence in enumerate(sequences):
        batch = load(index)
        anchors = None
        if config.is_block:
            generator = torch.Generator().manual_seed(config.seed + index)
            anchors = sample_anchors(batch.loss_mask_BT.cpu(), config.validation_anchors, generator)
            device = batch.input_ids_BT.device
            anchors = type(anchors)(anchors.positions_BA.to(device), anchors.keep_BA.to(device))
        elif sequence.num_response < 3 and config.drafter == "medusa":
            continue
        report = micro_loss(model, MicroBatch(batch, anchors, None, None), config)
        metrics = dict(report.metrics)
        for name in [name for name in metrics if name.startswith(("tau_greedy", "greedy_hit@", "accuracy@"))]:
            ratio = metrics.pop(name)
            if sequence.temperature == 0:
                metrics[name] = ratio
        for name in ("all", sequence.domain):
            sums[name] = add_metrics(sums.get(name, {}), metrics)
    model.train()
    return {domain: _measures(pooled, config.proposed) for domain, pooled in sums.items() if pooled}


def _measures(pooled: dict[str, Ratio], proposed: int) -> dict[str, Any]:
    def value(name: str) -> float | None:
        ratio = pooled.get(name)
        return None if ratio is None or not ratio.den else round(ratio.value, 5)

    hits = "greedy_hit" if "accept_rate@0" in pooled and "greedy_hit@0" in pooled else "accuracy"
    row: dict[str, Any] = {
        "tau": value("tau_probabilistic"),
        "tau_greedy": value("tau_greedy"),
        "accept_rate": [value(f"accept_rate@{k}") for k in range(proposed)],
        "greedy_hit": [value(f"{hits}@{k}") for k in range(proposed)],
    }
    for name in ("ce_loss", "l1_loss", "confidence_loss", "confidence_bias"):
        if name in pooled:
            row[name] = value(name)
    return row
