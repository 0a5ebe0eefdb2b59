"""The loops of `matmul_few` over groups of sixteen weight rows, compiled once for all formats.

A group's rows are unpacked once for a chunk of tokens. Groups at the end overlap where the rows are not a
multiple of sixteen: their common rows are computed twice, to the same bits.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from numba import njit, prange

from ._rows_sinks import BLOCK, FLOAT_BLOCK, FLOAT_RECORD, RECORD, copy_block, round_block
from ._simd_memory import address, call, poke, take_ticket
from ._simd_rows import ROWS
from ._simd_tiles import copy_floats

RUN = 4
"""Groups whose results are written to the output together."""


@attrs.frozen(kw_only=True)
class FewPlan:
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
    records_at: int
    """float32 element of the scratch where the records begin; before it lie the sums of each thread."""

    def packed(self) -> npt.NDArray[np.int64]:
        """As the array that the drivers take."""
        return np.array(attrs.astuple(self), np.int64)


def round_tokens(x: Any, x_stride: Any, tokens: Any, count: Any, records: Any, bias: Any) -> None:
    """Records of 32 values rounded to 8 bits, (block, token), of `tokens` rows of x."""
    for b in range(count // BLOCK):
        for t in range(tokens):
            round_block(x + 4 * (t * x_stride + BLOCK * b), records + RECORD * (b * tokens + t), bias)


def copy_tokens(x: Any, x_stride: Any, tokens: Any, count: Any, records: Any, bias: Any) -> None:
    """Records of 8 float32, (block, token), of `tokens` rows of x; `bias` is not used."""
    for b in range(count // FLOAT_BLOCK):
        for t in range(tokens):
            copy_block(x + 4 * (t * x_stride + FLOAT_BLOCK * b), records + FLOAT_RECORD * (b * tokens + t))


@njit(nogil=True, cache=True)
def _convert(convert: Any, plan: Any, x: Any, scratch: Any, t0: Any) -> None:
    columns = plan[2]
    count = min(plan[5], plan[0] - t0)
    place = address(scratch, plan[10] + t0 * plan[6])
    call(convert, address(x, t0 * columns), columns, count, columns, place, plan[9])


@njit(nogil=True, cache=True)
def _multiply(
    unpack: Any, plan: Any, data: Any, out: Any, scratch: Any, t0: Any, first: Any, stop: Any, thread: Any
) -> None:
    """Groups [first, stop) for the chunk of tokens from t0.

    Results are put down some groups at a time: rows of `out` may be a large power of two apart, and
    would compete for the same few cache sets and pages with each group.
    """
    rows, row_bytes, blocks, chunk = plan[1], plan[3], plan[4], plan[5]
    count = min(chunk, plan[0] - t0)
    size = ROWS * count
    sums = address(scratch, thread * chunk * ROWS * RUN)
    records = address(scratch, plan[10] + t0 * plan[6])
    for run in range(first, stop, RUN):
        groups = min(RUN, stop - run)
        for i in range(groups * size):
            poke(sums + 4 * i, np.float32(0.0))
        for g in range(groups):
            n = min(ROWS * (run + g), rows - ROWS)
            call(unpack, data + n * row_bytes, row_bytes, blocks, records, count, sums + 4 * g * size)
        for t in range(count):
            for g in range(groups):
                n = min(ROWS * (run + g), rows - ROWS)
                copy_floats(ROWS, sums + 4 * (g * size + t * ROWS), address(out, (t0 + t) * rows + n))


@njit(nogil=True, cache=True)
def few_serial(convert: Any, unpack: Any, plan: Any, data: Any, x: Any, out: Any, scratch: Any) -> None:
    """out (tokens, rows) = x (tokens, columns) · Wᵀ on the calling thread; `data` is an address."""
    groups = (plan[1] + ROWS - 1) // ROWS
    for t0 in range(0, plan[0], plan[5]):
        _convert(convert, plan, x, scratch, t0)
        _multiply(unpack, plan, data, out, scratch, t0, 0, groups, 0)


@njit(nogil=True, cache=True, parallel=True)
def few_parallel(
    convert: Any, unpack: Any, plan: Any, data: Any, x: Any, out: Any, scratch: Any, counter: Any
) -> None:
    """As `few_serial`; a task is some groups of rows for a chunk of tokens."""
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
            _multiply(unpack, plan, data, out, scratch, t0, first, stop, thread)
            task = take_ticket(counter)
