"""Cross-entropy over tiles of the vocabulary, of the `cpu` backend.

Source: Milakov & Gimelshein 2018, algorithm 3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from ._math_common import (
    F32,
    IDS,
    IN1,
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
from ._math_lanes import (
    exp_lanes,
    fill_lanes,
    first_lane,
    keep_between,
    load_lanes,
    load_some,
    max_lanes,
    maximum,
    store_lanes,
    store_some,
    sum_lanes,
    tanh_lanes,
)
from ._simd import WIDTH

SUM_BLOCK = 1024
"""Terms that are summed before the sum is added to the total, to keep rounding errors small."""
ZERO = np.float32(0.0)
ONE = np.float32(1.0)
LOWEST = np.float32(-np.inf)


@njit(**SERIAL)
def exp_scalar(x: Any) -> Any:
    """exp of one float32, as in lanes."""
    return first_lane(exp_lanes(fill_lanes(x)))


@njit(**SERIAL)
def read_part(array: Any, at: Any, count: Any) -> Any:
    """Lanes of which the first `count` are elements from `at` on, the rest −inf."""
    if count >= WIDTH:
        return load_lanes(array, at)
    return load_some(array, at, count, LOWEST)


@njit(**SERIAL)
def write_part(array: Any, at: Any, count: Any, lanes: Any) -> None:
    """Store the first `count` lanes."""
    if count >= WIDTH:
        store_lanes(array, at, lanes)
    else:
        store_some(array, at, count, lanes)


@njit(**SERIAL)
def fold_row(logits: Any, row: Any, softcap: Any, running_max: Any, running_sum: Any) -> None:
    """Cap one row of logits in place and fold it into the running maximum and sum."""
    size = logits.shape[1]
    start = row * size
    peak = fill_lanes(LOWEST)
    for j in range(0, size, WIDTH):
        value = read_part(logits, start + j, size - j)
        if softcap > ZERO:
            value = tanh_lanes(value * (ONE / softcap)) * softcap
            write_part(logits, start + j, size - j, value)
            value = keep_between(value, 0, min(size - j, WIDTH), LOWEST)
        peak = maximum(value, peak)
    before = running_max[row]
    now = max(before, max_lanes(peak))
    # A row of −inf alone has nothing to sum: subtract 0 there, not −inf from −inf.
    shift = now if now > LOWEST else ZERO
    total = fill_lanes(ZERO)
    for block in range(0, size, SUM_BLOCK):
        part = fill_lanes(ZERO)
        for j in range(block, min(size, block + SUM_BLOCK), WIDTH):
            part = part + exp_lanes(read_part(logits, start + j, size - j) - shift)
        total = total + part
    running_sum[row] = running_sum[row] * exp_scalar(before - shift) + sum_lanes(total)
    running_max[row] = now


@njit(NONE(OUT2, INT, IDS, F32, OUT1, OUT1, OUT1, INT), **PARALLEL)
def fold_rows(
    logits: Any,
    first: Any,
    targets: Any,
    softcap: Any,
    running_max: Any,
    running_sum: Any,
    target_logit: Any,
    chunks: Any,
) -> None:
    """All rows, in `chunks` shares."""
    rows, size = logits.shape
    for chunk in prange(chunks):
        for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
            fold_row(logits, np.int64(row), softcap, running_max, running_sum)
            target = targets[row] - first
            if 0 <= target < size:
                target_logit[row] = logits[row, target]


@njit(**SERIAL)
def gradient_row(logits: Any, row: Any, softcap: Any, lse: Any, factor: Any) -> None:
    """Overwrite one row of logits by −factor · softmax, taken back through the cap."""
    size = logits.shape[1]
    start = row * size
    for j in range(0, size, WIDTH):
        value = read_part(logits, start + j, size - j)
        slope = fill_lanes(-factor)
        if softcap > ZERO:
            tanh = tanh_lanes(value * (ONE / softcap))
            value = tanh * softcap
            slope = (fill_lanes(ONE) - tanh * tanh) * (-factor)
        write_part(logits, start + j, size - j, exp_lanes(value - lse) * slope)


@njit(NONE(OUT2, INT, IDS, F32, IN1, IN1, INT), **PARALLEL)
def gradient_rows(
    logits: Any, first: Any, targets: Any, softcap: Any, lse: Any, dlogp: Any, chunks: Any
) -> None:
    """All rows, in `chunks` shares."""
    rows, size = logits.shape
    for chunk in prange(chunks):
        for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
            factor = dlogp[row]
            if factor == ZERO:
                # A token that is not trained: most of a prompt.
                logits[row] = ZERO
                continue
            target = targets[row] - first
            slope = ONE
            if 0 <= target < size and softcap > ZERO:
                tanh = first_lane(tanh_lanes(fill_lanes(logits[row, target] * (ONE / softcap))))
                slope = ONE - tanh * tanh
            gradient_row(logits, np.int64(row), softcap, lse[row], factor)
            if 0 <= target < size:
                logits[row, target] += factor * slope


def logsumexp_tile(
    logits: Array,
    first: int,
    targets: Array,
    softcap: float,
    running_max: Array,
    running_sum: Array,
    target_logit: Array,
) -> None:
    """Fold vocabulary entries [first, first + V') into the running logsumexp of each row.

    logits (T, V') are capped in place if softcap > 0; `running_max` (T,) starts at −inf and
    `running_sum` (T,) at 0; `target_logit` (T,) is set where `targets` int32 (T,) lie in the tile.
    """
    rows = logits.shape[:1]
    for name, array in (
        ("targets", targets),
        ("running_max", running_max),
        ("running_sum", running_sum),
        ("target_logit", target_logit),
    ):
        require_shape("logsumexp_tile", name, array, rows)
    fold_rows(
        logits, first, targets, softcap, running_max, running_sum, target_logit, chunks_for(logits.size)
    )


def softmax_grad_tile(
    logits: Array, first: int, targets: Array, softcap: float, lse: Array, dlogp: Array
) -> None:
    """Overwrite uncapped logits (T, V') by dlogp · (onehot(target) − softmax), taken back through the cap."""
    for name, array in (("targets", targets), ("lse", lse), ("dlogp", dlogp)):
        require_shape("softmax_grad_tile", name, array, logits.shape[:1])
    gradient_rows(logits, first, targets, softcap, lse, dlogp, chunks_for(logits.size))
