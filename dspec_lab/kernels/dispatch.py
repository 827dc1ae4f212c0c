"""The one door to every op: torch reference or Triton kernel. No other module imports `dspec_kernels`.

`impl="auto"` takes Triton for CUDA tensors where it is installed and the dtype has a kernel, else torch.
`impl="triton"` never falls back: it raises where Triton is missing, and on CPU tensors unless its interpreter is on.
With `check` a bad row, id or number raises; that waits for the device. Without it the caller reads `fault_B`.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from dspec_lab.kernels import accept_residual as torch_accept
from dspec_lab.kernels import admission as torch_admission
from dspec_lab.kernels import compact_kv as torch_compact
from dspec_lab.kernels import markov_step as torch_markov
from dspec_lab.kernels import ragged_attention as torch_attention
from dspec_lab.kernels import tv_loss as torch_tv
from dspec_lab.kernels.accept_residual import AcceptResult
from dspec_lab.kernels.compact_kv import check_kept
from dspec_lab.kernels.faults import Fault, raise_faults
from dspec_lab.kernels.markov_step import StepResult
from dspec_lab.kernels.ragged_attention import AttentionPlan

Impl = Literal["auto", "torch", "triton"]


@cache
def triton_missing() -> str | None:
    """Why no Triton kernel can be loaded here, or None."""
    missing = [name for name in ("triton", "dspec_kernels") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def resolve(impl: str, *tensors: Tensor | None) -> Literal["torch", "triton"]:
    """The implementation that `impl` means for these tensors."""
    if impl == "torch":
        return "torch"
    if impl == "triton":
        if triton_missing():
            raise RuntimeError(f"impl='triton' is not possible: {triton_missing()}")
        return "triton"
    if impl != "auto":
        raise ValueError(f"impl must be 'auto', 'torch' or 'triton', got {impl!r}")
    given = [tensor for tensor in tensors if tensor is not None]
    fits = all(tensor.is_cuda and tensor.dtype != torch.float64 for tensor in given)
    return "triton" if fits and triton_missing() is None else "torch"


def _kernel(name: str) -> ModuleType:
    # at the first call, not at import: Triton is optional
    return importlib.import_module(f"dspec_kernels.{name}")


def accept_residual_rows(
    target_NV: Float[Tensor, "rows V"],
    draft_NV: Float[Tensor, "drafts V"] | None,
    draft_ids_BG: Int[Tensor, "B G"],
    draft_lens_B: Int[Tensor, " B"],
    accept_u_BG: Float[Tensor, "B G"],
    replacement_u_B: Float[Tensor, " B"],
    bonus_u_B: Float[Tensor, " B"],
    target_starts_B: Int[Tensor, " B"],
    draft_starts_B: Int[Tensor, " B"],
    *,
    one_hot_B: Bool[Tensor, " B"] | None = None,
    temperature_B: Float[Tensor, " B"] | None = None,
    impl: Impl = "auto",
    check: bool = True,
) -> AcceptResult:
    """Verify a ragged batch: see `accept_residual.py`. Probabilities, or logits where `temperature_B` is given."""
    inputs = (target_NV, draft_NV, draft_ids_BG, draft_lens_B, accept_u_BG, replacement_u_B, bonus_u_B)
    inputs += (target_starts_B, draft_starts_B, one_hot_B)
    if resolve(impl, target_NV, draft_NV) == "torch":
        result = torch_accept.accept_residual_rows(*inputs, temperature_B)
    elif temperature_B is None:
        result = AcceptResult(*_kernel("accept_residual").accept_residual(*inputs))
    else:
        result = AcceptResult(*_kernel("accept_residual_logits").accept_residual_logits(*inputs, temperature_B))
    if check:
        values = {Fault.TOKEN_ID: draft_ids_BG, Fault.LENGTH: draft_lens_B, Fault.UNIFORM: accept_u_BG}
        if temperature_B is not None:
            values[Fault.TEMPERATURE] = temperature_B
        raise_faults(result.fault_B, values)
    return result


def accept_residual(
    target_probs_BJV: Float[Tensor, "B J V"],
    draft_probs_BGV: Float[Tensor, "B G V"] | None,
    draft_ids_BG: Int[Tensor, "B G"],
    draft_lens_B: Int[Tensor, " B"],
    accept_u_BG: Float[Tensor, "B G"],
    replacement_u_B: Float[Tensor, " B"],
    bonus_u_B: Float[Tensor, " B"],
    *,
    one_hot_B: Bool[Tensor, " B"] | None = None,
    temperature_B: Float[Tensor, " B"] | None = None,
    impl: Impl = "auto",
    check: bool = True,
) -> AcceptResult:
    """`accept_residual_rows` for a padded batch: request b uses target rows 0..len and draft rows 0..len - 1."""
    (B, G), V = draft_ids_BG.shape, target_probs_BJV.shape[-1]
    if target_probs_BJV.shape[1] != G + 1:
        raise ValueError(f"{G} draft positions need {G + 1} target rows, got {target_probs_BJV.shape[1]}")
    index_B = torch.arange(B, device=target_probs_BJV.device)
    return accept_residual_rows(
        target_probs_BJV.reshape(-1, V),
        None if draft_probs_BGV is None else draft_probs_BGV.reshape(-1, V),
        *(draft_ids_BG, draft_lens_B, accept_u_BG, replacement_u_B, bonus_u_B, index_B * (G + 1), index_B * G),
        one_hot_B=one_hot_B,
        temperature_B=temperature_B,
        impl=impl,
        check=check,
    )


def _checked_step(result: StepResult, check: bool, values: dict[Fault, Tensor]) -> StepResult:
    if check:
        raise_faults(result.fault_B, values)
    return result


def markov_step(
    base_BV: Float[Tensor, "B V"],
    prev_ids_B: Int[Tensor, " B"],
    w1_VR: Float[Tensor, "V R"],
    w2_VR: Float[Tensor, "V R"],
    temperature_B: Float[Tensor, " B"],
    uniform_B: Float[Tensor, " B"],
    *,
    impl: Impl = "auto",
    check: bool = True,
) -> StepResult:
    """One vanilla Markov-head step: see `markov_step.py`."""
    inputs = (base_BV, prev_ids_B, w1_VR, w2_VR, temperature_B, uniform_B)
    if resolve(impl, base_BV, w1_VR, w2_VR) == "torch":
        result = torch_markov.markov_step(*inputs)
    else:
        result = StepResult(*_kernel("markov_step").markov_step(*inputs))
    values = {Fault.TOKEN_ID: prev_ids_B, Fault.TEMPERATURE: temperature_B, Fault.UNIFORM: uniform_B}
    return _checked_step(result, check, values)


def low_rank_step(
    base_BV: Float[Tensor, "B V"],
    latent_BR: Float[Tensor, "B R"],
    w2_VR: Float[Tensor, "V R"],
    temperature_B: Float[Tensor, " B"],
    uniform_B: Float[Tensor, " B"],
    *,
    impl: Impl = "auto",
    check: bool = True,
) -> StepResult:
    """One sequential-head step from a given latent vector (gated, rnn): see `markov_step.py`."""
    inputs = (base_BV, latent_BR, w2_VR, temperature_B, uniform_B)
    if resolve(impl, base_BV, latent_BR, w2_VR) == "torch":
        result = torch_markov.low_rank_step(*inputs)
    else:
        result = StepResult(*_kernel("markov_step").low_rank_step(*inputs))
    return _checked_step(result, check, {Fault.TEMPERATURE: temperature_B, Fault.UNIFORM: uniform_B})


def ragged_attention(
    query_NHE: Float[Tensor, "N H E"],
    keys_SKE: Float[Tensor, "S K E"],
    values_SKE: Float[Tensor, "S K E"],
    plan: AttentionPlan,
    *,
    scale: float,
    impl: Impl = "auto",
) -> Float[Tensor, "N H E"]:
    """Verification attention from the marker tensor: see `ragged_attention.py` and `markers.py`.

    `attention_plan` has checked the markers against a pool of that many slots; one plan serves all layers of a round.
    """
    if resolve(impl, query_NHE, keys_SKE, values_SKE) == "torch":
        return torch_attention.ragged_attention(query_NHE, keys_SKE, values_SKE, plan, scale=scale)
    return _kernel("ragged_attention").ragged_attention(
        *(query_NHE, keys_SKE, values_SKE, plan.marker_NP, plan.slots_B, plan.starts_B, plan.counts_B, plan.ends_B),
        scale=scale,
        max_rows=plan.max_rows,
        max_end=plan.max_end,
    )


def compact_kv(
    keys_LSKE: Shaped[Tensor, "L S K E"],
    values_LSKE: Shaped[Tensor, "L S K E"],
    first_slots_B: Int[Tensor, " B"],
    kept_BJ: Int[Tensor, "B J"],
    num_kept_B: Int[Tensor, " B"],
    *,
    impl: Impl = "auto",
    check: bool = True,
) -> None:
    """Move the accepted path of each tree to consecutive slots, in place: see `compact_kv.py`."""
    if check:
        check_kept(keys_LSKE.shape[1], first_slots_B, kept_BJ, num_kept_B)
    inputs = (keys_LSKE, values_LSKE, first_slots_B, kept_BJ, num_kept_B)
    if resolve(impl, keys_LSKE, values_LSKE) == "torch":
        torch_compact.compact_kv(*inputs)
    else:
        _kernel("compact_kv").compact_kv(*inputs)


def admit_top_k(
    survival_BG: Float[Tensor, "B G"],
    lens_B: Int[Tensor, " B"],
    budget: int,
    *,
    impl: Impl = "auto",
    check: bool = True,
) -> Int[Tensor, " B"]:
    """How many drafts of each request are among the `budget` largest survival products: see `admission.py`."""
    if resolve(impl, survival_BG) == "torch":
        admitted_B, fault_B = torch_admission.admit_top_k(survival_BG, lens_B, budget)
    else:
        admitted_B, fault_B = _kernel("admission").admit_top_k(survival_BG, lens_B, budget)
    if check:
        raise_faults(fault_B, {Fault.LENGTH: lens_B, Fault.SURVIVAL: survival_BG})
    return admitted_B


def tv_loss(
    draft_NV: Float[Tensor, "N V"],
    target_NV: Float[Tensor, "N V"],
    *,
    impl: Impl = "auto",
    check: bool = True,
) -> Float[Tensor, " N"]:
    """Total variation of each row of logits, differentiable in the draft logits: see `tv_loss.py`."""
    if resolve(impl, draft_NV, target_NV) == "torch":
        loss_N, fault_N = torch_tv.tv_loss(draft_NV, target_NV)
    else:
        loss_N, fault_N = _kernel("tv_loss").tv_loss(draft_NV, target_NV)
    if check:
        raise_faults(fault_N, {}, what="row")
    return loss_N
