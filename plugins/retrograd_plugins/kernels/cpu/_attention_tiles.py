"""Attention backward on AMX tiles: one pass over blocks of keys for each chunk of queries.

Scores and the products dout·v are computed to float32's precision, from halves (see `_attention_halves`): an
error of a score multiplies its weight, and dout·v is nearly cancelled by its mean. The operands of the sums
that follow are rounded to bfloat16; all sums are float32.

A task is a chunk of queries and the heads that share a key/value head. Its operands are packed once and stay
in the second cache with its dq, while keys go by in blocks. For a square of 32 keys and 32 queries, scores
and products stand with keys as rows: weights and slopes are then left operands of the sums dv and dk over
queries as they stand, and the slopes the right operand of dqᵀ = kᵀ · slopes. What a chunk finds for a block
of keys is added to dk and dv in the order of chunks (see `_attention_turns`): the same bits on any number of
threads.

Source: Dao 2023, FlashAttention-2, algorithm 2; tiles as in `_gemm_amx`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from ._attention_blocks import (
    KEY_BLOCK,
    ONE,
    ZERO,
    dot_rows,
    round_up,
)
from ._attention_lanes import ALL, LOG2_E, QUERY_TABLE, SQUARE
from ._attention_packs import (
    HALF,
    STEP,
    add_square,
    clear,
    gather,
    gather_chunk,
    pack_right,
    pack_turned,
    scatter,
    scatter_add,
    split_left,
    split_right,
    tile_width,
    what_is_hidden,
)
from ._attention_squares import SQUARE_BYTES, SQUARES, STRIP, cap, multiply, soften
from ._attention_turns import FINISHED, report_progress, wait_for_turn
from ._math_calls import compiled_address, indirect_call
from ._math_common import COUNTER, F32, IN2, IN3, INT, NONE, OUT1, OUT3, PARALLEL, SERIAL, WHOLE2
from ._math_tiles import transpose_square
from ._rows_kinds import TILE_BYTES, TILE_PAIR
from ._simd_memory import address, take_ticket
from ._simd_tiles import tiles_configure, tiles_release

LOG2_E_FLOAT = np.float32(LOG2_E)


@njit(INT(INT, INT), **SERIAL)
def tile_scratch(rows: Any, size: Any) -> Any:
    """float32 elements that one thread needs for chunks of `rows` rows and heads of `size`."""
    width = tile_width(size)
    tall = round_up(rows, STEP)
    panels = 4 * tall + max(tall, KEY_BLOCK) + 9 * KEY_BLOCK // 2
    squares = 4 * SQUARE * SQUARE + 3 * STRIP * KEY_BLOCK // 2
    return panels * width + tall // SQUARE * QUERY_TABLE + squares


CHUNK_GRADIENT = NONE(
    *(IN3, IN3, IN3, IN3, IN3, IN2, WHOLE2, WHOLE2, INT, INT, INT, F32, INT, F32, OUT3, OUT3, OUT3),
    *(OUT1, INT, COUNTER),
)


@njit(CHUNK_GRADIENT, **SERIAL)
def chunk_gradient(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    segments: Any,
    chunks: Any,
    task: Any,
    chunk: Any,
    group: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    work: Any,
    base: Any,
    progress: Any,
) -> None:
    """dq of the `chunk` queries of a task and the heads of one key/value head; adds to its dk and dv."""
    heads, size = q.shape[1], q.shape[2]
    groups = k.shape[1]
    ratio = heads // groups
    width = tile_width(size)
    steps = width // STEP
    mine, first = chunks[task, 0], chunks[task, 1]
    start, length, context_row, context, own_row = (
        segments[mine, 0],
        segments[mine, 1],
        segments[mine, 2],
        segments[mine, 3],
        segments[mine, 4],
    )
    count = min(chunk, length - first)
    rows = count * ratio
    tall = round_up(rows, STEP)

    turned_queries = base
    turned_gradients = turned_queries + tall * width
    queries = turned_gradients + tall * width
    gradients = queries + tall * width // 2
    sums = gradients + tall * width // 2
    panel = sums + tall * width
    keys = panel + max(tall, KEY_BLOCK) * width
    values = keys + KEY_BLOCK * width
    turned_keys = values + KEY_BLOCK * width
    key_sums = turned_keys + KEY_BLOCK * width // 2
    value_sums = key_sums + KEY_BLOCK * width
    scores = value_sums + KEY_BLOCK * width
    weights = scores + 4 * SQUARE * SQUARE
    slopes = weights + STRIP * KEY_BLOCK // 2
    pairs = slopes + STRIP * KEY_BLOCK // 2
    tables = pairs + STRIP * KEY_BLOCK // 2
    panel_at, sums_at = address(work, panel), address(work, sums)

    # Bytes from a token to the next, and to its first head that counts here.
    pitch, key_pitch = 4 * heads * size, 4 * groups * size
    chosen, key_chosen = 4 * group * ratio * size, 4 * group * size
    row = start + first
    skipped = row * pitch + chosen
    clear(address(work, tables), tall // SQUARE * QUERY_TABLE)
    gather_chunk(address(out, 0) + skipped, pitch, count, ratio, size, ONE, sums_at, width, tall)
    gather_chunk(address(dout, 0) + skipped, pitch, count, ratio, size, ONE, panel_at, width, tall)
    for i in range(rows):
        table = tables + i // SQUARE * QUERY_TABLE + i % SQUARE
        work[table] = -lse[row + i // ratio, group * ratio + i % ratio] * LOG2_E_FLOAT
        work[table + SQUARE] = dot_rows(work, sums + i * width, panel + i * width, width)
        work[table + 2 * SQUARE] = np.float32(i // ratio)
    split_right(panel_at, address(work, turned_gradients), tall, width)
    pack_right(panel_at, address(work, gradients), tall, width)
    gather_chunk(address(q, 0) + skipped, pitch, count, ratio, size, scale, panel_at, width, tall)
    split_right(panel_at, address(work, turned_queries), tall, width)
    pack_right(panel_at, address(work, queries), tall, width)
    clear(sums_at, tall * width)

    position = context + first
    stop = position + count
    earliest_block = 0 if window <= 0 else max(0, position - window + 1) // KEY_BLOCK * KEY_BLOCK
    report_progress(progress, task, earliest_block)
    oldest = 0
    tiles_configure()
    for block in range(earliest_block, stop, KEY_BLOCK):
        depth = min(KEY_BLOCK, stop - block)
        shared = min(max(context - block, 0), depth)
        shared_at = (context_row + block) * key_pitch + key_chosen
        own_at = (own_row + block + shared - context) * key_pitch + key_chosen
        lower = panel_at + 4 * shared * width
        clear(panel_at + 4 * depth * width, (KEY_BLOCK - depth) * width)
        gather(address(v, 0) + shared_at, key_pitch, shared, size, ONE, panel_at, width)
        gather(address(v, 0) + own_at, key_pitch, depth - shared, size, ONE, lower, width)
        split_left(panel_at, address(work, values), KEY_BLOCK, width)
        gather(address(k, 0) + shared_at, key_pitch, shared, size, ONE, panel_at, width)
        gather(address(k, 0) + own_at, key_pitch, depth - shared, size, ONE, lower, width)
        split_left(panel_at, address(work, keys), KEY_BLOCK, width)
        pack_turned(panel_at, address(work, turned_keys), KEY_BLOCK, width, address(work, scores))
        clear(address(work, key_sums), 2 * KEY_BLOCK * width)
        # Positions count from the chunk's first query.
        key = block - position
        for strip in range(0, tall, STRIP):
            squares = min(STRIP, tall - strip) // SQUARE
            # Each round multiplies a square and softens the one before.
            hidden, target = ALL, address(work, scores)
            mine, table, weights_at, slopes_at, pairs_at = 0, 0, 0, 0, 0
            for n in range(2 * squares + 1):
                following, i, half = ALL, strip + n // 2 * SQUARE, n % 2
                if n < 2 * squares:
                    earliest, latest = i // ratio, min(i + SQUARE - 1, rows - 1) // ratio
                    following = what_is_hidden(key + SQUARE * half, earliest, latest, window)
                    if following == ALL:
                        continue
                before = 2 * address(work, scores) + 2 * SQUARE_BYTES - target
                if softcap > ZERO and hidden != ALL:
                    cap(before, table, softcap)
                if n < 2 * squares:
                    operand = TILE_PAIR * 2 * half * steps
                    multiply(
                        address(work, keys) + operand,
                        address(work, turned_queries) + 4 * i * width,
                        address(work, values) + operand,
                        address(work, turned_gradients) + 4 * i * width,
                        target,
                        steps,
                        0 if hidden == ALL else HALF,
                        hidden,
                        before,
                        table,
                        weights_at,
                        slopes_at,
                        pairs_at,
                        mine,
                        window,
                    )
                elif hidden != ALL:
                    soften(0, HALF, hidden, before, table, weights_at, slopes_at, pairs_at, mine, window)
                hidden, target, mine = following, before, key + SQUARE * half
                table = address(work, tables + i // SQUARE * QUERY_TABLE)
                tile = TILE_BYTES * (2 * half * SQUARES + n // 2)
                weights_at, slopes_at = address(work, weights) + tile, address(work, slopes) + tile
                pairs_at = address(work, pairs) + 2 * TILE_BYTES * n
            for c in range(squares):
                i = strip + SQUARE * c
                earliest, latest = i // ratio, min(i + SQUARE - 1, rows - 1) // ratio
                low, high = 2, 0
                for half in range(2):
                    if what_is_hidden(key + SQUARE * half, earliest, latest, window) != ALL:
                        low, high = min(low, half), half + 1
                for d in range(0, width, STEP):
                    add_square(
                        address(work, turned_keys) + TILE_BYTES * (d // HALF * 2 + low),
                        2 * TILE_BYTES,
                        address(work, pairs) + 2 * TILE_BYTES * (2 * c + low),
                        2 * TILE_BYTES,
                        sums_at + 4 * i * width + 4 * SQUARE * d,
                        4 * SQUARE,
                        high - low,
                    )
            for half in range(2):
                low, high = squares, 0
                for c in range(squares):
                    i = strip + SQUARE * c
                    earliest, latest = i // ratio, min(i + SQUARE - 1, rows - 1) // ratio
                    if what_is_hidden(key + SQUARE * half, earliest, latest, window) != ALL:
                        low, high = min(low, c), c + 1
                tile = TILE_BYTES * (2 * half * SQUARES + low)
                for d in range(0, width, STEP):
                    operand = 2 * (strip + SQUARE * low) * width + TILE_BYTES * (d // HALF)
                    target = 4 * (SQUARE * half * width + d)
                    add_square(
                        address(work, weights) + tile,
                        SQUARES * TILE_BYTES,
                        address(work, gradients) + operand,
                        2 * SQUARE * width,
                        address(work, value_sums) + target,
                        4 * width,
                        high - low,
                    )
                    add_square(
                        address(work, slopes) + tile,
                        SQUARES * TILE_BYTES,
                        address(work, queries) + operand,
                        2 * SQUARE * width,
                        address(work, key_sums) + target,
                        4 * width,
                        high - low,
                    )
        oldest = wait_for_turn(progress, segments, chunks, oldest, task, block)
        for sums_of, target in ((key_sums, address(dk, 0)), (value_sums, address(dv, 0))):
            source = address(work, sums_of)
            scatter_add(source, width, shared, size, target + shared_at, key_pitch)
            source += 4 * shared * width
            scatter_add(source, width, depth - shared, size, target + own_at, key_pitch)
        report_progress(progress, task, block + KEY_BLOCK)
    tiles_release()
    report_progress(progress, task, FINISHED)

    for i in range(0, tall, HALF):
        source = sums + i // SQUARE * SQUARE * width + i % SQUARE
        for d in range(0, width, HALF):
            transpose_square(work, source + SQUARE * d, SQUARE, work, panel + i * width + d, width)
    for i in range(count):
        source = panel_at + 4 * i * ratio * width
        scatter(source, width, ratio, size, scale, address(dq, 0) + skipped + i * pitch, 4 * size)


call_chunk_gradient = indirect_call(CHUNK_GRADIENT)
CHUNK_GRADIENT_ADDRESS = compiled_address(chunk_gradient, CHUNK_GRADIENT)


@njit(
    NONE(
        *(INT, IN3, IN3, IN3, IN3, IN3, IN2, WHOLE2, WHOLE2, INT, F32, INT, F32, OUT3, OUT3, OUT3),
        *(OUT1, INT, COUNTER, COUNTER, INT),
    ),
    **PARALLEL,
)
def tile_gradients(
    kernel: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    segments: Any,
    chunks: Any,
    chunk: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    work: Any,
    stride: Any,
    progress: Any,
    counter: Any,
    threads: Any,
) -> None:
    """All tasks. Thread n works in work[n · stride :]; `counter` and `progress`, one a task, are zeros."""
    tasks = chunks.shape[0]
    for n in prange(threads):
        base = np.int64(n * stride)
        ticket = take_ticket(counter)
        while ticket < tasks * k.shape[1]:
            group = ticket // tasks
            call_chunk_gradient(
                kernel,
                dout,
                q,
                k,
                v,
                out,
                lse,
                segments,
                chunks,
                ticket % tasks,
                chunk,
                group,
                scale,
                window,
                softcap,
                dq,
                dk,
                dv,
                work,
                base,
                progress[group * tasks : (group + 1) * tasks],
            )
            ticket = take_ticket(counter)
