"""Device functions that draw from a row by inverse CDF in two levels: pick a chunk by its mass, then a token in it.

The vocabulary is so read once, plus one chunk. Masses are fp32 sums; the running sums are fp64, because with 24 bits
the tokens rarer than 6e-8 of a large vocabulary would never come.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_above(mass, threshold, offsets):
    """Index of the first entry whose running sum exceeds `threshold`, the last entry with mass if none does.

    Never an entry without mass. `mass` is fp64; masked lanes carry 0. Returns (index, running sum before it).
    """
    running = tl.cumsum(mass, axis=0)
    # a parallel scan rounds, so an entry without mass may seem to cross the threshold
    crosses = (running > threshold) & (mass > 0)
    first = tl.min(tl.where(crosses, offsets, 2147483647), axis=0)
    last = tl.max(tl.where(mass > 0, offsets, -1), axis=0)
    index = tl.where(first == 2147483647, last, first)
    before = tl.sum(tl.where(offsets < index, mass, 0.0), axis=0)
    return index, before


@triton.jit
def is_bad(x):
    """1 where x is NaN, +inf or -inf. Comparisons only: a sum may lose a NaN."""
    return ((x != x) | (x == float("inf")) | (x == float("-inf"))).to(tl.int32)


@triton.jit
def is_bad_logit(x):
    """1 where x is NaN or +inf; -inf is a masked token."""
    return ((x != x) | (x == float("inf"))).to(tl.int32)


@triton.jit
def combine_chunks(peaks, sums, tops, chunks, limit):
    """(maximum, log-sum-exp, index of the first maximum) of a row from its chunks; the peak is -inf where limit is 0.

    `sums` are relative to their own chunk's peak. A NaN peak gives a NaN log-sum-exp; callers read the flag for it.
    """
    live = chunks < limit
    peak_C = tl.load(peaks + chunks, mask=live, other=float("-inf"))
    sum_C = tl.load(sums + chunks, mask=live, other=0.0)
    top_C = tl.load(tops + chunks, mask=live, other=2147483647)
    peak = tl.max(peak_C, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    # the floor only keeps the logarithm of an unread row finite; a row with a finite peak sums to 1 or more
    lse = base + tl.log(tl.maximum(tl.sum(sum_C * tl.exp(peak_C - base), axis=0), 1e-30))
    top = tl.min(tl.where(peak_C == peak, top_C, 2147483647), axis=0)
    return peak, lse, top
