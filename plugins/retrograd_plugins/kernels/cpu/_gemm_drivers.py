"""The parallel loops over panels, compiled once for all formats and instruction sets.

Tasks are handed out one at a time, so a thread that was held up delays nobody; which thread takes a
task changes nothing in the result. The loops are written with `address` and `call`, so they run as
Python too.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from numba import njit, prange

from ._rows_kinds import TILE_PAIR
from ._simd_memory import address, call, take_ticket
from ._simd_rows import ROWS

TILE_FLOATS = TILE_PAIR // 4


@attrs.frozen(kw_only=True)
class Plan:
    """Sizes and layout of one product, in the order in which the drivers read them."""

    tokens: int
    rows: int
    """Rows N of the stored weight."""
    columns: int
    """Columns K of the stored weight."""
    row_bytes: int
    block_values: int
    block_bytes: int
    panel: int
    """Columns of the result that a task computes."""
    chunk: int
    """Tokens that a task computes."""
    depth: int
    """Steps of the sum for which a panel is packed at once."""
    piece: int
    """Steps that are decoded at once, so that they stay in the first cache."""
    width: int
    weights_per_float: int
    a_stride: int
    a_step: int
    token_block: int
    sub_stride: int
    """float32 elements of a packed sub-panel."""
    panel_offset: int
    spare_offset: int
    scratch_stride: int
    """float32 elements of scratch a thread."""
    threads: int
    unpacked: int = 0
    """1 if whole sub-panels are unpacked and packed in one go, 16 rows of the weight at a time."""
    first: int = 0
    """First row of the weight that this call reads (input gradients sum over rows)."""
    stop: int = 0
    accumulate: int = 0

    def packed(self) -> npt.NDArray[np.int64]:
        """As the array that the drivers take."""
        return np.array(attrs.astuple(self), np.int64)


@njit(nogil=True, cache=True)
def convert_serial(
    convert: Any,
    x: Any,
    x_start: Any,
    x_stride: Any,
    tokens: Any,
    count: Any,
    a: Any,
    a_stride: Any,
    block: Any,
) -> None:
    """Convert activations on the calling thread."""
    for t in range(0, tokens, block):
        call(
            convert,
            address(x, x_start + t * x_stride),
            x_stride,
            min(block, tokens - t),
            count,
            address(a, t * a_stride),
            a_stride,
        )


@njit(nogil=True, cache=True, parallel=True)
def convert_parallel(
    convert: Any,
    x: Any,
    x_start: Any,
    x_stride: Any,
    tokens: Any,
    count: Any,
    a: Any,
    a_stride: Any,
    block: Any,
    counter: Any,
    threads: Any,
) -> None:
    """Convert activations, a block of tokens a task."""
    counter[0] = 0
    for _ in prange(threads):
        t = take_ticket(counter) * block
        while t < tokens:
            call(
                convert,
                address(x, x_start + t * x_stride),
                x_stride,
                min(block, tokens - t),
                count,
                address(a, t * a_stride),
                a_stride,
            )
            t = take_ticket(counter) * block


@njit(nogil=True, cache=True, parallel=True)
def multiply_parallel(
    unpack: Any,
    decode: Any,
    pack: Any,
    multiply: Any,
    plan: Any,
    data: Any,
    a: Any,
    out: Any,
    scratch: Any,
    counter: Any,
) -> None:
    """out (tokens, rows) = activations · Wᵀ; a task is a panel of weight rows for a chunk of tokens."""
    tokens, rows, columns, row_bytes = plan[0], plan[1], plan[2], plan[3]
    block_values, block_bytes = plan[4], plan[5]
    panel, chunk, depth, piece, width = plan[6], plan[7], plan[8], plan[9], plan[10]
    weights_per_float, a_stride, a_step = plan[11], plan[12], plan[13]
    sub_stride, panel_offset, spare_offset, scratch_stride = plan[15], plan[16], plan[17], plan[18]
    threads, unpacked = plan[19], plan[20]
    panels = (rows + panel - 1) // panel
    tasks = panels * ((tokens + chunk - 1) // chunk)
    counter[0] = 0
    for thread in prange(threads):
        base = thread * scratch_stride
        task = take_ticket(counter)
        while task < tasks:
            n0 = task % panels * panel
            t0 = task // panels * chunk
            n_count = min(panel, rows - n0)
            for k0 in range(0, columns, depth):
                k_count = min(depth, columns - k0)
                for n in range(0, n_count, width):
                    w_count = min(width, n_count - n)
                    if unpacked and w_count == width:
                        for half in range(0, width, ROWS):
                            place = panel_offset + n // width * sub_stride + half // ROWS * TILE_FLOATS
                            call(
                                unpack,
                                address(data, (n0 + n + half) * row_bytes + k0 // block_values * block_bytes),
                                row_bytes,
                                k_count // block_values,
                                0,
                                0,
                                address(scratch, base + place),
                            )
                        continue
                    for p in range(0, k_count, piece):
                        p_count = min(piece, k_count - p)
                        call(
                            decode,
                            address(data, (n0 + n) * row_bytes + (k0 + p) // block_values * block_bytes),
                            row_bytes,
                            w_count,
                            p_count // block_values,
                            address(scratch, base),
                            piece,
                        )
                        place = panel_offset + n // width * sub_stride + p * width // weights_per_float
                        call(
                            pack,
                            address(scratch, base),
                            piece,
                            w_count,
                            p_count,
                            address(scratch, base + place),
                            sub_stride,
                        )
                call(
                    multiply,
                    address(a, t0 * a_stride + k0 * a_step // 2),
                    a_stride,
                    address(scratch, base + panel_offset),
                    sub_stride,
                    address(out, t0 * rows + n0),
                    rows,
                    min(chunk, tokens - t0),
                    n_count,
                    k_count,
                    1 if k0 > 0 else 0,
                    address(scratch, base + spare_offset),
                    address(a, 0),
                    0,
                    address(a, 0),
                    0,
                    0,
                )
            task = take_ticket(counter)


@njit(nogil=True, cache=True, parallel=True)
def multiply_gradient_parallel(
    decode: Any, pack: Any, multiply: Any, plan: Any, data: Any, a: Any, out: Any, scratch: Any, counter: Any
) -> None:
    """out (tokens, columns) = or += gradients · W[first:stop]; a task is a panel of weight columns."""
    tokens, columns, row_bytes = plan[0], plan[2], plan[3]
    block_values, block_bytes = plan[4], plan[5]
    panel, chunk, depth, piece, width = plan[6], plan[7], plan[8], plan[9], plan[10]
    weights_per_float, a_stride, a_step = plan[11], plan[12], plan[13]
    sub_stride, panel_offset, spare_offset, scratch_stride = plan[15], plan[16], plan[17], plan[18]
    threads, first, stop, accumulate = plan[19], plan[21], plan[22], plan[23]
    panels = (columns + panel - 1) // panel
    tasks = panels * ((tokens + chunk - 1) // chunk)
    counter[0] = 0
    for thread in prange(threads):
        base = thread * scratch_stride
        task = take_ticket(counter)
        while task < tasks:
            k0 = task % panels * panel
            t0 = task // panels * chunk
            k_count = min(panel, columns - k0)
            for n0 in range(first, stop, depth):
                n_count = min(depth, stop - n0)
                for p in range(0, n_count, piece):
                    p_count = min(piece, n_count - p)
                    call(
                        decode,
                        address(data, (n0 + p) * row_bytes + k0 // block_values * block_bytes),
                        row_bytes,
                        p_count,
                        k_count // block_values,
                        address(scratch, base),
                        panel,
                    )
                    call(
                        pack,
                        address(scratch, base),
                        panel,
                        p_count,
                        k_count,
                        address(scratch, base + panel_offset + p * width // weights_per_float),
                        sub_stride,
                    )
                call(
                    multiply,
                    address(a, t0 * a_stride + (n0 - first) * a_step // 2),
                    a_stride,
                    address(scratch, base + panel_offset),
                    sub_stride,
                    address(out, t0 * columns + k0),
                    columns,
                    min(chunk, tokens - t0),
                    k_count,
                    n_count,
                    1 if accumulate or n0 > first else 0,
                    address(scratch, base + spare_offset),
                    address(a, 0),
                    0,
                    address(a, 0),
                    0,
                    0,
                )
            task = take_ticket(counter)


@njit(nogil=True, cache=True)
def embed(
    decode: Any, ids: Any, data: Any, row_bytes: Any, blocks: Any, columns: Any, scale: Any, out: Any
) -> None:
    """out (tokens, columns) = scale · W[ids]."""
    for i in range(ids.shape[0]):
        start = i * columns
        call(
            decode, address(data, int(ids[i]) * row_bytes), row_bytes, 1, blocks, address(out, start), columns
        )
        for j in range(columns):
            out[start + j] *= scale
