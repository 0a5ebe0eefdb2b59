"""Attention of a decoding pass: tokens of one context over it, read once for all, and over keys of their own.

A key's score and the order in which values are added are a token's own, so its bits do not depend on the
others, nor on where the context ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from . import _stack_layout as at
from ._math_common import SERIAL
from ._math_lanes import exp_lanes, fill_lanes, max_lanes, maximum, multiply_add, sum_lanes, tanh_lanes
from ._simd_memory import peek, poke
from ._simd_rows import ROWS
from ._stack_memory import dot_rows, fetch_line, halves_at, lanes_at, number, put_lanes, word

LANE_BYTES = 4 * ROWS
KEYS_TOGETHER = 8
ZERO, ONE = np.float32(0.0), np.float32(1.0)
LOWEST = np.float32(-np.inf)
NEGLIGIBLE = np.float32(1e-26)


@njit(**SERIAL)
def zero_lanes(place: Any, vectors: Any) -> None:
    """Zero so many times 16 float32."""
    for i in range(vectors):
        put_lanes(place + LANE_BYTES * i, fill_lanes(ZERO))


@njit(**SERIAL)
def _fetch_rows(place: Any, first: Any, count: Any, stride: Any, skipped: Any, needed: Any) -> None:
    """Begin to load `needed` bytes of `count` rows from row `first` on, behind the `skipped` of each."""
    start = place + stride * first + skipped
    for row in range(start, start + stride * count, stride):
        for line in range(row, row + needed, LANE_BYTES):
            fetch_line(line)


@njit(**SERIAL)
def _score(
    phase: Any,
    row: Any,
    count: Any,
    order: Any,
    tokens: Any,
    first: Any,
    stop: Any,
    wide: Any,
    scores: Any,
    pitch: Any,
) -> None:
    """Products of queries [first, stop) of `tokens` tokens with `count` keys from `row` on.

    `order` are the numbers of the tokens. Scores of a token's heads follow each other at `scores`, `pitch`
    bytes apart. `wide` is room for 16 keys of a head in float32.
    """
    size, kv_heads = word(phase, at.ATTEND_SIZE), word(phase, at.ATTEND_KV_HEADS)
    heads, keys = word(phase, at.ATTEND_HEADS), word(phase, at.ATTEND_KEYS)
    narrow, shared = word(phase, at.ATTEND_NARROW), heads // kv_heads
    width = (2 if narrow else 4) * size
    needed = ((stop - 1) // shared - first // shared + 1) * width
    last = row + count
    while row < last:
        # No key is read beyond the end of the cache.
        base = min(row, word(phase, at.ATTEND_ROWS) - ROWS)
        taken = min(base + ROWS, last) - row
        # Read head by head, rows are too many streams to be foreseen.
        _fetch_rows(keys, base + ROWS, ROWS, kv_heads * width, first // shared * width, needed)
        h = first
        while h < stop:
            kv_head = h // shared
            end = min(stop, (kv_head + 1) * shared)
            place, stride = keys + (base * kv_heads + kv_head) * width, width * kv_heads
            if narrow:
                for r in range(ROWS):
                    for i in range(0, size, ROWS):
                        put_lanes(wide + 4 * (size * r + i), halves_at(place + stride * r + 2 * i))
                place, stride = wide, 4 * size
            for t in range(tokens):
                q = word(phase, at.ATTEND_Q) + 4 * size * (heads * word(order, t) + h)
                target = scores + pitch * ((stop - first) * t + h - first)
                for _ in range(h, end):
                    products = dot_rows(q, place, stride, size)
                    if base == row:
                        put_lanes(target, products)
                    else:
                        put_lanes(wide + 4 * ROWS * size, products)
                        for i in range(taken):
                            poke(target + 4 * i, peek(wide + 4 * (ROWS * size + row - base + i)))
                    q += 4 * size
                    target += pitch
            h = end
        row += taken
        scores += 4 * taken


@njit(**SERIAL)
def _softmax(scores: Any, count: Any, scale: Any, softcap: Any) -> Any:
    """Replace scores by exp(score − highest); returns 1 / their sum. 16 elements behind are overwritten."""
    end = scores + 4 * count
    place = scores
    while place < end:
        z = lanes_at(place) * scale
        if softcap > ZERO:
            z = tanh_lanes(z * (ONE / softcap)) * softcap
        put_lanes(place, z)
        place += LANE_BYTES
    put_lanes(end, fill_lanes(LOWEST))
    highest, place = fill_lanes(LOWEST), scores
    while place < end:
        highest = maximum(highest, lanes_at(place))
        place += LANE_BYTES
    highest = fill_lanes(max_lanes(highest))
    total, place = fill_lanes(ZERO), scores
    while place < end:
        # Below 1e-26 of the largest a weight is 0: its products would be slow denormal numbers.
        z = maximum(exp_lanes(lanes_at(place) - highest) - fill_lanes(NEGLIGIBLE), fill_lanes(ZERO))
        put_lanes(place, z)
        total = total + z
        place += LANE_BYTES
    return ONE / sum_lanes(total)


@njit(**SERIAL)
def _value(narrow: Any, place: Any, i: Any) -> Any:
    return halves_at(place + 2 * i) if narrow else lanes_at(place + 4 * i)


@njit(**SERIAL)
def _mix(
    phase: Any,
    row: Any,
    count: Any,
    order: Any,
    tokens: Any,
    first: Any,
    stop: Any,
    scores: Any,
    pitch: Any,
) -> None:
    """Add to the results of heads [first, stop) the weighted values of `count` rows, in their order.

    Arguments are those of `_score`.
    """
    size, kv_heads = word(phase, at.ATTEND_SIZE), word(phase, at.ATTEND_KV_HEADS)
    heads, out = word(phase, at.ATTEND_HEADS), word(phase, at.ATTEND_OUT)
    narrow, shared = word(phase, at.ATTEND_NARROW), heads // kv_heads
    width = (2 if narrow else 4) * size
    stride = width * kv_heads
    place = word(phase, at.ATTEND_VALUES) + row * stride
    whole = count - count % KEYS_TOGETHER
    needed = ((stop - 1) // shared - first // shared + 1) * width
    for j in range(0, count, KEYS_TOGETHER):
        _fetch_rows(place, 2 * KEYS_TOGETHER, KEYS_TOGETHER, stride, first // shared * width, needed)
        h = first
        while h < stop:
            kv_head = h // shared
            end = min(stop, (kv_head + 1) * shared)
            v = place + width * kv_head
            if j < whole:
                for i in range(0, size, ROWS):
                    v0, v1 = _value(narrow, v, i), _value(narrow, v + stride, i)
                    v2, v3 = _value(narrow, v + 2 * stride, i), _value(narrow, v + 3 * stride, i)
                    v4, v5 = _value(narrow, v + 4 * stride, i), _value(narrow, v + 5 * stride, i)
                    v6, v7 = _value(narrow, v + 6 * stride, i), _value(narrow, v + 7 * stride, i)
                    for t in range(tokens):
                        target = out + 4 * (size * (heads * word(order, t) + h) + i)
                        weights = scores + pitch * ((stop - first) * t + h - first)
                        for _ in range(h, end):
                            total = multiply_add(fill_lanes(peek(weights)), v0, lanes_at(target))
                            total = multiply_add(fill_lanes(peek(weights + 4)), v1, total)
                            total = multiply_add(fill_lanes(peek(weights + 8)), v2, total)
                            total = multiply_add(fill_lanes(peek(weights + 12)), v3, total)
                            total = multiply_add(fill_lanes(peek(weights + 16)), v4, total)
                            total = multiply_add(fill_lanes(peek(weights + 20)), v5, total)
                            total = multiply_add(fill_lanes(peek(weights + 24)), v6, total)
                            put_lanes(target, multiply_add(fill_lanes(peek(weights + 28)), v7, total))
                            target += 4 * size
                            weights += pitch
            else:
                for r in range(count - whole):
                    for i in range(0, size, ROWS):
                        v0 = _value(narrow, v + r * stride, i)
                        for t in range(tokens):
                            target = out + 4 * (size * (heads * word(order, t) + h) + i)
                            weights = scores + pitch * ((stop - first) * t + h - first) + 4 * r
                            for _ in range(h, end):
                                weight = fill_lanes(peek(weights))
                                put_lanes(target, multiply_add(weight, v0, lanes_at(target)))
                                target += 4 * size
                                weights += pitch
            h = end
        place += KEYS_TOGETHER * stride
        scores += 4 * KEYS_TOGETHER


@njit(**SERIAL)
def _hidden(phase: Any, span: Any) -> Any:
    """Earliest positions that a token does not see: those before its window."""
    window = word(phase, at.ATTEND_WINDOW)
    seen = word(span, at.CONTEXT_LENGTH) + word(span, at.OWN_INDEX) + 1
    return max(0, seen - window) if window else 0


@njit(**SERIAL)
def attend(state: Any, phase: Any, task: Any, scratch: Any) -> None:
    """The tokens of a task see one context, which is read once for all, and each some rows of its own."""
    size, heads = word(phase, at.ATTEND_SIZE), word(phase, at.ATTEND_HEADS)
    entry = word(state, at.TASKS) + 8 * at.TASK_WORDS * task
    order, tokens = word(state, at.ORDER) + 8 * word(entry, at.TASK_FIRST), word(entry, at.TASK_TOKENS)
    first, stop = word(entry, at.TASK_HEAD), word(entry, at.TASK_HEAD_STOP)
    spans, span_bytes = word(state, at.SPANS), 8 * at.SPAN_WORDS
    span = spans + span_bytes * word(order, 0)
    context_row, context = word(span, at.CONTEXT_START), word(span, at.CONTEXT_LENGTH)
    skipped = context
    for t in range(tokens):
        skipped = min(skipped, _hidden(phase, spans + span_bytes * word(order, t)))
    context_row, context = context_row + skipped, context - skipped
    totals, wide = scratch, scratch + 4 * ((tokens * heads + ROWS - 1) // ROWS * ROWS)
    pitch = 4 * word(state, at.SCORES)
    scores, each = wide + 4 * ROWS * (size + 1), pitch * (stop - first)
    scale, softcap = number(phase, at.ATTEND_SCALE), number(phase, at.ATTEND_SOFTCAP)
    _score(phase, context_row, context, order, tokens, first, stop, wide, scores, pitch)
    for t in range(tokens):
        span = spans + span_bytes * word(order, t)
        out = word(phase, at.ATTEND_OUT) + 4 * size * heads * word(order, t)
        hidden = _hidden(phase, span)
        own_hidden, unseen = max(0, hidden - context - skipped), min(hidden - skipped, context)
        own_row, own = word(span, at.OWN_START) + own_hidden, word(span, at.OWN_INDEX) + 1 - own_hidden
        mine = scores + each * t
        _score(phase, own_row, own, order + 8 * t, 1, first, stop, wide, mine + 4 * context, pitch)
        zero_lanes(out + 4 * size * first, (stop - first) * size // ROWS)
        for h in range(first, stop):
            total = _softmax(mine + 4 * unseen, context - unseen + own, scale, softcap)
            poke(totals + 4 * (heads * t + h), total)
            for j in range(unseen):
                poke(mine + 4 * j, ZERO)
            mine += pitch
    _mix(phase, context_row, context, order, tokens, first, stop, scores, pitch)
    for t in range(tokens):
        span = spans + span_bytes * word(order, t)
        own_hidden = max(0, _hidden(phase, span) - context - skipped)
        own_row, own = word(span, at.OWN_START) + own_hidden, word(span, at.OWN_INDEX) + 1 - own_hidden
        _mix(phase, own_row, own, order + 8 * t, 1, first, stop, scores + each * t + 4 * context, pitch)
        out = word(phase, at.ATTEND_OUT) + 4 * size * heads * word(order, t)
        for h in range(first, stop):
            factor = fill_lanes(peek(totals + 4 * (heads * t + h)))
            for i in range(4 * size * h, 4 * size * (h + 1), LANE_BYTES):
                put_lanes(out + i, lanes_at(out + i) * factor)
