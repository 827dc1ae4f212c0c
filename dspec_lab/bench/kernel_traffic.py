"""Memory traffic of the fused kernels against the same maths as separate torch operations, counted from the shapes.

Each torch operation reads its inputs and writes its output once, and small tensors (ids, uniforms, one number a row)
are left out. A kernel's bytes are what the algorithm must move; `kernels/benchmarks` divides the same number by time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pass:
    """One torch operation over whole rows."""

    what: str
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """One op at one shape."""

    op: str
    shape: str
    fused_bytes: int
    passes: tuple[Pass, ...]  # the torch operations that do the same
    flops: int  # products of matrices alone; elementwise maths costs nothing beside its bytes

    @property
    def torch_bytes(self) -> int:
        """Moved by the torch operations together."""
        return sum(one.read_bytes + one.written_bytes for one in self.passes)

    @property
    def saved(self) -> float:
        """Bytes of the torch operations for each byte of the kernel."""
        return self.torch_bytes / self.fused_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte of the kernel."""
        return self.flops / self.fused_bytes

    def least_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The roofline: no run of the kernel can be faster than memory or arithmetic allow."""
        return max(self.fused_bytes / bytes_per_s, self.flops / flops_per_s)


def accept_residual_traffic(batch: int, gamma: int, vocab: int, item_bytes: int = 4) -> Traffic:
    """Accepted prefix and extra token from probabilities of gamma + 1 target and gamma draft rows a request."""
    row = batch * vocab * item_bytes
    wide = batch * vocab * 8
    return Traffic(
        op="accept_residual",
        shape=f"{batch} requests, {gamma} drafts, vocabulary {vocab}",
        fused_bytes=(2 * gamma + 1) * row,
        passes=(
            Pass("check target rows", (gamma + 1) * row, 0),
            Pass("check draft rows", gamma * row, 0),
            Pass("take the rows of the rejection", 2 * row, 2 * row),
            Pass("p - q", 2 * row, row),
            Pass("max(., 0)", row, row),
            Pass("mass", row, 0),
            Pass("residual or p", 2 * row, row),
            Pass("to fp64", row, wide),
            Pass("running sum", wide, wide),
        ),
        flops=0,
    )


def markov_step_traffic(batch: int, vocab: int, rank: int, item_bytes: int = 2) -> Traffic:
    """Base logits + low-rank bias, softmax, a draw; the kernel reads the second factor once per 16 requests."""
    factor, base = vocab * rank * item_bytes, batch * vocab * item_bytes
    row, wide = batch * vocab * 4, batch * vocab * 8
    return Traffic(
        op="markov_step",
        shape=f"{batch} requests, rank {rank}, vocabulary {vocab}",
        fused_bytes=-(-batch // 16) * factor + base + row,
        passes=(
            Pass("bias: latent x factor", factor, base),
            Pass("bias to fp32", base, row),
            Pass("base to fp32", base, row),
            Pass("add", 2 * row, row),
            Pass("temperature", row, row),
            Pass("softmax", row, row),
            Pass("to fp64", row, wide),
            Pass("running sum", wide, wide),
        ),
        flops=2 * batch * vocab * rank,
    )


def ragged_attention_traffic(
    batch: int, rows: int, context: int, heads: int, kv_heads: int, width: int, item_bytes: int = 2
) -> Traffic:
    """`rows` verified rows a request over `context` cached tokens, against padded attention with a mask tensor."""
    seen = context + rows
    cache = 2 * batch * seen * kv_heads * width * item_bytes
    query = batch * rows * heads * width * item_bytes
    scores = batch * heads * rows * seen * 4
    return Traffic(
        op="ragged_attention",
        shape=f"{batch} requests, {rows} rows, {context} cached tokens, {heads}/{kv_heads} heads of {width}",
        fused_bytes=cache + 2 * query,
        passes=(
            Pass("query x keys", query + cache // 2, scores),
            Pass("mask", scores + batch * rows * seen, scores),
            Pass("softmax", scores, scores),
            Pass("weights x values", scores + cache // 2, query),
        ),
        flops=4 * batch * rows * seen * heads * width,
    )


def tv_loss_traffic(rows: int, vocab: int, item_bytes: int = 2) -> Traffic:
    """Total variation of rows of logits and its gradient: both rows twice, then once more, and the gradient."""
    given, row = rows * vocab * item_bytes, rows * vocab * 4
    return Traffic(
        op="tv_loss",
        shape=f"{rows} rows, vocabulary {vocab}, forward and backward",
        fused_bytes=7 * given,
        passes=(
            Pass("both to fp32", 2 * given, 2 * row),
            Pass("both softmaxes", 2 * row, 2 * row),
            Pass("q - p", 2 * row, row),
            Pass("absolute value, sum", 2 * row, row),
            Pass("backward: sign, product", 3 * row, 2 * row),
            Pass("backward: softmax", 2 * row, row),
            Pass("backward: to the logits' dtype", row, given),
        ),
        flops=0,
    )


def compact_kv_traffic(batch: int, kept: int, layers: int, kv_heads: int, width: int, item_bytes: int = 2) -> Traffic:
    """Keys and values of the accepted path moved to consecutive slots; torch copies through a temporary."""
    moved = 2 * batch * (kept - 1) * layers * kv_heads * width * item_bytes
    return Traffic(
        op="compact_kv",
        shape=f"{batch} requests, {kept} kept, {layers} layers, {kv_heads} heads of {width}",
        fused_bytes=2 * moved,
        passes=(Pass("take the path", moved, moved), Pass("put it in place", moved, moved)),
        flops=0,
    )
