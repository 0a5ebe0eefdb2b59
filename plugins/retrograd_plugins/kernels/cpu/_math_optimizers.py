"""Optimizer updates and the squared norm, of the `cpu` backend.

Source: Loshchilov & Hutter 2019, algorithms 1 and 2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange
from numba.core import types

from retrograd_hookspecs import KernelError

from ._math_common import F32, IN1, INT, NONE, OUT1, PARALLEL, SERIAL, Array, chunks_for, require_shape

SUM_BLOCK = 16384
"""Elements whose squares are summed by one thread; the sums of blocks are added in order."""


@njit(NONE(OUT1, IN1, OUT1, OUT1, F32, F32, F32, F32, F32, F32, F32, INT), **PARALLEL)
def adamw_elements(
    value: Any,
    grad: Any,
    first_moment: Any,
    second_moment: Any,
    beta1: Any,
    rest1: Any,
    beta2: Any,
    rest2: Any,
    rate: Any,
    eps: Any,
    decay: Any,
    chunks: Any,
) -> None:
    """All elements, in `chunks` shares. `rate` and `eps` already hold the bias corrections."""
    size = value.size
    for chunk in prange(chunks):
        for i in range(size * chunk // chunks, size * (chunk + 1) // chunks):
            gradient = grad[i]
            first = beta1 * first_moment[i] + rest1 * gradient
            second = beta2 * second_moment[i] + rest2 * gradient * gradient
            first_moment[i] = first
            second_moment[i] = second
            value[i] = value[i] - (rate * first / (math.sqrt(second) + eps) + decay * value[i])


@njit(NONE(OUT1, IN1, OUT1, F32, F32, F32, INT), **PARALLEL)
def sgd_elements(
    value: Any, grad: Any, momentum_buffer: Any, rate: Any, momentum: Any, decay: Any, chunks: Any
) -> None:
    """All elements, in `chunks` shares."""
    size = value.size
    for chunk in prange(chunks):
        for i in range(size * chunk // chunks, size * (chunk + 1) // chunks):
            step = momentum * momentum_buffer[i] + grad[i]
            momentum_buffer[i] = step
            value[i] = value[i] - (rate * step + decay * value[i])


# Partial sums are as many as the processor's vectors hold: fixed, but not the same everywhere.
@njit(types.float64(IN1, INT, INT), fastmath={"reassoc", "nsz"}, **SERIAL)
def square_block(x: Any, start: Any, stop: Any) -> Any:
    """Σ x² of elements [start, stop)."""
    total = 0.0
    for i in range(np.uint64(start), np.uint64(stop)):
        value = np.float64(x[i])
        total += value * value
    return total


@njit(NONE(IN1, types.Array(types.float64, 1, "C"), INT), **PARALLEL)
def square_blocks(x: Any, sums: Any, chunks: Any) -> None:
    """sums[b] = Σ x² of block b."""
    blocks = sums.size
    for chunk in prange(chunks):
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            start = np.int64(block * SUM_BLOCK)
            sums[block] = square_block(x, start, min(x.size, start + SUM_BLOCK))


def adamw(
    value: Array,
    grad: Array,
    first_moment: Array,
    second_moment: Array,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One AdamW update of float32 value and moments in place; `step` counts from 1.

    value −= lr · m̂ / (√v̂ + eps) + lr · weight_decay · value, with m̂ = m / (1 − beta1^step) and
    v̂ = v / (1 − beta2^step); both sides of the fraction are multiplied by √(1 − beta2^step).

    Raises:
        KernelError: step < 1, or shapes differ.
    """
    if step < 1:
        raise KernelError(f"adamw: step {step} is not positive; count optimizer steps from 1")
    for name, array in (("grad", grad), ("first_moment", first_moment), ("second_moment", second_moment)):
        require_shape("adamw", name, array, value.shape)
    correction = math.sqrt(1.0 - beta2**step)
    adamw_elements(
        value,
        grad,
        first_moment,
        second_moment,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr * correction / (1.0 - beta1**step),
        eps * correction,
        lr * weight_decay,
        chunks_for(value.size),
    )


def sgd(
    value: Array, grad: Array, momentum_buffer: Array, lr: float, momentum: float, weight_decay: float
) -> None:
    """One SGD update in place, with buffer = momentum · buffer + grad.

    value −= lr · (buffer + weight_decay · value).

    Raises:
        KernelError: shapes differ.
    """
    require_shape("sgd", "grad", grad, value.shape)
    require_shape("sgd", "momentum_buffer", momentum_buffer, value.shape)
    sgd_elements(value, grad, momentum_buffer, lr, momentum, lr * weight_decay, chunks_for(value.size))


def sum_squares(x: Array) -> float:
    """Σ x² of a 1-D array in float64, in an order that depends on its size alone."""
    sums = np.empty(-(-x.size // SUM_BLOCK), np.float64)
    square_blocks(x, sums, chunks_for(x.size))
    return float(math.fsum(sums))
