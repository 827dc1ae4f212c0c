"""The state of a run, in one file written whole: weights, optimiser, random numbers, and where in the data it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspec_lab.core.files import write_bytes
from dspec_lab.training.train_config import DRAFTERS, default_config

FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(slots=True)
class RunState:
    """What a resumed run must know besides tensors."""

    step: int = 0  # optimiser steps done; the data's order is a function of it
    seconds: float = 0.0  # spent training, over all sessions
    tokens: int = 0  # response tokens seen
    anchors: int = 0  # blocks (or positions) trained on
    history: list[dict[str, Any]] = field(default_factory=list)  # one entry per validation


def save_state(
    path: Path,
    state: RunState,
    parameters: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    generator: torch.Generator,
    identity: Mapping[str, Any],
) -> None:
    """Write the run's state; `identity` (settings, data, target) must be the same when it is read again."""
    from safetensors.torch import save

    tensors = {f"weight.{name}": tensor.detach().cpu().contiguous() for name, tensor in parameters.items()}
    for name, parameter in parameters.items():
        for part in _MOMENTS:
            held = optimiser.state.get(parameter, {})
            if part in held:
                tensors[f"{part}.{name}"] = held[part].detach().cpu().contiguous()
    tensors["generator"] = generator.get_state()
    about = {
        "format": FORMAT,
        "step": state.step,
        "seconds": state.seconds,
        "tokens": state.tokens,
        "anchors": state.anchors,
        "history": state.history,
        "identity": dict(identity),
    }
    write_bytes(path, save(tensors, metadata={"state": json.dumps(about)}))


def load_state(
    path: Path,
    parameters: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    generator: torch.Generator,
    identity: Mapping[str, Any],
) -> RunState:
    """Put the saved tensors in place and return the rest. A run of other settings or data raises `ValueError`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not the saved state of a training run: {error}") from error
    if about["format"] != FORMAT:
        raise ValueError(f"{path} has format {about['format']}, this program reads {FORMAT}")
    for name, value in identity.items():
        old = about["identity"].get(name)
        if name == "config" and isinstance(old, dict):
            # settings that the program did not have then are at their usual values
            old = {**default_config(old["drafter"]).to_dict(), **old} if old.get("drafter") in DRAFTERS else old
        if old != value:
            raise ValueError(
                f"{path} belongs to a run with other {name}: {_difference(old, value)}; use another output folder, or "
                "remove that file to start anew"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"weight.{name}"])
            held = {part: tensors[f"{part}.{name}"] for part in _MOMENTS if f"{part}.{name}" in tensors}
            if held:
                # the step count stays on the CPU unless the optimiser is fused on a GPU
                optimiser.state[parameter] = {part: tensor.to(parameter.device) for part, tensor in held.items()}
    generator.set_state(tensors["generator"])
    return RunState(about["step"], about["seconds"], about["tokens"], about["anchors"], about["history"])


def _difference(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        names = [name for name in new if old.get(name) != new[name]]
        return ", ".join(f"{name} was {old.get(name)!r}, is {new[name]!r}" for name in names)
    return f"was {old!r}, is {new!r}"
