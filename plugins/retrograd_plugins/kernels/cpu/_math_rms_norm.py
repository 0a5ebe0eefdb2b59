"""RMSNorm of the `cpu` backend.

Source: Zhang & Sennrich 2019, equation 4.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from ._math_common import (
    F32,
    IN1,
    IN2,
    INT,
    NONE,
    OUT1,
    OUT2,
    PARALLEL,
    SERIAL,
    Array,
    chunks_for,
    require_shape,
)
from ._math_lanes import fill_lanes, load_lanes, load_some, multiply_add, store_lanes, store_some, sum_lanes
from ._simd import WIDTH

ZERO = np.float32(0.0)


@njit(**SERIAL)
def norm_row(x: Any, row: Any, weight: Any, eps: Any, out: Any) -> Any:
    """One row; returns 1 / sqrt(mean(x²) + eps)."""
    size = x.shape[1]
    start = row * size
    whole = size // WIDTH * WIDTH
    total = fill_lanes(ZERO)
    for i in range(0, whole, WIDTH):
        value = load_lanes(x, start + i)
        total = multiply_add(value, value, total)
    rest = size - whole
    if rest:
        value = load_some(x, start + whole, rest, ZERO)
        total = multiply_add(value, value, total)
    rstd = np.float32(1.0 / math.sqrt(sum_lanes(total) / np.float32(size) + eps))
    for i in range(0, whole, WIDTH):
        store_lanes(out, start + i, load_lanes(x, start + i) * rstd * load_lanes(weight, i))
    if rest:
        scaled = load_some(x, start + whole, rest, ZERO) * rstd * load_some(weight, whole, rest, ZERO)
        store_some(out, start + whole, rest, scaled)
    return rstd


@njit(NONE(IN2, IN1, F32, OUT2, OUT1, INT), **PARALLEL)
def norm_rows(x: Any, weight: Any, eps: Any, out: Any, rstd: Any, chunks: Any) -> None:
    """All rows, in `chunks` shares."""
    rows = x.shape[0]
    for chunk in prange(chunks):
        for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
            rstd[row] = norm_row(x, row, weight, eps, out)


@njit(**SERIAL)
def gradient_row(dout: Any, x: Any, weight: Any, rstd: Any, row: Any, dx: Any, accumulate: Any) -> None:
    """dx = (or +=) rstd · (g − x̂ · mean(g · x̂)) of one row, g = dout · weight, x̂ = x · rstd."""
    size = x.shape[1]
    start = row * size
    whole = size // WIDTH * WIDTH
    rest = size - whole
    scale = rstd[row]
    total = fill_lanes(ZERO)
    for i in range(0, whole, WIDTH):
        scaled = load_lanes(dout, start + i) * load_lanes(weight, i)
        total = multiply_add(scaled, load_lanes(x, start + i), total)
    if rest:
        scaled = load_some(dout, start + whole, rest, ZERO) * load_some(weight, whole, rest, ZERO)
        total = multiply_add(scaled, load_some(x, start + whole, rest, ZERO), total)
    # mean(g · x̂) · rstd, so that it multiplies x itself.
    mean = sum_lanes(total) / np.float32(size) * scale * scale
    for i in range(0, whole, WIDTH):
        scaled = load_lanes(dout, start + i) * load_lanes(weight, i)
        gradient = (scaled - load_lanes(x, start + i) * mean) * scale
        if accumulate:
            gradient = load_lanes(dx, start + i) + gradient
        store_lanes(dx, start + i, gradient)
    if rest:
        scaled = load_some(dout, start + whole, rest, ZERO) * load_some(weight, whole, rest, ZERO)
        gradient = (scaled - load_some(x, start + whole, rest, ZERO) * mean) * scale
        if accumulate:
            gradient = load_some(dx, start + whole, rest, ZERO) + gradient
        store_some(dx, start + whole, rest, gradient)


@njit(NONE(IN2, IN2, IN1, IN1, OUT2, INT, INT), **PARALLEL)
def gradient_rows(dout: Any, x: Any, weight: Any, rstd: Any, dx: Any, accumulate: Any, chunks: Any) -> None:
    """All rows, in `chunks` shares."""
    rows = x.shape[0]
    for chunk in prange(chunks):
        for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
            gradient_row(dout, x, weight, rstd, row, dx, accumulate)


def rms_norm(x: Array, weight: Array, eps: float, out: Array, rstd: Array) -> None:
    """out (T, K) = x · rstd · weight, rstd (T,) = 1 / sqrt(mean(x²) + eps)."""
    require_shape("rms_norm", "weight", weight, x.shape[1:])
    require_shape("rms_norm", "out", out, x.shape)
    require_shape("rms_norm", "rstd", rstd, x.shape[:1])
    norm_rows(x, weight, eps, out, rstd, chunks_for(x.size))


def rms_norm_backward(dout: Array, x: Array, weight: Array, rstd: Array, dx: Array, accumulate: bool) -> None:
    """Gradient of `rms_norm` by x (T, K): overwrites dx, or adds to it."""
    op = "rms_norm_backward"
    require_shape(op, "dout", dout, x.shape)
    require_shape(op, "weight", weight, x.shape[1:])
    require_shape(op, "rstd", rstd, x.shape[:1])
    require_shape(op, "dx", dx, x.shape)
    gradient_rows(dout, x, weight, rstd, dx, accumulate, chunks_for(x.size))
