"""Blocks that attention works on: panels of queries, keys and values, and what a query sees of them.

Keys are taken in blocks of `KEY_BLOCK` logical positions, aligned to position 0 of their sequence. So a
query meets the same blocks whether its keys lie in one piece, in a shared context and a piece of its
own, or in a cache filled chunk by chunk.

A *panel* is rows of `width` float32 in scratch memory, width being the head size rounded up to whole
lanes or tiles; columns beyond the head size hold zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types

from ._math_common import INT, SERIAL, WHOLE2
from ._math_lanes import (
    fill_lanes,
    load_lanes,
    load_some,
    multiply_add,
    store_lanes,
    store_some,
    sum_lanes,
)
from ._math_tiles import TILE_COLUMNS, TILE_ROWS, TILE_VECTORS, tile_product, transpose_square
from ._simd import WIDTH

KEY_BLOCK = 64
"""Keys of a block: a multiple of every tile's width."""
QUERY_ROWS = 192
"""Rows (queries times heads that share a key/value head) of a block of queries."""
ZERO = np.float32(0.0)
ONE = np.float32(1.0)


@njit(**SERIAL)
def round_up(count: Any, multiple: Any) -> Any:
    """The smallest multiple that is not below `count`."""
    return (count + multiple - 1) // multiple * multiple


@njit(**SERIAL)
def copy_row(source: Any, at: Any, size: Any, factor: Any, width: Any, panel: Any, place: Any) -> None:
    """Panel row = factor · source[at : at + size], filled up with zeros to `width`, whole lanes."""
    whole = size // WIDTH * WIDTH
    for d in range(0, whole, WIDTH):
        store_lanes(panel, place + d, load_lanes(source, at + d) * factor)
    if whole < size:
        store_lanes(panel, place + whole, load_some(source, at + whole, size - whole, ZERO) * factor)
    for d in range(round_up(size, WIDTH), width, WIDTH):
        store_lanes(panel, place + d, fill_lanes(ZERO))


