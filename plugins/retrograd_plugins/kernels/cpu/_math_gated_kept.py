"""Gated activations whose inputs wait for the backward pass in 16 bits: written and read on the way.

Behind the second cache moving an activation costs more than computing with it, so what `narrow` would read
again is written while it is at hand, and what `widen` would write is read as it lies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from ._math_common import IN1, INT, NONE, OUT1, PARALLEL, Array, chunks_for, require_shape
from ._math_gated import gate_sigmoid, gate_slope, gated_activation, gated_activation_backward, kind_number
from ._math_lanes import load_lanes, store_lanes
from ._math_narrow import FACTOR, HALVES, INVERSE, narrow, widen
from ._simd import WIDTH
from ._simd_memory import address
from ._simd_tiles import load_halves, store_halves


@njit(NONE(INT, IN1, IN1, OUT1, HALVES, HALVES, INT), **PARALLEL)
def activate_and_keep(
    kind: Any, gate: Any, up: Any, out: Any, kept_gate: Any, kept_up: Any, chunks: Any
) -> None:
    """Whole lanes, in `chunks` shares."""
    blocks = gate.size // WIDTH
    for chunk in prange(chunks):
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            i = np.int64(block * WIDTH)
            x, y = load_lanes(gate, i), load_lanes(up, i)
            store_lanes(out, i, x * gate_sigmoid(kind, x) * y)
            store_halves(address(kept_gate, i), x * INVERSE)
            store_halves(address(kept_up, i), y * INVERSE)


@njit(NONE(INT, HALVES, HALVES, OUT1, INT), **PARALLEL)
def activate_kept(kind: Any, kept_gate: Any, kept_up: Any, out: Any, chunks: Any) -> None:
    """Whole lanes, in `chunks` shares."""
    blocks = out.size // WIDTH
    for chunk in prange(chunks):
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            i = np.int64(block * WIDTH)
            x = load_halves(address(kept_gate, i)) * FACTOR
            y = load_halves(address(kept_up, i)) * FACTOR
            store_lanes(out, i, x * gate_sigmoid(kind, x) * y)


@njit(NONE(INT, IN1, HALVES, HALVES, OUT1, OUT1, INT), **PARALLEL)
def activate_kept_gradient(
    kind: Any, dout: Any, kept_gate: Any, kept_up: Any, dgate: Any, dup: Any, chunks: Any
) -> None:
    """Whole lanes, in `chunks` shares."""
    blocks = dout.size // WIDTH
    for chunk in prange(chunks):
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            i = np.int64(block * WIDTH)
            x = load_halves(address(kept_gate, i)) * FACTOR
            y = load_halves(address(kept_up, i)) * FACTOR
            gradient = load_lanes(dout, i)
            sigmoid = gate_sigmoid(kind, x)
            store_lanes(dgate, i, gradient * y * gate_slope(kind, x, sigmoid))
            store_lanes(dup, i, gradient * x * sigmoid)


def gated_activation_keep(
    kind: str, gate: Array, up: Array, out: Array, kept_gate: Array, kept_up: Array
) -> None:
    """`gated_activation`, and gate and up as `narrow` keeps them."""
    for name, array in (("up", up), ("out", out), ("kept_gate", kept_gate), ("kept_up", kept_up)):
        require_shape("gated_activation_keep", name, array, gate.shape)
    arrays = [array.reshape(-1) for array in (gate, up, out, kept_gate, kept_up)]
    activate_and_keep(
        kind_number(kind), arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], chunks_for(gate.size)
    )
    gate, up, out, kept_gate, kept_up = (array[gate.size // WIDTH * WIDTH :] for array in arrays)
    if gate.size:
        gated_activation(kind, gate, up, out)
        narrow(gate, kept_gate)
        narrow(up, kept_up)


def gated_activation_kept(kind: str, kept_gate: Array, kept_up: Array, out: Array) -> None:
    """`gated_activation` of what `narrow` kept."""
    for name, array in (("kept_gate", kept_gate), ("kept_up", kept_up)):
        require_shape("gated_activation_kept", name, array, out.shape)
    arrays = [array.reshape(-1) for array in (kept_gate, kept_up, out)]
    activate_kept(kind_number(kind), arrays[0], arrays[1], arrays[2], chunks_for(out.size))
    kept_gate, kept_up, out = (array[out.size // WIDTH * WIDTH :] for array in arrays)
    if out.size:
        gated_activation(kind, _widened(kept_gate), _widened(kept_up), out)


def gated_activation_kept_backward(
    kind: str, dout: Array, kept_gate: Array, kept_up: Array, dgate: Array, dup: Array
) -> None:
    """`gated_activation_backward` of what `narrow` kept."""
    for name, array in (("kept_gate", kept_gate), ("kept_up", kept_up), ("dgate", dgate), ("dup", dup)):
        require_shape("gated_activation_kept_backward", name, array, dout.shape)
    arrays = [array.reshape(-1) for array in (dout, kept_gate, kept_up, dgate, dup)]
    activate_kept_gradient(
        kind_number(kind), arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], chunks_for(dout.size)
    )
    dout, kept_gate, kept_up, dgate, dup = (array[dout.size // WIDTH * WIDTH :] for array in arrays)
    if dout.size:
        gated_activation_backward(kind, dout, _widened(kept_gate), _widened(kept_up), dgate, dup)


def _widened(kept: Array) -> Array:
    out = np.empty(kept.shape, np.float32)
    widen(kept, out)
    return out
