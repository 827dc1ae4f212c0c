"""The checkpoint doctor: what can be seen wrong in a drafter's files, without a target.

Every fault here has cost somebody a drafter that loads, runs and accepts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dspec_lab.checkpoints.fields import ANCHOR_FLAGS, architecture_kind, lookup, read_architecture
from dspec_lab.checkpoints.layout import (
    EMBEDDING,
    HEAD,
    KEPT,
    OFFSETS,
    build_model,
    load_tensors,
    read_config,
    read_tensors,
)
from dspec_lab.models.family import model_spec

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (error) or suspect (warning), with the field or tensor it is about."""

    severity: Severity
    code: str
    where: str
    message: str


def scan_checkpoint(folder: Path | str, target_config: Mapping[str, Any] | None = None) -> list[Finding]:
    """All findings on a checkpoint folder, errors first. With the target's config its sizes are compared too.

    Raises only where there is nothing to look at: no folder, no config.json, or no readable safetensors file.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    findings = scan_config(config, target_config) + scan_tensors(config, tensors)
    return sorted(findings, key=lambda finding: finding.severity != "error")


def scan_config(config: Mapping[str, Any], target_config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Findings on the fields of a config.json."""
    findings: list[Finding] = []
    kind = _try(findings, "architecture", "architectures", lambda: architecture_kind(config))
    if kind is None:
        return findings
    spec = model_spec(config)
    if kind == "dspark":
        findings += _scan_block_fields(config, spec.vocab_size)
    if kind in ("dspark", "eagle3"):
        findings += _scan_layer_ids(config, kind)
    if kind != "dspark" and any(lookup(config, flag) is not None for flag in ANCHOR_FLAGS):
        findings.append(Finding("warning", "anchor_flag", ANCHOR_FLAGS[0], f"a {kind} drafter has no anchor layout"))
    if not findings or all(finding.severity == "warning" for finding in findings):
        _try(findings, "config", "config.json", lambda: read_architecture(config))
    if target_config is not None:
        findings += _scan_against_target(config, target_config)
    return findings


def _scan_block_fields(config: Mapping[str, Any], vocab_size: int) -> list[Finding]:
    findings: list[Finding] = []
    flags = {name: config.get(name) for name in ANCHOR_FLAGS}
    found = {name: _try(findings, "anchor_flag", name, lambda name=name: lookup(config, name)) for name in flags}
    values = {value for value in found.values() if value is not None}
    if not values:
        message = "not written; readers assume different defaults, and a wrong one shifts every slot by one"
        findings.append(Finding("warning", "anchor_flag_missing", ANCHOR_FLAGS[0], message))
    elif len(values) > 1:
        findings.append(Finding("error", "anchor_flag", ANCHOR_FLAGS[0], f"contradictory spellings: {found}"))
    elif values == {False}:
        message = "false, but drafters of this layout are trained anchor-first; if the probe agrees, set it to true"
        findings.append(Finding("warning", "anchor_flag_false", ANCHOR_FLAGS[0], message))
    size = config.get("block_size")
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 64:
        message = f"{size!r} is not a block size (1 to 64)"
        findings.append(Finding("error", "block_size", "block_size", message))
    mask = lookup(config, "mask_token_id")
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < vocab_size:
        message = f"{mask!r} is outside the vocabulary of {vocab_size}"
        findings.append(Finding("error", "mask_token_id", "mask_token_id", message))
    return findings


def _scan_layer_ids(config: Mapping[str, Any], kind: str) -> list[Finding]:
    where = "target_layer_ids"
    ids, layers = lookup(config, where), config.get("num_target_layers")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        return [Finding("error", "layer_ids", where, f"must be a list of integers, got {ids!r}")]
    if not isinstance(layers, int):
        return [Finding("error", "layer_ids", "num_target_layers", f"must be an integer, got {layers!r}")]
    findings = []
    lowest = -1 if kind == "dspark" else 0
    bad = [layer for layer in ids if not lowest <= layer < layers]
    if bad:
        message = f"{bad} are not layers of a target of {layers} (allowed: {lowest} to {layers - 2})"
        findings.append(Finding("error", "layer_ids_range", where, message))
    if layers - 1 in ids:
        message = f"{layers - 1} is the last layer, whose stored output is taken after the final norm"
        findings.append(Finding("error", "layer_ids_last", where, message))
    if any(later <= earlier for earlier, later in zip(ids, ids[1:], strict=False)):
        findings.append(Finding("error", "layer_ids_order", where, f"{ids} do not rise strictly"))
    shifted = lookup(config, "eagle_aux_hidden_state_layer_ids")
    if shifted is not None and list(shifted) != [layer + 1 for layer in ids]:
        message = f"{shifted} should be target_layer_ids {ids} plus one: engines would read other layers"
        findings.append(Finding("error", "layer_ids_shifted", "eagle_aux_hidden_state_layer_ids", message))
    return findings


