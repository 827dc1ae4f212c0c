"""A target's pass on a GPU, from data sheets alone: the slower of reading memory and computing, plus a launch time.

This is what the silicon allows, not what an engine reaches; real passes are slower by 1.2 to 2 times. It serves to see
where the bend lies and how it moves from card to card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dspec_lab.scheduler.cost_table import CostTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card: dense bf16 tensor throughput and memory bandwidth, as its data sheet gives them."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    sheet: str


# dense figures: the sheets print twice as much "with sparsity"
GPUS: Mapping[str, Gpu] = {
    "h100": Gpu(
        name="H100 SXM", flops_per_s=989e12, bytes_per_s=3.35e12, memory_bytes=80e9,
        sheet="NVIDIA H100 Tensor Core GPU data sheet: bf16 1979 TFLOPS with sparsity, 3.35 TB/s, 80 GB",
    ),
    "h200": Gpu(
        name="H200 SXM", flops_per_s=989e12, bytes_per_s=4.8e12, memory_bytes=141e9,
        sheet="NVIDIA H200 Tensor Core GPU data sheet: bf16 1979 TFLOPS with sparsity, 4.8 TB/s, 141 GB",
    ),
    "a6000": Gpu(
        name="RTX A6000", flops_per_s=154.8e12, bytes_per_s=768e9, memory_bytes=48e9,
        sheet="NVIDIA RTX A6000 data sheet: tensor 309.7 TFLOPS with sparsity, 768 GB/s, 48 GB",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseModel:
    """What a pass over a dense transformer reads and computes."""

    name: str
    parameters: float  # that a token's pass uses; embeddings read once a token are left out
    bytes_per_parameter: float
    kv_bytes_per_token: float  # of context


# 36 layers, 8 key/value heads of 128, bf16: 2 x 36 x 8 x 128 x 2 bytes a token
QWEN3_4B = DenseModel(name="Qwen3-4B, bf16", parameters=4.0e9, bytes_per_parameter=2.0, kv_bytes_per_token=147_456.0)
LAUNCH_S = 0.0005  # per pass: graph launch and the step around it; an assumption
MAX_ROWS = 8192


def roofline_table(
    gpu: Gpu, model: DenseModel = QWEN3_4B, *, context_tokens: int = 1024, launch_s: float = LAUNCH_S
) -> CostTable:
    """The pass over B rows: max(weights / bandwidth, 2 B parameters / flops), and reading one context per row.

    The context term counts each row's context as read anew, an upper bound: rows of one request share it.
    """
    if model.parameters * model.bytes_per_parameter > gpu.memory_bytes:
        raise ValueError(f"{model.name} does not fit the {gpu.name}")
    read_s = model.parameters * model.bytes_per_parameter / gpu.bytes_per_s
    compute_s = 2 * model.parameters / gpu.flops_per_s  # a row
    bend = max(1, int(read_s / compute_s))
    rows = sorted({1, bend, MAX_ROWS})
    context_s = model.kv_bytes_per_token / gpu.bytes_per_s
    return CostTable(
        rows=tuple(rows),
        seconds=tuple(max(read_s, count * compute_s) + count * context_s * context_tokens for count in rows),
        name=f"{model.name} on one {gpu.name} (roofline)",
        source="data sheet",
        fixed_s=launch_s,
        context_tokens=context_tokens,
        context_s=context_s,
        run={"sheet": gpu.sheet, "bend_rows": bend, "launch_s": launch_s, "model": model.name},
    )
