"""Low-rank adapters of the `cpu` backend: products with one side of 1 to a few hundred.

Three forms of product, each with one order of summation per element:

- `project_rows`: (T, r) = X (T, K) · Rᵀ, R (r, K): 16 partial sums over k, then their tree;
- `expand_rows`: (T, N) += H (T, r) · R (r, N): a chain over r;
- `reduce_rows`: (r, N) += Hᵀ · X, H (T, r), X (T, N): a chain over T.

Source: Hu et al. 2021, equation 3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from ._math_common import F32, IN1, INT, NONE, OUT1, PARALLEL, SERIAL, Array, chunks_for, require_shape
from ._math_lanes import fill_lanes, load_lanes, load_some, multiply_add, sum_lanes
from ._math_tiles import TILE_COLUMNS, TILE_ROWS, TILE_VECTORS, tile_product
from ._simd import WIDTH

ZERO = np.float32(0.0)
COLUMN_BLOCK = 64
"""Columns of a task of `reduce_rows`."""
DEPTH_BLOCK = 256
"""Rows that a task of `reduce_rows` adds before it turns to its next rows of the result."""


@njit(**SERIAL)
def dot_four(x: Any, x_at: Any, r: Any, r_at: Any, size: Any, out: Any, out_at: Any) -> None:
    """out[0..3] = dots of one vector of x with four consecutive rows of r."""
    whole = size // WIDTH * WIDTH
    sum0, sum1, sum2, sum3 = fill_lanes(ZERO), fill_lanes(ZERO), fill_lanes(ZERO), fill_lanes(ZERO)
    for k in range(0, whole, WIDTH):
        value = load_lanes(x, x_at + k)
        at = r_at + k
        sum0 = multiply_add(value, load_lanes(r, at), sum0)
        sum1 = multiply_add(value, load_lanes(r, at + size), sum1)
        sum2 = multiply_add(value, load_lanes(r, at + 2 * size), sum2)
        sum3 = multiply_add(value, load_lanes(r, at + 3 * size), sum3)
    rest = size - whole
    if rest:
        value = load_some(x, x_at + whole, rest, ZERO)
        at = r_at + whole
        sum0 = multiply_add(value, load_some(r, at, rest, ZERO), sum0)
        sum1 = multiply_add(value, load_some(r, at + size, rest, ZERO), sum1)
        sum2 = multiply_add(value, load_some(r, at + 2 * size, rest, ZERO), sum2)
        sum3 = multiply_add(value, load_some(r, at + 3 * size, rest, ZERO), sum3)
    out[out_at] = sum_lanes(sum0)
    out[out_at + 1] = sum_lanes(sum1)
    out[out_at + 2] = sum_lanes(sum2)
    out[out_at + 3] = sum_lanes(sum3)


@njit(**SERIAL)
def dot_one(x: Any, x_at: Any, r: Any, r_at: Any, size: Any) -> Any:
    """The dot of one vector of x with one row of r, in the order of `dot_four`."""
    whole = size // WIDTH * WIDTH
    total = fill_lanes(ZERO)
    for k in range(0, whole, WIDTH):
        total = multiply_add(load_lanes(x, x_at + k), load_lanes(r, r_at + k), total)
    rest = size - whole
    if rest:
        value = load_some(x, x_at + whole, rest, ZERO)
        total = multiply_add(value, load_some(r, r_at + whole, rest, ZERO), total)
    return sum_lanes(total)


@njit(NONE(IN1, IN1, OUT1, INT, INT, INT, INT), **PARALLEL)
def project_rows(x: Any, r: Any, out: Any, rows: Any, size: Any, rank: Any, chunks: Any) -> None:
    """out (rows, rank) = x (rows, size) · rᵀ, r (rank, size)."""
    for chunk in prange(chunks):
        for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
            at = np.int64(row)
            for j in range(0, rank // 4 * 4, 4):
                dot_four(x, at * size, r, j * size, size, out, at * rank + j)
            for j in range(rank // 4 * 4, rank):
                out[at * rank + j] = dot_one(x, at * size, r, j * size, size)


@njit(NONE(IN1, INT, INT, INT, IN1, INT, INT, OUT1, INT, INT, INT, INT, INT), **SERIAL)
def add_product(
    a: Any,
    a_at: Any,
    a_row: Any,
    a_step: Any,
    b: Any,
    b_at: Any,
    b_step: Any,
    c: Any,
    c_at: Any,
    c_row: Any,
    rows: Any,
    columns: Any,
    depth: Any,
) -> None:
    """C (rows, columns) += A · B, flat indices as in `tile_product`; sizes need not fit tiles."""
    tiled = rows // TILE_ROWS * TILE_ROWS
    wide = columns // TILE_COLUMNS * TILE_COLUMNS
    whole = columns // WIDTH * WIDTH
    for j in range(0, wide, TILE_COLUMNS):
        for i in range(0, tiled, TILE_ROWS):
            left, place = a_at + i * a_row, c_at + i * c_row + j
            tile_product(
                TILE_ROWS,
                TILE_VECTORS,
                0,
                a,
                left,
                a_row,
                a_step,
                b,
                b_at + j,
                b_step,
                c,
                place,
                c_row,
                depth,
            )
    for j in range(wide, whole, WIDTH):
        for i in range(0, tiled, TILE_ROWS):
            left, place = a_at + i * a_row, c_at + i * c_row + j
            tile_product(TILE_ROWS, 1, 0, a, left, a_row, a_step, b, b_at + j, b_step, c, place, c_row, depth)
    for i in range(tiled, rows):
        for j in range(0, whole, WIDTH):
            left, place = a_at + i * a_row, c_at + i * c_row + j
            tile_product(1, 1, 0, a, left, a_row, a_step, b, b_at + j, b_step, c, place, c_row, depth)
    for i in range(rows):
        for j in range(whole, columns):
            total = c[c_at + i * c_row + j]
            for k in range(depth):
                total += a[a_at + i * a_row + k * a_step] * b[b_at + k * b_step + j]
            c[c_at + i * c_row + j] = total


@njit(NONE(IN1, IN1, OUT1, INT, INT, INT, INT), **PARALLEL)
def expand_rows(h: Any, r: Any, out: Any, rows: Any, rank: Any, size: Any, chunks: Any) -> None:
    """out (rows, size) += h (rows, rank) · r (rank, size)."""
    for chunk in prange(chunks):
        first = np.int64(rows * chunk // chunks)
        last = np.int64(rows * (chunk + 1) // chunks)
        # A few rows at a time: what is added to stays in the cache.
        for row in range(first, last, TILE_ROWS):
            count = min(TILE_ROWS, last - row)
            add_product(h, row * rank, rank, 1, r, 0, size, out, row * size, size, count, size, rank)


@njit(NONE(IN1, IN1, OUT1, INT, INT, INT, INT), **PARALLEL)
def reduce_rows(h: Any, x: Any, out: Any, rows: Any, rank: Any, size: Any, chunks: Any) -> None:
    """out (rank, size) += hᵀ · x, h (rows, rank), x (rows, size); a task is a block of columns."""
    blocks = (size + COLUMN_BLOCK - 1) // COLUMN_BLOCK
    for chunk in prange(chunks):
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            column = np.int64(block * COLUMN_BLOCK)
            width = min(COLUMN_BLOCK, size - column)
            for row in range(0, rows, DEPTH_BLOCK):
                depth = min(DEPTH_BLOCK, rows - row)
                add_product(
                    h,
                    row * rank,
                    1,
                    rank,
                    x,
                    row * size + column,
                    size,
                    out,
                    column,
                    size,
                    rank,
                    width,
                    depth,
                )


@njit(NONE(IN1, F32, OUT1, INT, INT), **SERIAL)
def transpose_scaled(b: Any, scale: Any, target: Any, rows: Any, rank: Any) -> None:
    """target (rank, rows) = scale · bᵀ, b (rows, rank)."""
    for i in range(rows):
        for j in range(rank):
            target[j * rows + i] = scale * b[i * rank + j]


def lora_forward(x: Array, a: Array, b: Array, scale: float, hidden: Array, out: Array) -> None:
    """hidden (T, r) = x (T, K) · aᵀ; adds scale · hidden · bᵀ to out (T, N), for a (r, K), b (N, r)."""
    rows, size = x.shape
    outputs, rank = b.shape
    require_shape("lora_forward", "a", a, (rank, size))
    require_shape("lora_forward", "hidden", hidden, (rows, rank))
    require_shape("lora_forward", "out", out, (rows, outputs))
    turned = np.empty(rank * outputs, np.float32)
    flat = hidden.reshape(-1)
    transpose_scaled(b.reshape(-1), scale, turned, outputs, rank)
    project_rows(x.reshape(-1), a.reshape(-1), flat, rows, size, rank, chunks_for(x.size * rank))
    expand_rows(flat, turned, out.reshape(-1), rows, rank, outputs, chunks_for(out.size * rank))


def lora_backward(
    dout: Array,
    x: Array,
    hidden: Array,
    a: Array,
    b: Array,
    scale: float,
    da: Array,
    db: Array,
    dx: Array,
) -> None:
    """Add the gradients of `lora_forward` to da (r, K), db (N, r) and dx (T, K), for dout (T, N)."""
    op = "lora_backward"
    rows, size = x.shape
    outputs, rank = b.shape
    for name, array, shape in (
        ("dout", dout, (rows, outputs)),
        ("hidden", hidden, (rows, rank)),
        ("a", a, (rank, size)),
        ("da", da, (rank, size)),
        ("db", db, (outputs, rank)),
        ("dx", dx, (rows, size)),
    ):
        require_shape(op, name, array, shape)
    turned = np.empty((rank, outputs), np.float32)
    dhidden = np.empty(rows * rank, np.float32)
    flat_a, flat_x, flat_dout = a.reshape(-1), x.reshape(-1), dout.reshape(-1)
    chunks = chunks_for(x.size * rank)
    transpose_scaled(b.reshape(-1), scale, turned.reshape(-1), outputs, rank)
    project_rows(flat_dout, turned.reshape(-1), dhidden, rows, outputs, rank, chunks)
    expand_rows(dhidden, flat_a, dx.reshape(-1), rows, rank, size, chunks)
    reduce_rows(dhidden, flat_x, da.reshape(-1), rows, rank, size, chunks)
    turned.fill(0.0)
    reduce_rows(hidden.reshape(-1), flat_dout, turned.reshape(-1), rows, rank, outputs, chunks)
    turned *= np.float32(scale)
    db += turned.T