@njit(**SERIAL)
def gather_queries(
    source: Any, first: Any, count: Any, group: Any, groups: Any, factor: Any, width: Any, panel: Any, at: Any
) -> None:
    """Panel of factor · source (T, H, D): row i·(H/G) + r is head r of the group, query first + i.

    Rows are filled up with zeros to a multiple of TILE_ROWS.
    """
    heads, size = source.shape[1], source.shape[2]
    ratio = heads // groups
    rows = count * ratio
    for i in range(rows):
        place = ((first + i // ratio) * heads + group * ratio + i % ratio) * size
        copy_row(source, place, size, factor, width, panel, at + i * width)
    for i in range(rows * width, round_up(rows, TILE_ROWS) * width):
        panel[at + i] = ZERO


@njit(**SERIAL)
def gather_rows(source: Any, first: Any, count: Any, group: Any, width: Any, panel: Any, at: Any) -> None:
    """Panel of rows [first, first + count) of one head of source (M, G, D)."""
    groups, size = source.shape[1], source.shape[2]
    for j in range(count):
        copy_row(source, ((first + j) * groups + group) * size, size, ONE, width, panel, at + j * width)


@njit(**SERIAL)
def gather_keys(
    source: Any, segment: Any, position: Any, count: Any, group: Any, width: Any, panel: Any, at: Any
) -> None:
    """Panel of `count` rows of source (M, G, D), from a logical position of the segment on."""
    context = segment[3]
    shared = min(max(context - position, 0), count)
    gather_rows(source, segment[2] + position, shared, group, width, panel, at)
    own = segment[4] + position + shared - context
    gather_rows(source, own, count - shared, group, width, panel, at + shared * width)


@njit(**SERIAL)
def clear_row(work: Any, at: Any, size: Any) -> None:
    """Zero `size` elements, whole lanes."""
    for j in range(0, size, WIDTH):
        store_lanes(work, at + j, fill_lanes(ZERO))


@njit(**SERIAL)
def scale_row(work: Any, at: Any, size: Any, factor: Any) -> None:
    """Multiply `size` elements, whole lanes."""
    for j in range(0, size, WIDTH):
        store_lanes(work, at + j, load_lanes(work, at + j) * factor)


@njit(**SERIAL)
def write_row(work: Any, at: Any, size: Any, factor: Any, target: Any, place: Any) -> None:
    """target[place : place + size] = factor · panel row."""
    whole = size // WIDTH * WIDTH
    for d in range(0, whole, WIDTH):
        store_lanes(target, place + d, load_lanes(work, at + d) * factor)
    if whole < size:
        store_some(target, place + whole, size - whole, load_lanes(work, at + whole) * factor)


@njit(**SERIAL)
def add_row(work: Any, at: Any, size: Any, target: Any, place: Any) -> None:
    """target[place : place + size] += panel row."""
    whole = size // WIDTH * WIDTH
    for d in range(0, whole, WIDTH):
        store_lanes(target, place + d, load_lanes(target, place + d) + load_lanes(work, at + d))
    if whole < size:
        rest = load_some(target, place + whole, size - whole, ZERO) + load_lanes(work, at + whole)
        store_some(target, place + whole, size - whole, rest)


@njit(**SERIAL)
def transpose_panel(count: Any, width: Any, panel: Any, at: Any, target: Any) -> None:
    """From a panel of `count` rows at `at` to (width, KEY_BLOCK) at `target`, in the same array.

    Columns from `count` on hold anything.
    """
    for j in range(0, count, WIDTH):
        for d in range(0, width, WIDTH):
            place = target + d * KEY_BLOCK + j
            transpose_square(panel, at + j * width + d, width, panel, place, KEY_BLOCK)


@njit(**SERIAL)
def multiply_keys(rows: Any, size: Any, width: Any, work: Any, left: Any, right: Any, target: Any) -> None:
    """Scores (rows, KEY_BLOCK) at `target` = panel at `left` · transposed panel at `right`."""
    for j in range(0, KEY_BLOCK, TILE_COLUMNS):
        for i in range(0, rows, TILE_ROWS):
            tile_product(
                TILE_ROWS,
                TILE_VECTORS,
                1,
                work,
                left + i * width,
                width,
                1,
                work,
                right + j,
                KEY_BLOCK,
                work,
                target + i * KEY_BLOCK + j,
                KEY_BLOCK,
                size,
            )


@njit(**SERIAL)
def accumulate_panel(
    rows: Any,
    width: Any,
    depth: Any,
    work: Any,
    left: Any,
    left_row: Any,
    left_step: Any,
    right: Any,
    target: Any,
) -> None:
    """Panel at `target` (rows, width) += A · panel at `right` (depth, width).

    A[i, k] lies at left + i·left_row + k·left_step; all in `work`.
    """
    wide = width // TILE_COLUMNS * TILE_COLUMNS
    for j in range(0, wide, TILE_COLUMNS):
        for i in range(0, rows, TILE_ROWS):
            tile_product(
                TILE_ROWS,
                TILE_VECTORS,
                0,
                work,
                left + i * left_row,
                left_row,
                left_step,
                work,
                right + j,
                width,
                work,
                target + i * width + j,
                width,
                depth,
            )
    for j in range(wide, width, WIDTH):
        for i in range(0, rows, TILE_ROWS):
            tile_product(
                TILE_ROWS,
                1,
                0,
                work,
                left + i * left_row,
                left_row,
                left_step,
                work,
                right + j,
                width,
                work,
                target + i * width + j,
                width,
                depth,
            )


@njit(**SERIAL)
def queries_per_block(heads: Any, groups: Any) -> Any:
    """Queries of a block, at least one."""
    return max(1, QUERY_ROWS // (heads // groups))


@njit(types.UniTuple(INT, 3)(WHOLE2, INT, INT), **SERIAL)
def survey_segments(segments: Any, queries: Any, keys: Any) -> Any:
    """Index of the first segment that leaves the arrays or −1; queries; pairs of a query and a key."""
    bad, covered, pairs = -1, 0, 0
    for s in range(segments.shape[0]):
        start, length, context, context_length, key = segments[s]
        inside = min(start, length, context, context_length, key) >= 0
        inside = inside and start + length <= queries
        inside = inside and context + context_length <= keys and key + length <= keys
        if not inside:
            bad = s
            break
        covered += length
        pairs += length * (context_length + length)
    return bad, covered, pairs


@njit(WHOLE2(WHOLE2, INT), **SERIAL)
def query_blocks(segments: Any, block: Any) -> Any:
    """Blocks of queries as rows (segment, first query inside it), int64 (n, 2)."""
    count = 0
    for s in range(segments.shape[0]):
        count += (segments[s, 1] + block - 1) // block
    blocks = np.empty((count, 2), np.int64)
    n = 0
    for s in range(segments.shape[0]):
        for i in range(0, segments[s, 1], block):
            blocks[n, 0] = s
            blocks[n, 1] = i
            n += 1
    return blocks


@njit(**SERIAL)
def dot_rows(work: Any, left: Any, right: Any, width: Any) -> Any:
    """Sum of the products of two panel rows."""
    total = fill_lanes(ZERO)
    for d in range(0, width, WIDTH):
        total = multiply_add(load_lanes(work, left + d), load_lanes(work, right + d), total)
    return sum_lanes(total)
