"""The loops of products over groups of sixteen weight rows, compiled once for all formats.

A group's rows are unpacked once for a chunk of tokens. Groups at the end overlap where the rows are not a
multiple of sixteen: their common rows are computed twice, to the same bits.

Kernels are called by address:

    convert(x, x_stride, tokens, count, records, bias)              see `_rows_activations`
    group(unpack, source, stride, blocks, records, tokens, out, spare)
    unpack                                                          see `_rows_legacy`

`group` computes float32 lanes, one a token, at `out`.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from numba import njit, prange

from ._rows_kinds import TILE_BYTES, TILE_PAIR
from ._simd_memory import address, call, poke, take_ticket
from ._simd_rows import ROWS
from ._simd_tiles import (
    copy_floats,
    tile_store,
    tile_zero,
    tiles_configure,
    tiles_release,
)

RUN = 4
"""Groups whose results are written to the output together."""
SPARE_FLOATS = 2 * TILE_PAIR // 4
"""float32 elements of scratch that `group` may use beside its result."""


@attrs.frozen(kw_only=True)
class RowsPlan:
    """Sizes of one product, in the order in which the drivers read them."""

    tokens: int
    rows: int
    """Rows N of the stored weight, at least 16."""
    columns: int
    row_bytes: int
    blocks: int
    """Blocks of the format in a row."""
    chunk: int
    """Tokens for which a group of rows is unpacked once."""
    record_floats: int
    """float32 elements that the records of a token take."""
    task_groups: int
    """Groups of 16 rows that are a task."""
    threads: int
    bias: int
    lanes: int
    """Tokens of a chunk with what `group` adds to make them whole tiles."""
    thread_floats: int
    """float32 elements of scratch a thread: spare room, then results."""
    records_at: int
    """float32 element of the scratch where the records begin; before it lies that of the threads."""

    def packed(self) -> npt.NDArray[np.int64]:
        """As the array that the drivers take."""
        return np.array(attrs.astuple(self), np.int64)


def sum_group(
    unpack: Any, source: Any, stride: Any, blocks: Any, records: Any, tokens: Any, out: Any, spare: Any
) -> None:
    """`group` for kinds that add to float32 lanes in memory."""
    for i in range(ROWS * tokens):
        poke(out + 4 * i, np.float32(0.0))
    call(unpack, source, stride, blocks, records, tokens, out)


def tile_group(
    unpack: Any, source: Any, stride: Any, blocks: Any, records: Any, tokens: Any, out: Any, spare: Any
) -> None:
    """`group` for the kind AMX: up to 64 tokens."""
    tiles = (tokens + ROWS - 1) // ROWS
    tiles_configure()
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)
    call(unpack, source, stride, blocks, records, tiles, spare)
    tile_store(0, out, 64)
    if tiles > 1:
        tile_store(1, out + TILE_BYTES, 64)
    if tiles > 2:
        tile_store(2, out + 2 * TILE_BYTES, 64)
    if tiles > 3:
        tile_store(3, out + 3 * TILE_BYTES, 64)
    tiles_release()


@njit(nogil=True, cache=True)
def _convert(convert: Any, plan: Any, x: Any, scratch: Any, t0: Any) -> None:
    columns = plan[2]
    count = min(plan[5], plan[0] - t0)
    place = address(scratch, plan[12] + t0 * plan[6])
    call(convert, address(x, t0 * columns), columns, count, columns, place, plan[9])


@njit(nogil=True, cache=True)
def _multiply(
    group: Any,
    unpack: Any,
    plan: Any,
    data: Any,
    out: Any,
    scratch: Any,
    t0: Any,
    first: Any,
    stop: Any,
    thread: Any,
) -> None:
    """Groups [first, stop) for the chunk of tokens from t0.

    Results are put down some groups at a time: rows of `out` may be a large power of two apart, and
    would compete for the same few cache sets and pages with each group.
    """
    rows, row_bytes, blocks = plan[1], plan[3], plan[4]
    count = min(plan[5], plan[0] - t0)
    size = 4 * ROWS * plan[10]
    spare = address(scratch, thread * plan[11])
    sums = spare + 4 * SPARE_FLOATS
    records = address(scratch, plan[12] + t0 * plan[6])
    for run in range(first, stop, RUN):
        groups = min(RUN, stop - run)
        for g in range(groups):
            n = min(ROWS * (run + g), rows - ROWS)
            call(
                group,
                unpack,
                data + n * row_bytes,
                row_bytes,
                blocks,
                records,
                count,
                sums + g * size,
                spare,
            )
        for t in range(count):
            for g in range(groups):
                n = min(ROWS * (run + g), rows - ROWS)
                copy_floats(ROWS, sums + g * size + 4 * t * ROWS, address(out, (t0 + t) * rows + n))


@njit(nogil=True, cache=True)
def rows_serial(
    convert: Any, group: Any, unpack: Any, plan: Any, data: Any, x: Any, out: Any, scratch: Any
) -> None:
    """out (tokens, rows) = x (tokens, columns) · Wᵀ on the calling thread; `data` is an address."""
    groups = (plan[1] + ROWS - 1) // ROWS
    for t0 in range(0, plan[0], plan[5]):
        _convert(convert, plan, x, scratch, t0)
        _multiply(group, unpack, plan, data, out, scratch, t0, 0, groups, 0)


@njit(nogil=True, cache=True, parallel=True)
def rows_parallel(
    convert: Any, group: Any, unpack: Any, plan: Any, data: Any, x: Any, out: Any, scratch: Any, counter: Any
) -> None:
    """As `rows_serial`; a task is some groups of rows for a chunk of tokens."""
    chunk, task_groups, threads = plan[5], plan[7], plan[8]
    groups = (plan[1] + ROWS - 1) // ROWS
    chunks = (plan[0] + chunk - 1) // chunk
    tasks = (groups + task_groups - 1) // task_groups
    if chunks == 1:
        _convert(convert, plan, x, scratch, 0)
    else:
        counter[0] = 0
        for _ in prange(threads):
            t = take_ticket(counter)
            while t < chunks:
                _convert(convert, plan, x, scratch, t * chunk)
                t = take_ticket(counter)
    counter[0] = 0
    for thread in prange(threads):
        task = take_ticket(counter)
        while task < tasks * chunks:
            first = task % tasks * task_groups
            stop = min(first + task_groups, groups)
            t0 = task // tasks * chunk
            _multiply(group, unpack, plan, data, out, scratch, t0, first, stop, thread)
            task = take_ticket(counter)
