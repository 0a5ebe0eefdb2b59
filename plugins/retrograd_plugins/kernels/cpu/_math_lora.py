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

from ._math_calls import compiled_address, indirect_call
from ._math_common import F32, IN1, INT, NONE, OUT1, PARALLEL, SERIAL, Array, chunks_for, require_shape
from ._math_tiles import TILE_COLUMNS, TILE_ROWS, TILE_VECTORS, dots, tile_product
from ._simd import WIDTH

COLUMN_BLOCK = 64
"""Columns of a task of `expand_rows` and `reduce_rows`."""
DEPTH_BLOCK = 256
"""Rows that a task of `reduce_rows` adds before it turns to its next rows of the result."""


@njit(NONE(IN1, IN1, OUT1, INT, INT, INT, INT), **PARALLEL)
def project_rows(x: Any, r: Any, out: Any, rows: Any, size: Any, rank: Any, chunks: Any) -> None:
    """out (rows, rank) = x (rows, size) · rᵀ, r (rank, size)."""
    fours = rank // 4 * 4
    for chunk in prange(chunks):
        first = np.int64(rows * chunk // chunks)
        last = np.int64(rows * (chunk + 1) // chunks)
        whole = first + (last - first) // 4 * 4
        for row in range(first, whole, 4):
            for j in range(0, fours, 4):
                dots(4, 4, x, row * size, size, r, j * size, size, out, row * rank + j, rank, size)
            for j in range(fours, rank):
                dots(4, 1, x, row * size, size, r, j * size, size, out, row * rank + j, rank, size)
        for row in range(whole, last):
            for j in range(rank):
                dots(1, 1, x, row * size, size, r, j * size, size, out, row * rank + j, rank, size)


ADD_PRODUCT = NONE(IN1, INT, INT, INT, IN1, INT, INT, OUT1, INT, INT, INT, INT, INT)


@njit(ADD_PRODUCT, **SERIAL)
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


call_add_product = indirect_call(ADD_PRODUCT)
ADD_PRODUCT_ADDRESS = compiled_address(add_product, ADD_PRODUCT)


@njit(NONE(INT, IN1, IN1, INT, INT, F32, OUT1, INT, INT, INT, OUT1, INT), **PARALLEL)
def expand_rows(
    kernel: Any,
    h: Any,
    r: Any,
    r_step: Any,
    r_column: Any,
    scale: Any,
    out: Any,
    rows: Any,
    rank: Any,
    size: Any,
    work: Any,
    chunks: Any,
) -> None:
    """out (rows, size) += scale · h (rows, rank) · R, R[k, n] at r[k · r_step + n · r_column].

    A task is a block of columns of R, which is copied to `work` (chunks, rank, COLUMN_BLOCK).
    """
    blocks = (size + COLUMN_BLOCK - 1) // COLUMN_BLOCK
    for chunk in prange(chunks):
        panel = np.int64(chunk * rank * COLUMN_BLOCK)
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            column = np.int64(block * COLUMN_BLOCK)
            width = min(COLUMN_BLOCK, size - column)
            for n in range(width):
                for k in range(rank):
                    value = scale * r[k * r_step + (column + n) * r_column]
                    work[panel + k * COLUMN_BLOCK + n] = value
            call_add_product(
                kernel, h, 0, rank, 1, work, panel, COLUMN_BLOCK, out, column, size, rows, width, rank
            )


@njit(NONE(INT, IN1, IN1, OUT1, INT, INT, INT, INT), **PARALLEL)
def reduce_rows(kernel: Any, h: Any, x: Any, out: Any, rows: Any, rank: Any, size: Any, chunks: Any) -> None:
    """out (rank, size) += hᵀ · x, h (rows, rank), x (rows, size); a task is a block of columns."""
    blocks = (size + COLUMN_BLOCK - 1) // COLUMN_BLOCK
    for chunk in prange(chunks):
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            column = np.int64(block * COLUMN_BLOCK)
            width = min(COLUMN_BLOCK, size - column)
            for row in range(0, rows, DEPTH_BLOCK):
                depth = min(DEPTH_BLOCK, rows - row)
                call_add_product(
                    kernel,
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
    for first in range(0, rows, WIDTH):
        last = min(rows, first + WIDTH)
        for j in range(rank):
            for i in range(first, last):
                target[j * rows + i] = scale * b[i * rank + j]


def lora_forward(x: Array, a: Array, b: Array, scale: float, hidden: Array, out: Array) -> None:
    """hidden (T, r) = x (T, K) · aᵀ; adds scale · hidden · bᵀ to out (T, N), for a (r, K), b (N, r)."""
    rows, size = x.shape
    outputs, rank = b.shape
    require_shape("lora_forward", "a", a, (rank, size))
    require_shape("lora_forward", "hidden", hidden, (rows, rank))
    require_shape("lora_forward", "out", out, (rows, outputs))
    flat = hidden.reshape(-1)
    project_rows(x.reshape(-1), a.reshape(-1), flat, rows, size, rank, chunks_for(x.size * rank))
    chunks = chunks_for(out.size * rank)
    work = np.empty(chunks * rank * COLUMN_BLOCK, np.float32)
    expand_rows(
        ADD_PRODUCT_ADDRESS,
        flat,
        b.reshape(-1),
        1,
        rank,
        scale,
        out.reshape(-1),
        rows,
        rank,
        outputs,
        work,
        chunks,
    )


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
    work = np.empty(chunks * rank * COLUMN_BLOCK, np.float32)
    expand_rows(
        ADD_PRODUCT_ADDRESS, dhidden, flat_a, size, 1, 1.0, dx.reshape(-1), rows, rank, size, work, chunks
    )
    reduce_rows(ADD_PRODUCT_ADDRESS, dhidden, flat_x, da.reshape(-1), rows, rank, size, chunks)
    turned.fill(0.0)
    reduce_rows(
        ADD_PRODUCT_ADDRESS, hidden.reshape(-1), flat_dout, turned.reshape(-1), rows, rank, outputs, chunks
    )
    turned *= np.float32(scale)
    db += turned.T
