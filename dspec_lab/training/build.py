"""From settings to an untrained or warm-started drafter for a target."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from dspec_lab.checkpoints.layout import build_model
from dspec_lab.drafters.architecture import Architecture, BlockArchitecture, ChainArchitecture, MedusaArchitecture
from dspec_lab.drafters.vocabulary import DraftModel
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.family import FULL
from dspec_lab.training.train_config import TrainConfig


def spread_layers(num_target_layers: int, count: int = 5) -> tuple[int, ...]:
    """`count` layer ids from the second to the third last layer, evenly: 1, 9, 17, 25, 33 for 36 layers."""
    first, last = 1, num_target_layers - 3
    if last - first + 1 < count:
        return tuple(range(max(num_target_layers - 1, 1)))[-count:] if num_target_layers > 1 else (-1,)
    return tuple(round(first + (last - first) * i / (count - 1)) for i in range(count))


def tapped_layers(config: TrainConfig, target: LeanDecoder) -> tuple[int, ...]:
    """The target layers that the configured drafter reads; none for those that read the last hidden state only."""
    if config.drafter in ("mtp", "medusa"):
        return ()
    return spread_layers(target.num_layers) if config.target_layer_ids is None else config.target_layer_ids


def architecture(config: TrainConfig, target: LeanDecoder, counts: np.ndarray) -> Architecture:
    """The drafter's architecture for this target; `counts` say how often the data use each token, prompts included."""
    layers = config.num_layers
    shape = replace(target.spec, layer_types=(FULL,) * layers, attention={FULL: target.spec.attention[FULL]})
    vocab = config.draft_vocab_size
    if vocab is not None and vocab >= target.vocab_size:
        vocab = None
    if config.drafter == "medusa":
        return MedusaArchitecture(
            spec=target.spec,
            num_target_layers=target.num_layers,
            medusa_num_heads=config.medusa_num_heads,
            draft_vocab_size=vocab,
        )
    ids = tapped_layers(config, target)
    if config.drafter in ("eagle3", "mtp"):
        return ChainArchitecture(
            kind="eagle3" if config.drafter == "eagle3" else "mtp",
            spec=shape,
            target_hidden_size=target.hidden_size,
            num_target_layers=target.num_layers,
            target_layer_ids=ids,
            ttt_length=config.ttt_length,
            step_loss_decay=config.step_loss_decay,
            draft_vocab_size=vocab,
        )
    mask_id = config.mask_token_id
    if mask_id is None:
        unused = np.flatnonzero(counts == 0)
        if not len(unused):
            raise ValueError("every token id occurs in the responses; give mask_token_id")
        mask_id = int(unused[0])
    return BlockArchitecture(
        spec=shape,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        target_layer_ids=ids,
        block_size=config.block_size,
        mask_token_id=mask_id,
        num_anchors=config.anchors_per_sequence,
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head_type if config.markov_rank else None,
        confidence_head=config.confidence_head,
        confidence_with_markov=config.confidence_with_markov and config.confidence_head and config.markov_rank > 0,
        draft_vocab_size=vocab,
        context_window=config.context_window,
    )


def frequent_tokens(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent token ids, most frequent first; equal counts go to the lower id."""
    return np.lexsort((np.arange(len(counts)), -counts))[:size]


def new_drafter(arch: Architecture, target: LeanDecoder, counts: np.ndarray, seed: int) -> DraftModel:
    """A drafter with random matrices (normal, 0.02), fp32, on the target's device, its kept tokens set.

    `counts` are token counts of the responses.
    """
    generator = torch.Generator().manual_seed(seed)
    model = build_model(arch)
    for name, parameter in model.named_parameters():
        if name.startswith("medusa_heads."):
            continue  # these start as the identity
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    head = getattr(model, "markov_head", None)
    if head is not None:
        nn.init.zeros_(head.markov_w2.weight)
    if arch.draft_vocab_size is not None:
        # rising ids, as other programs expect them
        model.keep_tokens(torch.from_numpy(np.sort(frequent_tokens(counts, arch.draft_vocab_size))))
    model.to(target.device)
    model.share(embedding=target.embedding, head=target.head)
    return model


def trainable(model: DraftModel, part: str = "all") -> dict[str, Tensor]:
    """The parameters that training moves, by name: all but an embedding or head of its own, or one part of them."""
    frozen = ("embed_tokens.", "lm_head.")
    moved = {name: parameter for name, parameter in model.named_parameters() if not name.startswith(frozen)}
    if part == "all":
        return moved
    return {name: parameter for name, parameter in moved.items() if name.startswith(f"{part}_head.")}
