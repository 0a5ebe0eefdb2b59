"""Gated activations of the `cpu` backend.

Both kinds are x · sigmoid(z(x)): z = x for SiLU; for the tanh form of GELU z = 2·√(2/π)·(x + 0.044715·x³), as
(1 + tanh(u)) / 2 = sigmoid(2u).

Source: Elfwing et al. 2018 (SiLU); Hendrycks & Gimpel 2016, section 2 (GELU); Shazeer 2020, equation 6.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from retrograd_hookspecs import KernelError

from ._math_common import IN1, INT, NONE, OUT1, PARALLEL, SERIAL, Array, chunks_for, require_shape
from ._math_lanes import divide, exp_lanes, fill_lanes, load_lanes, load_some, store_lanes, store_some
from ._simd import WIDTH

KINDS = ("silu", "gelu_tanh")
GELU = 1
ZERO = np.float32(0.0)
ONE = np.float32(1.0)
GELU_LINEAR = np.float32(2.0 * math.sqrt(2.0 / math.pi))
GELU_CUBIC = np.float32(2.0 * math.sqrt(2.0 / math.pi) * 0.044715)
GELU_SLOPE = np.float32(6.0 * math.sqrt(2.0 / math.pi) * 0.044715)


@njit(**SERIAL)
def gate_sigmoid(kind: Any, x: Any) -> Any:
    """sigmoid(z(x)) of lanes."""
    z = x
    if kind == GELU:
        z = (x * x * GELU_CUBIC + fill_lanes(GELU_LINEAR)) * x
    return divide(fill_lanes(ONE), exp_lanes(fill_lanes(ZERO) - z) + fill_lanes(ONE))


@njit(**SERIAL)
def gate_slope(kind: Any, x: Any, sigmoid: Any) -> Any:
    """d(x · sigmoid(z)) / dx = sigmoid · (1 + x · (1 − sigmoid) · dz/dx) of lanes."""
    part = x * (fill_lanes(ONE) - sigmoid)
    if kind == GELU:
        part = part * (x * x * GELU_SLOPE + fill_lanes(GELU_LINEAR))
    return sigmoid * (part + fill_lanes(ONE))


@njit(NONE(INT, IN1, IN1, OUT1, INT), **PARALLEL)
def activate(kind: Any, gate: Any, up: Any, out: Any, chunks: Any) -> None:
    """All elements, in `chunks` shares of whole lanes."""
    size = gate.size
    blocks = (size + WIDTH - 1) // WIDTH
    for chunk in prange(chunks):
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            i = np.int64(block * WIDTH)
            if i + WIDTH <= size:
                x = load_lanes(gate, i)
                store_lanes(out, i, x * gate_sigmoid(kind, x) * load_lanes(up, i))
            else:
                x = load_some(gate, i, size - i, ZERO)
                y = load_some(up, i, size - i, ZERO)
                store_some(out, i, size - i, x * gate_sigmoid(kind, x) * y)


@njit(NONE(INT, IN1, IN1, IN1, OUT1, OUT1, INT), **PARALLEL)
def activate_gradient(kind: Any, dout: Any, gate: Any, up: Any, dgate: Any, dup: Any, chunks: Any) -> None:
    """All elements, in `chunks` shares of whole lanes; dgate may be gate and dup may be up."""
    size = gate.size
    blocks = (size + WIDTH - 1) // WIDTH
    for chunk in prange(chunks):
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            i = np.int64(block * WIDTH)
            count = min(size - i, WIDTH)
            if count == WIDTH:
                x, y, gradient = load_lanes(gate, i), load_lanes(up, i), load_lanes(dout, i)
            else:
                x, y = load_some(gate, i, count, ZERO), load_some(up, i, count, ZERO)
                gradient = load_some(dout, i, count, ZERO)
            sigmoid = gate_sigmoid(kind, x)
            gate_gradient = gradient * y * gate_slope(kind, x, sigmoid)
            up_gradient = gradient * x * sigmoid
            if count == WIDTH:
                store_lanes(dgate, i, gate_gradient)
                store_lanes(dup, i, up_gradient)
            else:
                store_some(dgate, i, count, gate_gradient)
                store_some(dup, i, count, up_gradient)


def kind_number(kind: str) -> int:
    """Number of a kind of activation; `KernelError` names the known ones."""
    if kind not in KINDS:
        raise KernelError(f"gated_activation: unknown kind {kind!r}; known: {', '.join(KINDS)}")
    return KINDS.index(kind)


def gated_activation(kind: str, gate: Array, up: Array, out: Array) -> None:
    """out (T, K) = act(gate) · up; `kind` is "silu" or "gelu_tanh"."""
    require_shape("gated_activation", "up", up, gate.shape)
    require_shape("gated_activation", "out", out, gate.shape)
    activate(kind_number(kind), gate.reshape(-1), up.reshape(-1), out.reshape(-1), chunks_for(gate.size))


def gated_activation_backward(
    kind: str, dout: Array, gate: Array, up: Array, dgate: Array, dup: Array
) -> None:
    """dgate = dout · up · act'(gate), dup = dout · act(gate); dgate may be gate and dup may be up."""
    for name, array in (("dout", dout), ("up", up), ("dgate", dgate), ("dup", dup)):
        require_shape("gated_activation_backward", name, array, gate.shape)
    activate_gradient(
        kind_number(kind),
        dout.reshape(-1),
        gate.reshape(-1),
        up.reshape(-1),
        dgate.reshape(-1),
        dup.reshape(-1),
        chunks_for(gate.size),
    )
