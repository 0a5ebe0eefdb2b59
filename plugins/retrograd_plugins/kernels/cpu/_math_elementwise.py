"""Addition of whole arrays of the `cpu` backend.

It is bound by memory, which one core does not fill, so all threads take part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from ._math_common import IN1, INT, NONE, OUT1, PARALLEL, SERIAL_ELEMENTS, Array, chunks_for, require_shape


@njit(NONE(IN1, OUT1, INT), **PARALLEL)
def add_elements(x: Any, out: Any, chunks: Any) -> None:
    """All elements, in `chunks` shares."""
    size = out.size
    for chunk in prange(chunks):
        for i in range(size * chunk // chunks, size * (chunk + 1) // chunks):
            out[i] += x[i]


def add(x: Array, out: Array) -> None:
    """out (T, K) += x."""
    require_shape("add", "x", x, out.shape)
    if out.size < SERIAL_ELEMENTS:
        np.add(out, x, out=out)
        return
    add_elements(x.reshape(-1), out.reshape(-1), chunks_for(out.size))
