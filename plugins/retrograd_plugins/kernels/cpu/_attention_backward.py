"""Attention backward: the weights are computed again from the saved logsumexp.

Two passes, so that nothing is added up by two threads: the first goes over blocks of queries and gives
dq, the second over blocks of keys and gives dk and dv. Every element is one chain of multiply-adds, over
keys in the order of positions or over queries in the order of segments: the same bits on any number of
threads, contexts shared by several segments included.

Source: Dao 2023, FlashAttention-2, algorithm 2, in two passes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from ._attention_blocks import (
    KEY_BLOCK,
    ONE,
    ZERO,
    accumulate_panel,
    add_row,
    clear_row,
    dot_rows,
    gather_keys,
    gather_queries,
    gather_rows,
    multiply_keys,
    queries_per_block,
    round_up,
    transpose_panel,
    write_row,
)
from ._math_calls import compiled_address, indirect_call
from ._math_common import (
    COUNTER,
    F32,
    IN2,
    IN3,
    INT,
    NONE,
    OUT1,
    OUT2,
    OUT3,
    PARALLEL,
    SERIAL,
    WHOLE1,
    WHOLE2,
)
from ._math_lanes import (
    exp_lanes,
    fill_lanes,
    keep_between,
    load_lanes,
    store_lanes,
    tanh_lanes,
)
from ._math_tiles import TILE_ROWS
from ._simd import WIDTH
from ._simd_memory import take_ticket


@njit(**SERIAL)
def backward_scratch(rows: Any, width: Any) -> Any:
    """float32 elements that one thread needs for blocks of `rows` rows."""
    return 3 * rows * width + 2 * rows * KEY_BLOCK + 6 * KEY_BLOCK * width


@njit(**SERIAL)
def gradient_row(
    work: Any, scores: Any, products: Any, low: Any, high: Any, softcap: Any, lse: Any, delta: Any
) -> None:
    """Turn a row of scores into weights p, and of products dp = dout·v into gradients by the scores.

    These are p · (dp − delta), times the slope of the cap. Both are 0 outside keys [low, high).
    """
    for j in range(0, KEY_BLOCK, WIDTH):
        score = load_lanes(work, scores + j)
        gradient = load_lanes(work, products + j) - delta
        if softcap > ZERO:
            tanh = tanh_lanes(score * (ONE / softcap))
            score = tanh * softcap
            gradient = gradient * (fill_lanes(ONE) - tanh * tanh)
        weight = exp_lanes(score - lse)
        store_lanes(work, scores + j, keep_between(weight, low - j, high - j, ZERO))
        store_lanes(work, products + j, keep_between(weight * gradient, low - j, high - j, ZERO))


QUERY_GRADIENT = NONE(
    *(IN3, IN3, IN3, IN3, IN3, IN2, OUT2, WHOLE1, INT, INT, INT, F32, INT, F32, OUT3, OUT1, INT)
)


@njit(QUERY_GRADIENT, **SERIAL)
def query_block_gradient(
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
    """dq of queries [first, first + count) of a segment and the heads of one key/value head.

    Leaves Σ dout·out of each row in delta (T, H) for the second pass.
    """
    heads, size = q.shape[1], q.shape[2]
    groups = k.shape[1]
    ratio = heads // groups
    width = round_up(size, WIDTH)
    rows = count * ratio
    padded = round_up(rows, TILE_ROWS)
    queries = base
    gradients = queries + padded * width
    sums = gradients + padded * width
    keys = sums + padded * width
    turned = keys + KEY_BLOCK * width
    turned_values = turned + KEY_BLOCK * width
    scores = turned_values + KEY_BLOCK * width
    products = scores + padded * KEY_BLOCK

    start_row = segment[0] + first
    gather_queries(out, start_row, count, group, groups, ONE, width, work, sums)
    gather_queries(dout, start_row, count, group, groups, ONE, width, work, gradients)
    for i in range(rows):
        delta[start_row + i // ratio, group * ratio + i % ratio] = dot_rows(
            work, sums + i * width, gradients + i * width, width
        )
    gather_queries(q, start_row, count, group, groups, scale, width, work, queries)
    clear_row(work, sums, padded * width)

    position = segment[3] + first
    stop = position + count
    start = 0 if window <= 0 else max(0, position - window + 1) // KEY_BLOCK * KEY_BLOCK
    for block in range(start, stop, KEY_BLOCK):
        depth = min(KEY_BLOCK, stop - block)
        gather_keys(v, segment, block, depth, group, width, work, keys)
        transpose_panel(depth, width, work, keys, turned_values)
        gather_keys(k, segment, block, depth, group, width, work, keys)
        transpose_panel(depth, width, work, keys, turned)
        multiply_keys(padded, size, width, work, queries, turned, scores)
        multiply_keys(padded, size, width, work, gradients, turned_values, products)
        for i in range(rows):
            mine = position + i // ratio
            row, head = start_row + i // ratio, group * ratio + i % ratio
            high = min(depth, mine + 1 - block)
            low = 0 if window <= 0 else max(0, mine - window + 1 - block)
            place = i * KEY_BLOCK
            gradient_row(
                work, scores + place, products + place, low, high, softcap, lse[row, head], delta[row, head]
            )
        clear_row(work, products + rows * KEY_BLOCK, (padded - rows) * KEY_BLOCK)
        accumulate_panel(padded, width, depth, work, products, KEY_BLOCK, 1, keys, sums)

    for i in range(rows):
        place = ((start_row + i // ratio) * heads + group * ratio + i % ratio) * size
        write_row(work, sums + i * width, size, scale, dq, place)


KEY_GRADIENT = NONE(*(IN3, IN3, IN3, IN3, IN2, IN2, WHOLE2, INT, INT, F32, INT, F32, OUT3, OUT3, OUT1, INT))


@njit(KEY_GRADIENT, **SERIAL)
def key_block_gradient(
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
    """Add to dk and dv of the KEY_BLOCK rows from `first_key` on what all segments give them."""
    heads, size = q.shape[1], q.shape[2]
    keys, groups = k.shape[0], k.shape[1]
    ratio = heads // groups
    width = round_up(size, WIDTH)
    block = queries_per_block(heads, groups)
    padded = round_up(block * ratio, TILE_ROWS)
    queries = base
    gradients = queries + padded * width
    scores = gradients + padded * width
    products = scores + padded * KEY_BLOCK
    panel = products + padded * KEY_BLOCK
    turned = panel + KEY_BLOCK * width
    turned_values = turned + KEY_BLOCK * width
    key_sums = turned_values + KEY_BLOCK * width
    value_sums = key_sums + KEY_BLOCK * width

    last_key = min(keys, first_key + KEY_BLOCK)
    touched = False
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
            first = max(0, low_key - shift - context)
            stop = segment[1] if window <= 0 else min(segment[1], high_key - 1 - shift + window - context)
            for i0 in range(first, stop, block):
                if not touched:
                    touched = True
                    gather_rows(k, first_key, last_key - first_key, group, width, work, panel)
                    transpose_panel(last_key - first_key, width, work, panel, turned)
                    gather_rows(v, first_key, last_key - first_key, group, width, work, panel)
                    transpose_panel(last_key - first_key, width, work, panel, turned_values)
                    clear_row(work, key_sums, 2 * KEY_BLOCK * width)
                count = min(block, stop - i0)
                rows = count * ratio
                row = segment[0] + i0
                gather_queries(q, row, count, group, groups, scale, width, work, queries)
                gather_queries(dout, row, count, group, groups, ONE, width, work, gradients)
                tiles = round_up(rows, TILE_ROWS)
                multiply_keys(tiles, size, width, work, queries, turned, scores)
                multiply_keys(tiles, size, width, work, gradients, turned_values, products)
                for i in range(rows):
                    mine = context + i0 + i // ratio + shift
                    high = min(high_key, mine + 1) - first_key
                    low = low_key - first_key
                    if window > 0:
                        low = max(low, mine - window + 1 - first_key)
                    r, head = row + i // ratio, group * ratio + i % ratio
                    at = i * KEY_BLOCK
                    gradient_row(
                        work, scores + at, products + at, low, high, softcap, lse[r, head], delta[r, head]
                    )
                # The rows of scores and products are the columns of the left operand here.
                accumulate_panel(KEY_BLOCK, width, rows, work, scores, 1, KEY_BLOCK, gradients, value_sums)
                accumulate_panel(KEY_BLOCK, width, rows, work, products, 1, KEY_BLOCK, queries, key_sums)
    if touched:
        for j in range(last_key - first_key):
            place = ((first_key + j) * groups + group) * size
            add_row(work, key_sums + j * width, size, dk, place)
            add_row(work, value_sums + j * width, size, dv, place)


call_query_gradient = indirect_call(QUERY_GRADIENT)
QUERY_GRADIENT_ADDRESS = compiled_address(query_block_gradient, QUERY_GRADIENT)
call_key_gradient = indirect_call(KEY_GRADIENT)
KEY_GRADIENT_ADDRESS = compiled_address(key_block_gradient, KEY_GRADIENT)


@njit(
    NONE(
        *(INT, IN3, IN3, IN3, IN3, IN3, IN2, OUT2, WHOLE2, WHOLE2, F32, INT, F32, OUT3),
        *(OUT1, INT, COUNTER, INT),
    ),
    **PARALLEL,
)
def query_gradients(
    kernel: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    delta: Any,
    segments: Any,
    blocks: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    dq: Any,
    work: Any,
    stride: Any,
    counter: Any,
    threads: Any,
) -> None:
    """First pass: dq and delta (T, H). Thread n works in work[n · stride :]; `counter` is scratch."""
    groups = k.shape[1]
    block = queries_per_block(q.shape[1], groups)
    tasks = blocks.shape[0] * groups
    counter[0] = 0
    for n in prange(threads):
        base = np.int64(n * stride)
        task = take_ticket(counter)
        while task < tasks:
            group = task // blocks.shape[0]
            index = blocks.shape[0] - 1 - task % blocks.shape[0]
            segment = segments[blocks[index, 0]]
            first = blocks[index, 1]
            count = min(block, segment[1] - first)
            call_query_gradient(
                kernel,
                dout,
                q,
                k,
                v,
                out,
                lse,
                delta,
                segment,
                first,
                count,
                group,
                scale,
                window,
                softcap,
                dq,
                work,
                base,
            )
            task = take_ticket(counter)


@njit(
    NONE(
        *(INT, IN3, IN3, IN3, IN3, IN2, IN2, WHOLE2, F32, INT, F32, OUT3, OUT3),
        *(OUT1, INT, COUNTER, INT),
    ),
    **PARALLEL,
)
def key_gradients(
    kernel: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    lse: Any,
    delta: Any,
    segments: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    dk: Any,
    dv: Any,
    work: Any,
    stride: Any,
    counter: Any,
    threads: Any,
) -> None:
    """Second pass: adds to dk and dv, from the delta (T, H) of the first."""
    groups = k.shape[1]
    blocks = (k.shape[0] + KEY_BLOCK - 1) // KEY_BLOCK
    counter[0] = 0
    for n in prange(threads):
        base = np.int64(n * stride)
        task = take_ticket(counter)
        while task < blocks * groups:
            first = task % blocks * KEY_BLOCK
            group = task // blocks
            call_key_gradient(
                kernel,
                dout,
                q,
                k,
                v,
                lse,
                delta,
                segments,
                first,
                group,
                scale,
                window,
                softcap,
                dk,
                dv,
                work,
                base,
            )
            task = take_ticket(counter)
