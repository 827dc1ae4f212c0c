"""A drafter's first weights from the target's own: its last layers, norms, and a projection that passes one tap on.

A block drafter's first layer then sees, as context keys and values, exactly what the target's layer sees: `fc` is the
identity on the tap before that layer, and the context norm is that layer's input norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dspec_lab.checkpoints.layout import load_drafter
from dspec_lab.drafters.architecture import Architecture
from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.eagle3_model import Eagle3DraftModel
from dspec_lab.drafters.heads import SequentialHead
from dspec_lab.drafters.layers import DraftLayer
from dspec_lab.drafters.mtp_model import MtpDraftModel
from dspec_lab.drafters.vocabulary import DraftModel
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.family import FULL
from dspec_lab.models.protocol import Taps
from dspec_lab.models.weights import LayerWeights

PROBE_TOKENS = 64  # of the vocabulary, to learn the size of the target's stream
TRAINING_FIELDS = ("num_anchors", "step_loss_decay")  # in an architecture for the record; they change no tensor
EMBEDDING_SHARE = 1 / 3  # of the stream's size, at MTP's start


@torch.no_grad()
def warm_start(model: DraftModel, target: LeanDecoder) -> None:
    """Put the target's last layers into `model`. Medusa heads need none: they start as the identity."""
    if isinstance(model, BlockDraftModel):
        source = copied_layers(model.layers, target)
        _pass_tap(model.fc.weight, model.arch.target_layer_ids, source[0] - 1)
        _copy(model.hidden_norm.weight, target.weights.layers[source[0]].norm_in)
        _copy(model.norm.weight, target.weights.norm)
        if model.markov_head is not None:
            _embedding_directions(model.markov_head, target)
    elif isinstance(model, Eagle3DraftModel):
        source = copied_layers(model.layers, target)
        _pass_tap(model.fc.weight, model.arch.target_layer_ids, source[0] - 1)
        for layer, index in zip(model.layers, source, strict=True):
            _copy(layer.hidden_norm.weight, target.weights.layers[index].norm_in)
            nn.init.ones_(layer.input_layernorm.weight)
        _copy(model.norm.weight, target.weights.norm)
    elif isinstance(model, MtpDraftModel):
        copied_layers(model.layers, target)
        width = model.spec.hidden_size
        # the final norm is undone: its weight (which may be negative) and the stream's size, on which the copied layer
        # counts; the scale is in the norms, so that the projection of large inputs learns fast
        size = stream_rms(target)
        weight_D = target.weights.norm.float()
        weight_D = torch.where(weight_D.abs() < 1e-3, torch.full_like(weight_D, 1e-3).copysign(weight_D), weight_D)
        _copy(model.hnorm.weight, size * weight_D.square().mean().sqrt() / weight_D)
        model.enorm.weight.fill_(EMBEDDING_SHARE * size)
        model.eh_proj.weight.mul_(0.1)
        model.eh_proj.weight[:, :width] += torch.eye(width, device=model.eh_proj.weight.device)
        _copy(model.norm.weight, target.weights.norm)


@torch.inference_mode()
def stream_rms(target: LeanDecoder) -> float:
    """Median root mean square of the residual stream before the target's last layer, over tokens of any kind."""
    if target.num_layers < 2:
        return 1.0
    count = min(PROBE_TOKENS, target.vocab_size)
    ids = torch.linspace(0, target.vocab_size - 1, count).long().tolist()
    session = target.session(capacity=count, taps=Taps(layers=(target.num_layers - 2,)))
    stream_ND = session.extend(ids).features.tapped_NF.float()
    return float(stream_ND.square().mean(-1).sqrt().median())


@torch.no_grad()
def start_from(model: DraftModel, folder: Path | str, target: LeanDecoder) -> None:
    """Put a checkpoint's weights and draft vocabulary into `model`. Another architecture is a `ValueError`."""
    loaded = load_drafter(folder, target, dtype=torch.float32, device=target.device).model
    there, here = _comparable(loaded.arch), _comparable(model.arch)
    if there != here:
        named = [name for name in here if there.get(name) != here[name]]
        raise ValueError(
            f"{folder} cannot be gone on from: it differs in {', '.join(named) or 'kind'} "
            f"({', '.join(repr(there.get(name)) for name in named)} there)"
        )
    own = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        if name in own:
            _copy(own[name], parameter.to(own[name].device))
    if model.d2t is not None:
        model.keep_tokens(loaded.to_target_ids(torch.arange(loaded.draft_vocab_size, device=target.device)).cpu())
        model.to(target.device)


