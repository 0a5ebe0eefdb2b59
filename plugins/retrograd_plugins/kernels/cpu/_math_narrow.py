"""Activations in 16 bits, while they wait for the backward pass.

The format is float16 of x / 256: its 11 bits of precision reach from 0.016 to 16.7 million, and below that
the error is at most 7.6e-6. So it is eight times as close as bfloat16, to which products round activations in
the backward pass anyway, and no activation of a working model leaves its range. One that does becomes
infinite: the update is then reported as not finite and skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numba.core import types

from ._math_common import INT, NONE, OUT1, PARALLEL, Array, chunks_for, require_shape
from ._math_lanes import load_lanes, store_lanes
from ._simd import WIDTH
from ._simd_memory import address
from ._simd_tiles import load_halves, store_halves

FACTOR = np.float32(256.0)
INVERSE = np.float32(1.0 / 256.0)
HALVES = types.Array(types.uint16, 1, "C")


@njit(NONE(OUT1, HALVES, INT), **PARALLEL)
def narrow_lanes(x: Any, out: Any, chunks: Any) -> None:
    """Whole lanes, in `chunks` shares."""
    blocks = x.size // WIDTH
    for chunk in prange(chunks):
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            i = np.int64(block * WIDTH)
            store_halves(address(out, i), load_lanes(x, i) * INVERSE)


@njit(NONE(HALVES, OUT1, INT), **PARALLEL)
def widen_lanes(x: Any, out: Any, chunks: Any) -> None:
    """Whole lanes, in `chunks` shares."""
    blocks = x.size // WIDTH
    for chunk in prange(chunks):
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            i = np.int64(block * WIDTH)
            store_lanes(out, i, load_halves(address(x, i)) * FACTOR)


def narrow(x: Array, out: Array) -> None:
    """out uint16 = float32 x in 16 bits; any shape."""
    require_shape("narrow", "out", out, x.shape)
    x, out = x.reshape(-1), out.reshape(-1)
    narrow_lanes(x, out, chunks_for(x.size))
    whole = x.size // WIDTH * WIDTH
    with np.errstate(over="ignore"):
        out[whole:] = (x[whole:] * INVERSE).astype(np.float16).view(np.uint16)


def widen(x: Array, out: Array) -> None:
    """out float32 = what `narrow` made of it."""
    require_shape("widen", "out", out, x.shape)
    x, out = x.reshape(-1), out.reshape(-1)
    widen_lanes(x, out, chunks_for(x.size))
    whole = x.size // WIDTH * WIDTH
    out[whole:] = x[whole:].view(np.float16).astype(np.float32) * FACTOR
