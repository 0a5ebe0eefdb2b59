"""Rotary position embedding of the `cpu` backend.

Source: Su et al. 2021, equation 34.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numba.core import types

from retrograd_hookspecs import KernelError

from ._math_common import IDS, IN2, INT, NONE, OUT3, PARALLEL, SERIAL, Array, chunks_for, require_shape


@njit(types.boolean(IDS, INT), **SERIAL)
def any_outside(values: Any, bound: Any) -> Any:
    """True if a value is not in [0, bound)."""
    lowest = 0
    highest = 0
    for value in values:
        lowest = min(lowest, value)
        highest = max(highest, value)
    return lowest < 0 or highest >= bound


@njit(NONE(OUT3, IDS, IN2, IN2, INT, INT, INT), **PARALLEL)
def rotate_rows(
    x: Any, positions: Any, cos: Any, sin: Any, interleaved: Any, inverse: Any, chunks: Any
) -> None:
    """All rows, in `chunks` shares."""
    rows, heads = x.shape[0], x.shape[1]
    half = cos.shape[1]
    sign = np.float32(-1.0) if inverse else np.float32(1.0)
    for chunk in prange(chunks):
        for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
            position = positions[row]
            for head in range(heads):
                values = x[row, head]
                if interleaved:
                    for i in range(half):
                        c, s = cos[position, i], sign * sin[position, i]
                        first, second = values[2 * i], values[2 * i + 1]
                        values[2 * i] = first * c - second * s
                        values[2 * i + 1] = first * s + second * c
                else:
                    for i in range(half):
                        c, s = cos[position, i], sign * sin[position, i]
                        first, second = values[i], values[half + i]
                        values[i] = first * c - second * s
                        values[half + i] = first * s + second * c


def rope(x: Array, positions: Array, cos: Array, sin: Array, interleaved: bool, inverse: bool) -> None:
    """Rotate the first R of the D values of each head of x (T, heads, D) in place.

    `positions` int32 (T,) index the rows of cos and sin (P, R/2). Pairs are (2i, 2i+1) if
    `interleaved`, else (i, i + R/2). `inverse` rotates back, which is also the gradient.

    Raises:
        KernelError: a position has no row in `cos`, or shapes do not fit.
    """
    require_shape("rope", "positions", positions, x.shape[:1])
    require_shape("rope", "sin", sin, cos.shape)
    if 2 * cos.shape[1] > x.shape[2]:
        raise KernelError(
            f"rope: {2 * cos.shape[1]} values of a head are to be rotated, but it has {x.shape[2]}"
        )
    if any_outside(positions, cos.shape[0]):
        raise KernelError(
            f"rope: positions range over [{positions.min()}, {positions.max()}] but the rotation table has"
            f" {cos.shape[0]} rows: the sequence is longer than the context the run was built for"
        )
    rotate_rows(x, positions, cos, sin, interleaved, inverse, chunks_for(x.size))