def _comparable(arch: Architecture) -> dict[str, object]:
    # a drafter borrows embedding and head, so whether the target ties them is not written into its checkpoint
    spec = replace(arch.spec, tie_word_embeddings=False)
    shape = {field.name: getattr(arch, field.name) for field in fields(arch) if field.name not in TRAINING_FIELDS}
    return shape | {"spec": spec, "kind": type(arch)}


def copied_layers(layers: nn.ModuleList, target: LeanDecoder) -> list[int]:
    """Ids of the target's last full-attention layers, now in `layers`."""
    count = len(layers)
    # draft layers attend fully, so only such layers of the target have their shape
    source = [index for index, kind in enumerate(target.spec.layer_types) if kind == FULL][-count:]
    if len(source) < count:
        raise ValueError(f"{count} draft layers cannot be copied: the target has {len(source)} full-attention layers")
    for layer, index in zip(layers, source, strict=True):
        _copy_layer(layer, target.weights.layers[index], target.spec.hidden_size)
    return source


def _copy_layer(layer: DraftLayer, weights: LayerWeights, width: int) -> None:
    attention = layer.self_attn
    qkv = attention.qkv_proj.weight
    rows = qkv.shape[0]
    if weights.qkv.shape[0] < rows:
        raise ValueError(f"the target's last layers project to {weights.qkv.shape[0]} rows, the drafter's to {rows}")
    # EAGLE-3 projects [embedding; hidden]: the embedding's half starts at 0, the hidden half as the target's
    qkv.zero_()
    _copy(qkv[:, -width:], weights.qkv[:rows])
    if attention.qkv_proj.bias is not None:
        _copy(attention.qkv_proj.bias, weights.qkv_bias[:rows])
        _copy(attention.o_proj.bias, weights.out_bias)
    _copy(attention.o_proj.weight, weights.out)
    _copy(layer.mlp.gate_up_proj.weight, weights.gate_up)
    _copy(layer.mlp.down_proj.weight, weights.down)
    for norm, source in ((attention.q_norm, weights.q_norm), (attention.k_norm, weights.k_norm)):
        if norm is not None:
            _copy(norm.weight, source)
    _copy(layer.input_layernorm.weight, weights.norm_in)
    if layer.sandwich:
        _copy(layer.post_attention_layernorm.weight, weights.norm_after_attention)
        _copy(layer.pre_feedforward_layernorm.weight, weights.norm_mid)
        _copy(layer.post_feedforward_layernorm.weight, weights.norm_after_mlp)
    else:
        _copy(layer.post_attention_layernorm.weight, weights.norm_mid)
    if layer.layer_scalar is not None:
        layer.layer_scalar.fill_(weights.scalar)


def _pass_tap(fc_weight: Tensor, taps: Sequence[int], wanted: int) -> None:
    """fc becomes the identity on tap `wanted`, or on the nearest one below it, and 0 on the others."""
    below = [place for place, layer in enumerate(taps) if layer <= wanted]
    place = below[-1] if below else 0
    width = fc_weight.shape[0]
    fc_weight.zero_()
    fc_weight[:, place * width : (place + 1) * width] = torch.eye(width, device=fc_weight.device)


def _embedding_directions(head: SequentialHead, target: LeanDecoder) -> None:
    """W1 becomes the embedding's strongest directions, so that similar tokens begin with similar features."""
    table_VD = target.embedding().float()
    centred_VD = table_VD - table_VD.mean(0)
    _, directions_DD = torch.linalg.eigh(centred_VD.T @ centred_VD)
    features_VR = centred_VD @ directions_DD[:, -head.rank :]
    _copy(head.markov_w1.weight[:, -features_VR.shape[1] :], features_VR / features_VR.std(0, keepdim=True))


def _copy(place: Tensor, source: Tensor | None) -> None:
    if source is None or place.shape != source.shape:
        raise ValueError(f"the target has no weight of shape {tuple(place.shape)} to start from: {source is not None}")
    place.copy_(source)
