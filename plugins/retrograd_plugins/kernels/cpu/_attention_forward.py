"""Attention forward: blocks of queries against blocks of keys, with a running softmax.

Source: Milakov & Gimelshein 2018, algorithm 3 (running softmax); Dao 2023, FlashAttention-2, algorithm 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from ._attention_blocks import (
    KEY_BLOCK,
    ONE,
    ZERO,
    accumulate_panel,
    clear_row,
    gather_keys,
    gather_queries,
    multiply_keys,
    round_up,
    scale_row,
    transpose_panel,
    write_row,
)
from ._math_calls import compiled_address, indirect_call
from ._math_common import COUNTER, F32, IN3, INT, NONE, OUT1, OUT2, OUT3, PARALLEL, SERIAL, WHOLE1, WHOLE2
from ._math_lanes import (
    exp_lanes,
    fill_lanes,
    first_lane,
    keep_between,
    load_lanes,
    max_lanes,
    maximum,
    store_lanes,
    sum_lanes,
    tanh_lanes,
)
from ._math_tiles import TILE_ROWS
from ._simd import WIDTH
from ._simd_memory import take_ticket

LOWEST = np.float32(-np.inf)


@njit(**SERIAL)
def forward_scratch(rows: Any, width: Any) -> Any:
    """float32 elements that one thread needs for blocks of `rows` rows."""
    panels = 2 * rows * width + 3 * KEY_BLOCK * width
    return panels + rows * KEY_BLOCK + rows * (WIDTH + 1)


@njit(**SERIAL)
def soften_row(work: Any, scores: Any, low: Any, high: Any, softcap: Any, highest: Any, totals: Any) -> Any:
    """Turn a row of scores into weights exp(score − maximum), 0 outside keys [low, high).

    Updates the row's maximum (at `highest`) and its sum of weights (16 lanes at `totals`); returns the
    factor exp(old maximum − new maximum) by which what was summed before shrinks.
    """
    before = work[highest]
    peak = fill_lanes(LOWEST)
    for j in range(0, KEY_BLOCK, WIDTH):
        score = load_lanes(work, scores + j)
        if softcap > ZERO:
            score = tanh_lanes(score * (ONE / softcap)) * softcap
        score = keep_between(score, low - j, high - j, LOWEST)
        store_lanes(work, scores + j, score)
        peak = maximum(peak, score)
    now = max(before, max_lanes(peak))
    factor = first_lane(exp_lanes(fill_lanes(before - now))) if before != now else ONE
    total = load_lanes(work, totals) * factor
    for j in range(0, KEY_BLOCK, WIDTH):
        weight = exp_lanes(load_lanes(work, scores + j) - now)
        store_lanes(work, scores + j, weight)
        total = total + weight
    store_lanes(work, totals, total)
    work[highest] = now
    return factor


ATTEND = NONE(IN3, IN3, IN3, WHOLE1, INT, INT, INT, F32, INT, F32, OUT3, OUT2, OUT1, INT)


@njit(ATTEND, **SERIAL)
def attend(
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
    """Queries [first, first + count) of a segment and the heads of one key/value head."""
    heads, size = q.shape[1], q.shape[2]
    groups = k.shape[1]
    ratio = heads // groups
    width = round_up(size, WIDTH)
    rows = count * ratio
    padded = round_up(rows, TILE_ROWS)
    queries = base
    sums = queries + padded * width
    keys = sums + padded * width
    turned = keys + KEY_BLOCK * width
    values = turned + KEY_BLOCK * width
    scores = values + KEY_BLOCK * width
    totals = scores + padded * KEY_BLOCK
    highest = totals + padded * WIDTH

    gather_queries(q, segment[0] + first, count, group, groups, scale, width, work, queries)
    clear_row(work, sums, padded * width)
    clear_row(work, totals, padded * WIDTH)
    for i in range(padded):
        work[highest + i] = LOWEST

    position = segment[3] + first
    stop = position + count
    start = 0 if window <= 0 else max(0, position - window + 1) // KEY_BLOCK * KEY_BLOCK
    for block in range(start, stop, KEY_BLOCK):
        depth = min(KEY_BLOCK, stop - block)
        gather_keys(k, segment, block, depth, group, width, work, keys)
        transpose_panel(depth, width, work, keys, turned)
        gather_keys(v, segment, block, depth, group, width, work, values)
        multiply_keys(padded, size, width, work, queries, turned, scores)
        for i in range(rows):
            mine = position + i // ratio
            high = min(depth, mine + 1 - block)
            low = 0 if window <= 0 else max(0, mine - window + 1 - block)
            if low < high:
                factor = soften_row(
                    work, scores + i * KEY_BLOCK, low, high, softcap, highest + i, totals + i * WIDTH
                )
                if factor != ONE:
                    scale_row(work, sums + i * width, width, factor)
            else:
                clear_row(work, scores + i * KEY_BLOCK, KEY_BLOCK)
        clear_row(work, scores + rows * KEY_BLOCK, (padded - rows) * KEY_BLOCK)
        accumulate_panel(padded, width, depth, work, scores, KEY_BLOCK, 1, values, sums)

    for i in range(rows):
        total = sum_lanes(load_lanes(work, totals + i * WIDTH))
        row = segment[0] + first + i // ratio
        head = group * ratio + i % ratio
        write_row(work, sums + i * width, size, ONE / total, out, (row * heads + head) * size)
        lse[row, head] = work[highest + i] + math.log(total)


call_attend = indirect_call(ATTEND)
ATTEND_ADDRESS = compiled_address(attend, ATTEND)


@njit(
    NONE(INT, IN3, IN3, IN3, WHOLE2, WHOLE2, INT, F32, INT, F32, OUT3, OUT2, OUT1, INT, COUNTER, INT),
    **PARALLEL,
)
def forward(
    kernel: Any,
    q: Any,
    k: Any,
    v: Any,
    segments: Any,
    blocks: Any,
    block: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    out: Any,
    lse: Any,
    work: Any,
    stride: Any,
    counter: Any,
    threads: Any,
) -> None:
    """All tasks (at most `block` queries, key/value head), handed out one at a time to `kernel`, an `attend`.

    Which thread takes a task changes nothing in the result. Thread n works in work[n · stride :];
    `counter` is one int64 of scratch.
    """
    groups = k.shape[1]
    tasks = blocks.shape[0] * groups
    counter[0] = 0
    for n in prange(threads):
        base = np.int64(n * stride)
        task = take_ticket(counter)
        while task < tasks:
            # One head's keys stay in the cache for all its queries. The last queries of a sequence see
            # most keys: longest tasks first, so that threads end together.
            group = task // blocks.shape[0]
            index = blocks.shape[0] - 1 - task % blocks.shape[0]
            segment = segments[blocks[index, 0]]
            first = blocks[index, 1]
            count = min(block, segment[1] - first)
            call_attend(
                kernel, q, k, v, segment, first, count, group, scale, window, softcap, out, lse, work, base
            )
            task = take_ticket(counter)
