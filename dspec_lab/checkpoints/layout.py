"""Drafter checkpoints on disk: a folder with config.json and model.safetensors in the DeepSpec layout."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dspec_lab.checkpoints.fields import read_architecture, write_fields
from dspec_lab.checkpoints.identity import WEIGHTS
from dspec_lab.core.files import read_json, write_bytes, write_json
from dspec_lab.drafters.architecture import Architecture, BlockArchitecture, ChainArchitecture
from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.eagle3_model import Eagle3DraftModel
from dspec_lab.drafters.medusa_model import MedusaDraftModel
from dspec_lab.drafters.mtp_model import MtpDraftModel
from dspec_lab.drafters.vocabulary import DraftModel

CONFIG = "config.json"
EMBEDDING, HEAD, OFFSETS, KEPT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
_OPTIONAL = (EMBEDDING, HEAD)  # the target's own are used where a checkpoint has none


@runtime_checkable
class SharesVocabulary(Protocol):
    """The part of a target that drafters borrow."""

    def embedding(self) -> Tensor: ...

    def head(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A model read from a checkpoint, and the config it came with."""

    model: DraftModel
    config: Mapping[str, Any]


def build_model(arch: Architecture, *, own_embedding: bool = False, own_head: bool = False) -> DraftModel:
    """An untrained model of the given architecture."""
    if isinstance(arch, BlockArchitecture):
        return BlockDraftModel(arch, own_embedding=own_embedding, own_head=own_head)
    if isinstance(arch, ChainArchitecture):
        chain = Eagle3DraftModel if arch.kind == "eagle3" else MtpDraftModel
        return chain(arch, own_embedding=own_embedding, own_head=own_head)
    return MedusaDraftModel(arch, own_embedding=own_embedding, own_head=own_head)


def read_config(folder: Path | str) -> dict[str, Any]:
    """config.json of a checkpoint folder."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no {CONFIG}")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def read_tensors(folder: Path | str) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their public names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no {WEIGHTS}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


def load_drafter(
    folder: Path | str,
    target: SharesVocabulary | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LoadedDrafter:
    """The drafter of a checkpoint folder, ready for inference.

    Embedding and head are the target's where the checkpoint has none; without a target that is an error. `dtype` is
    that of the matrices (default: as saved); norms, biases and the confidence head are fp32. Missing, unexpected and
    misshapen tensors raise one ValueError that lists them.
    """
    config = read_config(folder)
    arch = read_architecture(config)
    state = read_tensors(folder)
    if target is None and not isinstance(arch, BlockArchitecture | ChainArchitecture) and HEAD not in state:
        raise ValueError(f"{folder} has no {HEAD}; pass the target to share its own")
    if target is None and isinstance(arch, BlockArchitecture | ChainArchitecture):
        absent = [name for name in _OPTIONAL if name not in state]
        if absent:
            raise ValueError(f"{folder} has no {' and no '.join(absent)}; pass the target to share its own")
    with torch.device("meta"):
        model = build_model(arch, own_embedding=EMBEDDING in state, own_head=HEAD in state)
    try:
        load_tensors(model, state)
    except ValueError as error:
        raise ValueError(f"{Path(folder) / WEIGHTS}: {error}") from error
    if dtype is not None:
        model.cast_matrices(dtype)
    model.to(device).eval().requires_grad_(False)
    if target is not None:
        model.share(embedding=target.embedding, head=target.head)
    return LoadedDrafter(model, config)


def load_tensors(model: DraftModel, state: Mapping[str, Tensor]) -> None:
    """Put checkpoint tensors into `model`; every parameter must be there, of the right shape, and nothing else.

    Matrices keep the dtype they have in `state`; other tensors become fp32 (or stay float64).
    """
    state = {_renamed(name): tensor for name, tensor in state.items()}
    wanted = tensor_shapes(model)
    missing = sorted(set(wanted) - set(state))
    unexpected = sorted(set(state) - set(wanted) - {KEPT})
    misshapen = sorted(name for name in set(wanted) & set(state) if tuple(state[name].shape) != wanted[name])
    problems = []
    for name in missing:
        near = difflib.get_close_matches(name, unexpected, n=1, cutoff=0.6)
        problems.append(f"missing {name}" + (f" (is it {near[0]}?)" if near else ""))
    for name in unexpected:
        near = difflib.get_close_matches(name, missing or wanted, n=1, cutoff=0.6)
        problems.append(f"unexpected {name}" + (f" (near {near[0]})" if near else ""))
    for name in misshapen:
        problems.append(f"{name} has shape {tuple(state[name].shape)}, expected {wanted[name]}")
    if problems:
        raise ValueError("; ".join(problems))
    fused = fuse_projections(state)
    loaded: dict[str, Tensor] = {}
    for name in _held_tensors(model):
        tensor = fused[name]
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected floating point")
        keep = tensor.dtype == torch.float64 or (tensor.dim() > 1 and not name.startswith("confidence_head."))
        loaded[name] = tensor.contiguous() if keep else tensor.float()
    if model.d2t is not None:
        loaded[OFFSETS] = state[OFFSETS].to(torch.int64)
    # the tensors themselves take the place of the model's, which may be on the meta device
    model.load_state_dict(loaded, assign=True)
    if model.d2t is not None:
        model.keep_tokens(torch.arange(model.draft_vocab_size) + loaded[OFFSETS])


def write_checkpoint(
    folder: Path | str,
    model: DraftModel,
    target_config: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    copy_shared: bool = False,
    extra_fields: Mapping[str, Any] | None = None,
) -> Path:
    """The folder, now holding `model`: config.json with every field written out, and model.safetensors.

    `target_config` is the target's config (or an earlier checkpoint's). `dtype` is that of the matrices (default: as
    they are). `copy_shared` adds full copies of a borrowed embedding and head, as DeepSpec's own files have.
    """
    folder = Path(folder)
    tensors = checkpoint_tensors(model, dtype=dtype, copy_shared=copy_shared)
    matrix_dtype = next(t.dtype for name, t in tensors.items() if t.dim() > 1 and name != KEPT)
    fields = write_fields(model.arch, target_config, str(matrix_dtype).removeprefix("torch."))
    for name, value in (extra_fields or {}).items():
        if name in fields and fields[name] != value:
            raise ValueError(f"extra field {name} = {value!r} contradicts the drafter's own {fields[name]!r}")
    from safetensors.torch import save

    write_bytes(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_json(folder / CONFIG, {**fields, **(extra_fields or {})})
    return folder


def checkpoint_tensors(
    model: DraftModel, *, dtype: torch.dtype | None = None, copy_shared: bool = False
) -> dict[str, Tensor]:
    """Public names and tensors of `model`, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in split_projections(_held_tensors(model), model).items():
        tensor = tensor.detach()
        matrix = tensor.dim() > 1 and not name.startswith("confidence_head.")
        tensors[name] = tensor.to(device="cpu", dtype=dtype if matrix and dtype is not None else tensor.dtype).clone()
    if copy_shared:
        shared = model.shared_weights()
        matrices = {name: weight.detach().to("cpu") for name, weight in shared.items() if name not in tensors}
        tensors |= {name: (w if dtype is None else w.to(dtype)).clone() for name, w in matrices.items()}
    if model.d2t is not None and model.draft_index_V is not None:
        tensors[OFFSETS] = model.d2t.to("cpu").clone()
        tensors[KEPT] = (model.draft_index_V >= 0).to("cpu")
    return tensors


