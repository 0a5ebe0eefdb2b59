"""Attention backward on AMX tiles: the two passes of `_attention_backward`, with products of bfloat16.

Scores and the products dout·v are computed to float32's precision, from halves (see `_gemm_amx`): an error
of a score multiplies its weight, and dout·v is nearly cancelled by its mean. The operands of the sums that
follow are rounded to bfloat16; all sums are float32.

The first pass takes queries as rows. The second takes keys as rows, so that what it computes from scores is
the left operand of its sums over queries as it stands.

Source: Dao 2023, FlashAttention-2, algorithm 2, in two passes; tiles as in `_gemm_amx`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ._attention_backward import KEY_GRADIENT, QUERY_GRADIENT, dot_rows
from ._attention_blocks import (
    KEY_BLOCK,
    ONE,
    ZERO,
    add_row,
    clear_row,
    gather_keys,
    gather_queries,
    gather_rows,
    queries_per_block,
    round_up,
    write_row,
)
from ._math_calls import compiled_address
from ._math_common import SERIAL
from ._math_lanes import (
    exp_lanes,
    fill_lanes,
    keep_between,
    keep_not_below,
    load_lanes,
    tanh_lanes,
)
from ._rows_kinds import TILE_BYTES
from ._simd import WIDTH
from ._simd_memory import address
from ._simd_tiles import (
    pack_tile_from_columns,
    pack_tiles_from_rows,
    split_bfloats,
    store_bfloats,
    tile_load,
    tile_multiply,
    tile_store,
    tile_zero,
    tiles_configure,
    tiles_release,
)

STEP = 32
"""Steps of a tile product, and rows and columns of a square of four tiles."""
HALF = 16
"""Rows and columns of a tile."""
LINE = 64
"""Bytes of a tile's row."""
NEVER = np.float32(-1e9)
"""Position of rows that fill a block up: they see no key."""


@njit(**SERIAL)
def tile_width(size: Any) -> Any:
    """Columns of a panel of heads of `size`."""
    return round_up(size, STEP)


@njit(**SERIAL)
def tile_scratch(rows: Any, size: Any) -> Any:
    """float32 elements that one thread needs for blocks of `rows` queries and heads of `size`."""
    width = tile_width(size)
    tall = round_up(rows, STEP)
    panels = 4 * tall + max(tall, KEY_BLOCK) + 4 * KEY_BLOCK
    return panels * width + 3 * tall * KEY_BLOCK + 3 * tall


@njit(**SERIAL)
def _clear_rows(work: Any, panel: Any, first: Any, stop: Any, width: Any) -> None:
    clear_row(work, panel + first * width, (stop - first) * width)


@njit(**SERIAL)
def _split_rows(source: Any, target: Any, count: Any) -> None:
    """`count` float32 as rows of a left operand, in halves: the low ones follow the high ones."""
    for i in range(0, count, STEP):
        split_bfloats(source + 4 * i, target + 2 * i, target + 2 * (count + i))


