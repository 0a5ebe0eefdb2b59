"""Attention forward on AMX tiles, with the precision of float32: operands in halves, as in `_gemm_amx`.

Scores stand with keys as rows, so that the running softmax goes along rows of vectors, and weights are the
right operand of outᵀ = vᵀ · weights as they are made. A query's column depends on no other column: the same
bits in every layout.

Source: Milakov & Gimelshein 2018, algorithm 3 (running softmax); Dao 2023, FlashAttention-2, algorithm 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from ._attention_blocks import KEY_BLOCK, ONE, ZERO, round_up
from ._attention_forward import ATTEND
from ._attention_halves import store_pair
from ._attention_lanes import ALL, QUERY_TABLE, SQUARE, VISIBLE, keep_visible, weight_lanes
from ._attention_packs import (
    HALF,
    STEP,
    add_split_square,
    clear,
    gather,
    gather_chunk,
    scatter,
    split_left,
    split_right,
    split_square,
    split_turned,
    tile_width,
    what_is_hidden,
)
from ._math_calls import compiled_address
from ._math_common import INT, SERIAL
from ._math_lanes import fill_lanes, keep_not_below, max_lanes, maximum, tanh_lanes
from ._math_tiles import transpose_square
from ._rows_kinds import TILE_PAIR
from ._simd import WIDTH
from ._simd_memory import address
from ._simd_tiles import tiles_configure, tiles_release
from ._stack_memory import lanes_at, put_lanes

LOWEST = np.float32(-1e30)
"""Maximum of the scores of a query that has seen none: finite, so that it can be subtracted."""
ROW = 4 * SQUARE


@njit(INT(INT, INT), **SERIAL)
def tile_forward_scratch(rows: Any, size: Any) -> Any:
    """float32 elements that one thread needs for chunks of `rows` rows and heads of `size`."""
    width = tile_width(size)
    tall = round_up(rows, STEP)
    panels = 2 * tall + max(tall, KEY_BLOCK) + 2 * KEY_BLOCK
    return panels * width + tall // SQUARE * QUERY_TABLE + 2 * KEY_BLOCK * SQUARE


@njit(**SERIAL)
def _soften(
    scores: Any,
    first: Any,
    stop: Any,
    hidden: Any,
    table: Any,
    weights: Any,
    sums: Any,
    width: Any,
    key: Any,
    window: Any,
    columns: Any,
) -> None:
    """Turn rows [first, stop) of scores of 32 queries into weights exp(score − maximum), 0 where hidden.

    `table` holds the queries' maxima, sums of weights and positions, which count as `key`, the position of
    row 0, does. What was summed before, at `sums`, shrinks as the maxima grow. Only the first 16 `columns`
    are looked at if there are no more.
    """
    for at in range(0, 4 * columns, 4 * WIDTH):
        before, mine = lanes_at(table + at), lanes_at(table + 2 * ROW + at)
        now = before
        if hidden == VISIBLE:
            for j in range(first, stop):
                now = maximum(lanes_at(scores + ROW * j + at), now)
        else:
            for j in range(first, stop):
                score = keep_visible(lanes_at(scores + ROW * j + at), mine, fill_lanes(np.float32(key + j)))
                if window > 0:
                    score = keep_visible(score, fill_lanes(np.float32(key + j + window - 1)), mine)
                now = maximum(score, now)
        total = lanes_at(table + ROW + at)
        if max_lanes(now - before) > ZERO:
            put_lanes(table + at, now)
            factor = weight_lanes(before - now)
            total = total * factor
            for d in range(width):
                put_lanes(sums + ROW * d + at, lanes_at(sums + ROW * d + at) * factor)
        for j in range(first, stop, 2):
            weight = weight_lanes(lanes_at(scores + ROW * j + at) - now)
            following = weight_lanes(lanes_at(scores + ROW * j + ROW + at) - now)
            if hidden != VISIBLE:
                weight = keep_not_below(weight, mine, fill_lanes(np.float32(key + j)))
                following = keep_not_below(following, mine, fill_lanes(np.float32(key + j + 1)))
                if window > 0:
                    weight = keep_not_below(weight, fill_lanes(np.float32(key + j + window - 1)), mine)
                    following = keep_not_below(following, fill_lanes(np.float32(key + j + window)), mine)
            total = total + weight
            total = total + following
            place = weights + 2 * TILE_PAIR * (j // SQUARE) + TILE_PAIR * (at // (4 * WIDTH))
            store_pair(place + 4 * WIDTH * (j % SQUARE // 2), weight, following)
        put_lanes(table + ROW + at, total)


@njit(ATTEND, **SERIAL)
def attend_tiles(
    q: Any,
    k: Any,
    v: Any,
    segment: Any,
    first: Any,
    count: Any,
    group: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    out: Any,
    lse: Any,
    work: Any,
    base: Any,
) -> None:
    """As `attend`."""
    heads, size = q.shape[1], q.shape[2]
    groups = k.shape[1]
    ratio = heads // groups
    width = tile_width(size)
    steps = width // STEP
    rows = count * ratio
    tall = round_up(rows, STEP)
    context_row, context, own_row = segment[2], segment[3], segment[4]

    turned_queries = base
    sums = turned_queries + tall * width
    panel = sums + tall * width
    keys = panel + max(tall, KEY_BLOCK) * width
    values = keys + KEY_BLOCK * width
    scores = values + KEY_BLOCK * width
    weights = scores + KEY_BLOCK * SQUARE
    tables = weights + KEY_BLOCK * SQUARE
    panel_at, sums_at = address(work, panel), address(work, sums)
    scores_at, weights_at = address(work, scores), address(work, weights)

    # Bytes from a token to the next, and to its first head that counts here.
    pitch, key_pitch = 4 * heads * size, 4 * groups * size
    chosen, key_chosen = 4 * group * ratio * size, 4 * group * size
    skipped = (segment[0] + first) * pitch + chosen
    gather_chunk(address(q, 0) + skipped, pitch, count, ratio, size, scale, panel_at, width, tall)
    split_right(panel_at, address(work, turned_queries), tall, width)
    clear(sums_at, tall * width)
    clear(address(work, tables), tall // SQUARE * QUERY_TABLE)
    for i in range(tall):
        table = tables + i // SQUARE * QUERY_TABLE + i % SQUARE
        work[table] = LOWEST
        work[table + 2 * SQUARE] = np.float32(min(i, rows - 1) // ratio)

    position = context + first
    stop = position + count
    start = 0 if window <= 0 else max(0, position - window + 1) // KEY_BLOCK * KEY_BLOCK
    tiles_configure()
    for block in range(start, stop, KEY_BLOCK):
        depth = min(KEY_BLOCK, stop - block)
        shared = min(max(context - block, 0), depth)
        shared_at = (context_row + block) * key_pitch + key_chosen
        own_at = (own_row + block + shared - context) * key_pitch + key_chosen
        lower = panel_at + 4 * shared * width
        clear(panel_at + 4 * depth * width, (KEY_BLOCK - depth) * width)
        gather(address(v, 0) + shared_at, key_pitch, shared, size, ONE, panel_at, width)
        gather(address(v, 0) + own_at, key_pitch, depth - shared, size, ONE, lower, width)
        split_turned(panel_at, address(work, values), KEY_BLOCK, width, weights_at)
        gather(address(k, 0) + shared_at, key_pitch, shared, size, ONE, panel_at, width)
        gather(address(k, 0) + own_at, key_pitch, depth - shared, size, ONE, lower, width)
        split_left(panel_at, address(work, keys), KEY_BLOCK, width)
        # Positions count from the chunk's first query.
        key = block - position
        for i in range(0, tall, SQUARE):
            earliest, latest = i // ratio, min(i + SQUARE - 1, rows - 1) // ratio
            low, high, hidden = 2, 0, VISIBLE
            for half in range(2):
                mine = what_is_hidden(key + SQUARE * half, earliest, latest, window)
                if mine == ALL:
                    continue
                low, high, hidden = min(low, half), half + 1, max(hidden, mine)
                split_square(
                    address(work, keys) + TILE_PAIR * 2 * half * steps,
                    address(work, turned_queries) + 4 * i * width,
                    scores_at + SQUARE * ROW * half,
                    steps,
                )
            if low >= high:
                continue
            if softcap > ZERO:
                for at in range(SQUARE * ROW * low, SQUARE * ROW * high, 4 * WIDTH):
                    score = lanes_at(scores_at + at)
                    put_lanes(scores_at + at, tanh_lanes(score * (ONE / softcap)) * softcap)
            square = sums_at + 4 * i * width
            table = address(work, tables + i // SQUARE * QUERY_TABLE)
            _soften(
                scores_at,
                SQUARE * low,
                SQUARE * high,
                hidden,
                table,
                weights_at,
                square,
                width,
                key,
                window,
                min(SQUARE, rows - i),
            )
            for d in range(0, width, STEP):
                add_split_square(
                    address(work, values) + TILE_PAIR * (d // HALF * 2 + low),
                    2 * TILE_PAIR,
                    weights_at + 2 * TILE_PAIR * low,
                    square + ROW * d,
                    high - low,
                )
    tiles_release()

    for i in range(0, tall, HALF):
        source = sums + i // SQUARE * SQUARE * width + i % SQUARE
        for d in range(0, width, HALF):
            transpose_square(work, source + SQUARE * d, SQUARE, work, panel + i * width + d, width)
    for i in range(rows):
        table = tables + i // SQUARE * QUERY_TABLE + i % SQUARE
        total = work[table + SQUARE]
        row = segment[0] + first + i // ratio
        lse[row, group * ratio + i % ratio] = work[table] + math.log(total)
        target = address(out, 0) + skipped + i // ratio * pitch + i % ratio * 4 * size
        scatter(panel_at + 4 * i * width, width, 1, size, ONE / total, target, 4 * size)


ATTEND_TILES_ADDRESS = compiled_address(attend_tiles, ATTEND)