def _scan_against_target(config: Mapping[str, Any], target_config: Mapping[str, Any]) -> list[Finding]:
    drafter, target = model_spec(config), model_spec(target_config)
    findings = []
    for where, has, needs in (
        ("model_type", drafter.family.name, target.family.name),
        ("num_target_layers", config.get("num_target_layers"), target.num_layers),
        ("target_hidden_size", config.get("target_hidden_size", drafter.hidden_size), target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
    ):
        if has != needs:
            findings.append(Finding("error", "other_target", where, f"is {has!r}, the target has {needs!r}"))
    return findings


def scan_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Finding]:
    """Findings on the tensors: names and shapes, values that were never trained or saved, the vocabulary map."""
    findings: list[Finding] = []
    try:
        arch = read_architecture(config)
    except ValueError:
        arch = None  # already reported on the config
    if arch is not None:
        with torch.device("meta"):
            model = build_model(arch, own_embedding=EMBEDDING in tensors, own_head=HEAD in tensors)
        if OFFSETS not in tensors or arch.draft_vocab_size is None:
            findings += _scan_names(model, tensors)
        else:
            # the map has its own findings; an identity in its place keeps them apart from names and shapes
            findings += _scan_names(model, {**tensors, OFFSETS: torch.zeros_like(tensors[OFFSETS])})
        findings += _scan_vocabulary_map(arch.draft_vocab_size, arch.spec.vocab_size, tensors)
    findings += _scan_values(tensors)
    return findings


def _scan_names(model: Any, tensors: Mapping[str, Tensor]) -> list[Finding]:
    try:
        load_tensors(model, tensors)
    except ValueError as error:
        return [Finding("error", "tensors", "model.safetensors", part) for part in str(error).split("; ")]
    return []


def _scan_vocabulary_map(draft_vocab: int | None, vocab: int, tensors: Mapping[str, Tensor]) -> list[Finding]:
    offsets = tensors.get(OFFSETS)
    if draft_vocab is None:
        if offsets is not None and offsets.any():
            message = "maps draft tokens although draft_vocab_size is the whole vocabulary"
            return [Finding("error", "vocabulary_map", OFFSETS, message)]
        return []
    if offsets is None:
        message = f"missing: draft_vocab_size {draft_vocab} of {vocab} needs a map to target ids"
        return [Finding("error", "vocabulary_map", OFFSETS, message)]
    if offsets.shape != (draft_vocab,):
        message = f"has {tuple(offsets.shape)} entries for draft_vocab_size {draft_vocab}"
        return [Finding("error", "vocabulary_map", OFFSETS, message)]
    findings = []
    ids = torch.arange(draft_vocab) + offsets.to(torch.int64)
    outside = int(((ids < 0) | (ids >= vocab)).sum())
    if outside:
        message = f"{outside} draft tokens map outside the target's vocabulary of {vocab}"
        findings.append(Finding("error", "vocabulary_map", OFFSETS, message))
    repeated = draft_vocab - ids.unique().shape[0]
    if repeated:
        message = f"{repeated} draft tokens share a target token with another"
        findings.append(Finding("error", "vocabulary_map", OFFSETS, message))
    kept = tensors.get(KEPT)
    if kept is not None and not findings:
        expected = torch.zeros(vocab, dtype=torch.bool)
        expected[ids] = True
        if kept.shape != expected.shape or not torch.equal(kept.bool(), expected):
            findings.append(Finding("error", "vocabulary_map", KEPT, "does not mark the tokens that d2t maps to"))
    return findings


def _scan_values(tensors: Mapping[str, Tensor]) -> list[Finding]:
    findings: list[Finding] = []
    seen: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in sorted(tensors.items()):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = float(tensor.min()), float(tensor.max())
        if not bool(torch.isfinite(tensor).all()):
            findings.append(Finding("error", "not_finite", name, "holds NaN or infinity"))
            continue
        is_bias = name.endswith(".bias")
        if low == high == 0 and not is_bias:
            findings.append(Finding("error", "zero", name, "is all zero: never trained or never saved"))
        elif low == high and "norm" in name and tensor.numel() > 1:
            findings.append(
                Finding("error", "constant_norm", name, f"is {low:g} everywhere: never trained or never saved")
            )
        elif tensor.dim() > 1:
            seen.setdefault((tuple(tensor.shape), low, high, float(tensor.float().sum())), []).append(name)
    for names in seen.values():
        for index, name in enumerate(names):
            for other in names[:index]:
                # a copied embedding and head are the same tensor where the target ties them
                if {name, other} != {EMBEDDING, HEAD} and torch.equal(tensors[name], tensors[other]):
                    findings.append(Finding("error", "duplicate", name, f"equals {other}"))
    return findings


def _try(findings: list[Finding], code: str, where: str, read: Callable[[], Any]) -> Any:
    """The value that `read` gives, or None and a finding where it raises ValueError."""
    try:
        return read()
    except ValueError as error:
        findings.append(Finding("error", code, where, str(error)))
        return None