@njit(**SERIAL)
def _pack_turned(source: Any, target: Any, rows: Any, width: Any) -> None:
    """Rows as columns of a right operand, in halves: the low ones follow the high ones."""
    low = target + 2 * rows * width
    for j in range(0, rows, HALF):
        for d in range(0, width, STEP):
            at = TILE_BYTES * (d // STEP * (rows // HALF) + j // HALF)
            pack_tiles_from_rows(source + 4 * (j * width + d), 4 * width, target + at, low + at)


@njit(**SERIAL)
def _pack_rows(source: Any, target: Any, rows: Any, width: Any) -> None:
    """Rows as rows of a right operand."""
    for i in range(0, rows, STEP):
        for d in range(0, width, HALF):
            at = TILE_BYTES * (i // STEP * (width // HALF) + d // HALF)
            pack_tile_from_columns(source + 4 * (i * width + d), 4 * width, target + at)


@njit(**SERIAL)
def _accumulate(left: Any, depth: Any, right: Any, target: Any, rows: Any, columns: Any) -> None:
    """target (rows, columns) += left (rows, depth) · right, float32; all sizes whole squares."""
    pitch = 2 * depth
    stride = 4 * columns
    for n in range(0, columns, STEP):
        for t in range(0, rows, STEP):
            place = target + t * stride + 4 * n
            tile_load(0, place, stride)
            tile_load(1, place + LINE, stride)
            tile_load(2, place + HALF * stride, stride)
            tile_load(3, place + HALF * stride + LINE, stride)
            for k in range(0, depth, STEP):
                one = left + t * pitch + 2 * k
                two = right + TILE_BYTES * (k // STEP * (columns // HALF) + n // HALF)
                tile_load(4, one, pitch)
                tile_load(6, two, LINE)
                tile_multiply(0, 4, 6)
                tile_load(7, two + TILE_BYTES, LINE)
                tile_multiply(1, 4, 7)
                tile_load(5, one + HALF * pitch, pitch)
                tile_multiply(2, 5, 6)
                tile_multiply(3, 5, 7)
            tile_store(0, place, stride)
            tile_store(1, place + LINE, stride)
            tile_store(2, place + HALF * stride, stride)
            tile_store(3, place + HALF * stride + LINE, stride)


@njit(**SERIAL)
def _multiply_split(left: Any, depth: Any, right: Any, target: Any, rows: Any, columns: Any) -> None:
    """target = left · right, both in halves."""
    pitch = 2 * depth
    stride = 4 * columns
    left_low = left + rows * pitch
    right_low = right + 2 * columns * depth
    for n in range(0, columns, STEP):
        for t in range(0, rows, STEP):
            place = target + t * stride + 4 * n
            tile_zero(0)
            tile_zero(1)
            tile_zero(2)
            tile_zero(3)
            for k in range(0, depth, STEP):
                one = t * pitch + 2 * k
                two = TILE_BYTES * (k // STEP * (columns // HALF) + n // HALF)
                tile_load(6, left_low + one, pitch)
                tile_load(4, right + two, LINE)
                tile_multiply(0, 6, 4)
                tile_load(5, right + two + TILE_BYTES, LINE)
                tile_multiply(1, 6, 5)
                tile_load(7, left_low + one + HALF * pitch, pitch)
                tile_multiply(2, 7, 4)
                tile_multiply(3, 7, 5)
                tile_load(6, left + one, pitch)
                tile_multiply(0, 6, 4)
                tile_multiply(1, 6, 5)
                tile_load(7, left + one + HALF * pitch, pitch)
                tile_multiply(2, 7, 4)
                tile_multiply(3, 7, 5)
                tile_load(4, right_low + two, LINE)
                tile_multiply(0, 6, 4)
                tile_multiply(2, 7, 4)
                tile_load(5, right_low + two + TILE_BYTES, LINE)
                tile_multiply(1, 6, 5)
                tile_multiply(3, 7, 5)
            tile_store(0, place, stride)
            tile_store(1, place + LINE, stride)
            tile_store(2, place + HALF * stride, stride)
            tile_store(3, place + HALF * stride + LINE, stride)


@njit(QUERY_GRADIENT, **SERIAL)
def query_tiles_gradient(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    delta: Any,
    segment: Any,
    first: Any,
    count: Any,
    group: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    dq: Any,
    work: Any,
    base: Any,
) -> None:
    """As `query_block_gradient`."""
    heads, size = q.shape[1], q.shape[2]
    groups = k.shape[1]
    ratio = heads // groups
    width = tile_width(size)
    rows = count * ratio
    tall = round_up(rows, STEP)
    queries = base
    gradients = queries + tall * width
    sums = gradients + tall * width
    panel = sums + tall * width
    keys = panel + max(tall, KEY_BLOCK) * width
    turned_keys = keys + KEY_BLOCK * width // 2
    turned_values = turned_keys + KEY_BLOCK * width
    scores = turned_values + KEY_BLOCK * width
    products = scores + tall * KEY_BLOCK
    rounded = products + tall * KEY_BLOCK

    start_row = segment[0] + first
    _clear_rows(work, panel, rows, tall, width)
    gather_queries(out, start_row, count, group, groups, ONE, width, work, sums)
    gather_queries(dout, start_row, count, group, groups, ONE, width, work, panel)
    for i in range(rows):
        delta[start_row + i // ratio, group * ratio + i % ratio] = dot_rows(
            work, sums + i * width, panel + i * width, width
        )
    _split_rows(address(work, panel), address(work, gradients), tall * width)
    gather_queries(q, start_row, count, group, groups, scale, width, work, panel)
    _split_rows(address(work, panel), address(work, queries), tall * width)
    clear_row(work, sums, tall * width)
    clear_row(work, rounded, tall * KEY_BLOCK // 2)

    position = segment[3] + first
    stop = position + count
    start = 0 if window <= 0 else max(0, position - window + 1) // KEY_BLOCK * KEY_BLOCK
    tiles_configure()
    for block in range(start, stop, KEY_BLOCK):
        depth = min(KEY_BLOCK, stop - block)
        _clear_rows(work, panel, depth, KEY_BLOCK, width)
        gather_keys(v, segment, block, depth, group, width, work, panel)
        _pack_turned(address(work, panel), address(work, turned_values), KEY_BLOCK, width)
        gather_keys(k, segment, block, depth, group, width, work, panel)
        _pack_turned(address(work, panel), address(work, turned_keys), KEY_BLOCK, width)
        _pack_rows(address(work, panel), address(work, keys), KEY_BLOCK, width)
        _multiply_split(
            address(work, queries),
            width,
            address(work, turned_keys),
            address(work, scores),
            tall,
            KEY_BLOCK,
        )
        _multiply_split(
            address(work, gradients),
            width,
            address(work, turned_values),
            address(work, products),
            tall,
            KEY_BLOCK,
        )
        for i in range(rows):
            mine = position + i // ratio
            row, head = start_row + i // ratio, group * ratio + i % ratio
            high = min(depth, mine + 1 - block)
            low = 0 if window <= 0 else max(0, mine - window + 1 - block)
            place = i * KEY_BLOCK
            target = address(work, rounded) + 2 * place
            for j in range(0, KEY_BLOCK, WIDTH):
                score = load_lanes(work, scores + place + j)
                gradient = load_lanes(work, products + place + j) - delta[row, head]
                if softcap > ZERO:
                    tanh = tanh_lanes(score * (ONE / softcap))
                    score = tanh * softcap
                    gradient = gradient * (fill_lanes(ONE) - tanh * tanh)
                gradient = exp_lanes(score - lse[row, head]) * gradient
                store_bfloats(target + 2 * j, keep_between(gradient, low - j, high - j, ZERO))
        _accumulate(
            address(work, rounded),
            KEY_BLOCK,
            address(work, keys),
            address(work, sums),
            tall,
            width,
        )
    tiles_release()

    for i in range(rows):
        place = ((start_row + i // ratio) * heads + group * ratio + i % ratio) * size
        write_row(work, sums + i * width, size, scale, dq, place)


@njit(KEY_GRADIENT, **SERIAL)
def key_tiles_gradient(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    lse: Any,
    delta: Any,
    segments: Any,
    first_key: Any,
    group: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    dk: Any,
    dv: Any,
    work: Any,
    base: Any,
) -> None:
    """As `key_block_gradient`."""
    heads, size = q.shape[1], q.shape[2]
    keys, groups = k.shape[0], k.shape[1]
    ratio = heads // groups
    width = tile_width(size)
    block = queries_per_block(heads, groups)
    most = round_up(block * ratio, STEP)
    turned = base
    queries = turned + most * width
    turned_gradients = queries + most * width // 2
    gradients = turned_gradients + most * width
    panel = gradients + most * width // 2
    left_keys = panel + max(most, KEY_BLOCK) * width
    left_values = left_keys + KEY_BLOCK * width
    key_sums = left_values + KEY_BLOCK * width
    value_sums = key_sums + KEY_BLOCK * width
    scores = value_sums + KEY_BLOCK * width
    products = scores + most * KEY_BLOCK
    weights = products + most * KEY_BLOCK
    slopes = weights + most * KEY_BLOCK // 2
    logsumexps = slopes + most * KEY_BLOCK // 2
    deltas = logsumexps + most
    positions = deltas + most

    last_key = min(keys, first_key + KEY_BLOCK)
    touched = False
    tiles_configure()
    for s in range(segments.shape[0]):
        segment = segments[s]
        context = segment[3]
        for part in range(2):
            # Row r holds position r − shift; the context's rows first, then the segment's own.
            start = segment[2] if part == 0 else segment[4]
            length = context if part == 0 else segment[1]
            shift = start if part == 0 else start - context
            low_key = max(first_key, start)
            high_key = min(last_key, start + length)
            if low_key >= high_key:
                continue
            # Blocks begin at the same queries for all keys: tiles sum pairs of queries.
            first = max(0, low_key - shift - context) // block * block
            stop = segment[1] if window <= 0 else min(segment[1], high_key - 1 - shift + window - context)
            for i0 in range(first, stop, block):
                if not touched:
                    touched = True
                    _clear_rows(work, panel, last_key - first_key, KEY_BLOCK, width)
                    gather_rows(k, first_key, last_key - first_key, group, width, work, panel)
                    _split_rows(address(work, panel), address(work, left_keys), KEY_BLOCK * width)
                    gather_rows(v, first_key, last_key - first_key, group, width, work, panel)
                    _split_rows(address(work, panel), address(work, left_values), KEY_BLOCK * width)
                    clear_row(work, key_sums, 2 * KEY_BLOCK * width)
                count = min(block, stop - i0)
                rows = count * ratio
                tall = round_up(rows, STEP)
                row = segment[0] + i0
                _clear_rows(work, panel, rows, tall, width)
                gather_queries(q, row, count, group, groups, scale, width, work, panel)
                _pack_turned(address(work, panel), address(work, turned), tall, width)
                _pack_rows(address(work, panel), address(work, queries), tall, width)
                gather_queries(dout, row, count, group, groups, ONE, width, work, panel)
                _pack_turned(address(work, panel), address(work, turned_gradients), tall, width)
                _pack_rows(address(work, panel), address(work, gradients), tall, width)
                for i in range(rows):
                    r, head = row + i // ratio, group * ratio + i % ratio
                    work[logsumexps + i] = lse[r, head]
                    work[deltas + i] = delta[r, head]
                    work[positions + i] = np.float32(context + i0 + i // ratio + shift - first_key)
                for i in range(rows, tall):
                    work[logsumexps + i] = ZERO
                    work[deltas + i] = ZERO
                    work[positions + i] = NEVER
                _multiply_split(
                    address(work, left_keys),
                    width,
                    address(work, turned),
                    address(work, scores),
                    KEY_BLOCK,
                    tall,
                )
                _multiply_split(
                    address(work, left_values),
                    width,
                    address(work, turned_gradients),
                    address(work, products),
                    KEY_BLOCK,
                    tall,
                )
                for j in range(KEY_BLOCK):
                    inside = low_key <= first_key + j < high_key
                    nearest = fill_lanes(np.float32(j))
                    farthest = fill_lanes(np.float32(j + window - 1))
                    place = j * tall
                    for i in range(0, tall, WIDTH):
                        weight = fill_lanes(ZERO)
                        slope = weight
                        if inside:
                            score = load_lanes(work, scores + place + i)
                            gradient = load_lanes(work, products + place + i) - load_lanes(work, deltas + i)
                            if softcap > ZERO:
                                tanh = tanh_lanes(score * (ONE / softcap))
                                score = tanh * softcap
                                gradient = gradient * (fill_lanes(ONE) - tanh * tanh)
                            weight = exp_lanes(score - load_lanes(work, logsumexps + i))
                            slope = weight * gradient
                            mine = load_lanes(work, positions + i)
                            weight = keep_not_below(weight, mine, nearest)
                            slope = keep_not_below(slope, mine, nearest)
                            if window > 0:
                                weight = keep_not_below(weight, farthest, mine)
                                slope = keep_not_below(slope, farthest, mine)
                        store_bfloats(address(work, weights) + 2 * (place + i), weight)
                        store_bfloats(address(work, slopes) + 2 * (place + i), slope)
                _accumulate(
                    address(work, weights),
                    tall,
                    address(work, gradients),
                    address(work, value_sums),
                    KEY_BLOCK,
                    width,
                )
                _accumulate(
                    address(work, slopes),
                    tall,
                    address(work, queries),
                    address(work, key_sums),
                    KEY_BLOCK,
                    width,
                )
    tiles_release()
    if touched:
        for j in range(last_key - first_key):
            place = ((first_key + j) * groups + group) * size
            add_row(work, key_sums + j * width, size, dk, place)
            add_row(work, value_sums + j * width, size, dv, place)


QUERY_TILES_ADDRESS = compiled_address(query_tiles_gradient, QUERY_GRADIENT)
KEY_TILES_ADDRESS = compiled_address(key_tiles_gradient, KEY_GRADIENT)