def tensor_shapes(model: DraftModel) -> dict[str, tuple[int, ...]]:
    """Public names and shapes of the tensors that a checkpoint of `model` must have."""
    shapes = {name: tuple(tensor.shape) for name, tensor in split_projections(_held_tensors(model), model).items()}
    if model.d2t is not None:
        shapes[OFFSETS] = tuple(model.d2t.shape)
    return shapes


def split_projections(state: Mapping[str, Tensor], model: DraftModel) -> dict[str, Tensor]:
    """Model names to public names: fused query/key/value and gate/up projections become views of their parts."""
    parts: dict[str, Tensor] = {}
    for name, tensor in state.items():
        stem, kind = name.rpartition(".")[::2]
        if stem.endswith("qkv_proj"):
            attention = model.get_submodule(stem.rpartition(".")[0])
            widths = [attention.query_width] + [attention.kv_width] * (1 if attention.shape.keys_as_values else 2)
            for letter, part in zip("qkv", tensor.split(widths), strict=False):
                parts[f"{stem[: -len('qkv_proj')]}{letter}_proj.{kind}"] = part
        elif stem.endswith("gate_up_proj"):
            for half, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                parts[f"{stem[: -len('gate_up_proj')]}{half}_proj.{kind}"] = part
        else:
            parts[name] = tensor
    return parts


def fuse_projections(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Public names to model names, the inverse of `split_projections`. Also fits a target's decoder layers."""
    fused = dict(state)
    for name in state:
        for first, others, joint in (
            ("self_attn.q_proj.", ("self_attn.k_proj.", "self_attn.v_proj."), "self_attn.qkv_proj."),
            ("mlp.gate_proj.", ("mlp.up_proj.",), "mlp.gate_up_proj."),
        ):
            if first not in name:
                continue
            names = [name] + [name.replace(first, other) for other in others if name.replace(first, other) in state]
            fused[name.replace(first, joint)] = torch.cat([fused.pop(part) for part in names])
    return fused


def _held_tensors(model: DraftModel) -> dict[str, Tensor]:
    """Parameters and layer scalars by model name; the vocabulary map is handled on its own."""
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name != OFFSETS}


def _renamed(name: str) -> str:
    """Public names of other writers that mean one of ours."""
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
