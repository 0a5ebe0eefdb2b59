"""What the drivers of `_project_drivers` are made of: converting and packing at addresses."""

from __future__ import annotations

from typing import Any

from numba import njit

from ._rows_kinds import TILE_PAIR
from ._simd_memory import call, peek, poke
from ._simd_rows import ROWS

STEP = 32
"""Steps along the depth are packed in multiples of this."""

# Columns of the table of jobs: the fields of `_project.Job`.
(
    JOB_ROWS,
    ROW_BYTES,
    BLOCK_VALUES,
    BLOCK_BYTES,
    UNPACK,
    DECODE,
    DATA,
    TASKS,
    OUT,
    RANK,
    A,
    B,
    PACKED,
    PACKED_STRIDE,
    HIDDEN,
    LEFT,
    LEFT_STRIDE,
    LOW,
    LOW_STRIDE,
    TURNED,
    TURNED_HIDDEN,
    DA,
    DB,
) = range(23)


@njit(nogil=True, cache=True)
def convert_blocks(
    convert: Any, x: Any, x_stride: Any, tokens: Any, count: Any, a: Any, a_stride: Any, block: Any
) -> None:
    for t in range(0, tokens, block):
        part = min(block, tokens - t)
        call(convert, x + 4 * t * x_stride, x_stride, part, count, a + 4 * t * a_stride, a_stride)


@njit(nogil=True, cache=True)
def scale_floats(source: Any, target: Any, count: Any, factor: Any) -> None:
    for i in range(count):
        poke(target + 4 * i, factor * peek(source + 4 * i))


@njit(nogil=True, cache=True)
def convert_turned(
    convert: Any,
    x: Any,
    tokens: Any,
    rank: Any,
    a: Any,
    a_stride: Any,
    a_step: Any,
    first: Any,
    block: Any,
    spare: Any,
) -> None:
    """Convert xᵀ (rank, tokens) of x (tokens, rank), as steps [first, first + tokens) along the depth."""
    for i in range(tokens):
        for j in range(rank):
            poke(spare + 4 * (j * STEP + i), peek(x + 4 * (i * rank + j)))
    place = a + 4 * (first * a_step // 2)
    convert_blocks(convert, spare, STEP, rank, tokens, place, a_stride, block)


@njit(nogil=True, cache=True)
def pack_floats_as_columns(
    copy: Any,
    pack: Any,
    source: Any,
    rows: Any,
    columns: Any,
    width: Any,
    per_float: Any,
    target: Any,
    sub_stride: Any,
    spare: Any,
    piece: Any,
) -> None:
    """Pack float32 rows as the columns of a right operand."""
    for n in range(0, rows, width):
        count = min(width, rows - n)
        for p in range(0, columns, piece):
            steps = min(piece, columns - p)
            call(copy, source + 4 * (n * columns + p), 4 * columns, count, steps, spare, piece)
            place = target + 4 * (n // width * sub_stride + p * width // per_float)
            call(pack, spare, piece, count, steps, place, sub_stride)


@njit(nogil=True, cache=True)
def pack_factors(
    copy: Any,
    pack: Any,
    jobs: Any,
    ranks: Any,
    columns: Any,
    width: Any,
    per_float: Any,
    target: Any,
    sub_stride: Any,
    spare: Any,
    piece: Any,
) -> None:
    """Pack the rows of all a, `ranks` together, as the columns of one right operand."""
    for first in range(0, ranks, width):
        last = min(ranks, first + width)
        for p in range(0, columns, piece):
            steps = min(piece, columns - p)
            row = 0
            for j in range(jobs.shape[0]):
                start, stop = max(first, row), min(last, row + jobs[j, RANK])
                if start < stop:
                    source = jobs[j, A] + 4 * ((start - row) * columns + p)
                    place = spare + 4 * (start - first) * piece
                    call(copy, source, 4 * columns, stop - start, steps, place, piece)
                row += jobs[j, RANK]
            place = target + 4 * (first // width * sub_stride + p * width // per_float)
            call(pack, spare, piece, last - first, steps, place, sub_stride)


@njit(nogil=True, cache=True)
def pack_floats_as_rows(
    copy: Any,
    pack: Any,
    source: Any,
    stride: Any,
    rows: Any,
    columns: Any,
    width: Any,
    per_float: Any,
    target: Any,
    sub_stride: Any,
    spare: Any,
) -> None:
    """Pack float32 rows, `stride` elements apart, as the rows of a right operand."""
    padded = (columns + width - 1) // width * width
    for p in range(0, rows, STEP):
        steps = min(STEP, rows - p)
        place = target + 4 * (p * width // per_float)
        if steps == STEP and padded == columns:
            call(pack, source + 4 * p * stride, stride, steps, columns, place, sub_stride)
            continue
        # Packing fills up with zeros, in what it reads too.
        call(copy, source + 4 * p * stride, 4 * stride, steps, columns, spare, padded)
        call(pack, spare, padded, steps, columns, place, sub_stride)


@njit(nogil=True, cache=True)
def unpack_panel(
    pack: Any,
    plan: Any,
    jobs: Any,
    j: Any,
    n0: Any,
    count: Any,
    k0: Any,
    k_count: Any,
    target: Any,
    spare: Any,
) -> None:
    """Rows [n0, n0 + count) of a weight as the columns of a right operand, steps [k0, k0 + k_count)."""
    width, per_float, sub_stride, piece = plan[2], plan[3], plan[13], plan[21]
    row_bytes, block_values, block_bytes = jobs[j, ROW_BYTES], jobs[j, BLOCK_VALUES], jobs[j, BLOCK_BYTES]
    unpack, decode, data = jobs[j, UNPACK], jobs[j, DECODE], jobs[j, DATA]
    for n in range(0, count, width):
        part = min(width, count - n)
        start = data + (n0 + n) * row_bytes + k0 // block_values * block_bytes
        place = target + 4 * (n // width * sub_stride)
        if unpack and part == width:
            for half in range(0, width, ROWS):
                tiles = place + half // ROWS * TILE_PAIR
                call(unpack, start + half * row_bytes, row_bytes, k_count // block_values, 0, 0, tiles)
            continue
        for p in range(0, k_count, piece):
            steps = min(piece, k_count - p)
            source = start + p // block_values * block_bytes
            call(decode, source, row_bytes, part, steps // block_values, spare, piece)
            call(pack, spare, piece, part, steps, place + 4 * (p * width // per_float), sub_stride)


@njit(nogil=True, cache=True)
def job_of(jobs: Any, task: Any) -> Any:
    """Job that a task belongs to, and its number among the job's."""
    j = 0
    while task >= jobs[j, TASKS]:
        task -= jobs[j, TASKS]
        j += 1
    return j, task
