"""What the threads of a decoding pass do: `work` goes through all phases of all blocks.

One parallel region serves the whole stack of blocks. Between phases threads wait for each other by
counters in memory, which takes a fraction of a microsecond where a parallel region takes several. Tasks are
handed out by ticket, and a thread waits only for tasks that another has begun: a thread that comes late, or
never, makes a pass slower and does not stop it.

A product treats 16 rows of a weight at a time, by the functions of `_rows`; so does the second product of
an adapter. Sums run over inputs in their order and a
token's lanes are its own: a row of the result depends on that row alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from . import _stack_layout as at
from ._math_common import SERIAL
from ._math_gated import gate_sigmoid
from ._math_lanes import exp_lanes, fill_lanes, max_lanes, maximum, multiply_add, sum_lanes, tanh_lanes
from ._rows_activations import copy_block, round_block
from ._rows_kinds import BLOCK, FLOAT_BLOCK, FLOAT_RECORD, RECORD
from ._simd_memory import address, call, peek, poke
from ._simd_rows import ROWS
from ._stack_memory import (
    add_shared,
    dot_rows,
    fetch_line,
    halves_at,
    lanes_at,
    number,
    pause,
    put_halves,
    put_lanes,
    read_shared,
    word,
)

LANE_BYTES = 4 * ROWS
PATIENCE = 2000
"""Looks at a counter before a waiting thread lets others run."""
KEYS_TOGETHER = 8
ZERO, ONE = np.float32(0.0), np.float32(1.0)
LOWEST = np.float32(-np.inf)
NEGLIGIBLE = np.float32(1e-26)


@njit(**SERIAL)
def _zero(place: Any, vectors: Any) -> None:
    for i in range(vectors):
        put_lanes(place + LANE_BYTES * i, fill_lanes(ZERO))


@njit(**SERIAL)
def _reciprocal_root(row: Any, size: Any, epsilon: Any) -> Any:
    """1 / sqrt(mean of squares + epsilon)."""
    first, second = fill_lanes(ZERO), fill_lanes(ZERO)
    for i in range(0, size - ROWS, 2 * ROWS):
        x, y = lanes_at(row + 4 * i), lanes_at(row + 4 * i + LANE_BYTES)
        first, second = multiply_add(x, x, first), multiply_add(y, y, second)
    if size // ROWS % 2:
        x = lanes_at(row + 4 * (size - ROWS))
        first = multiply_add(x, x, first)
    mean = sum_lanes(first + second) / np.float32(size)
    return ONE / np.sqrt(mean + epsilon)


@njit(**SERIAL)
def _normalise(row: Any, weight: Any, size: Any, epsilon: Any, out: Any) -> None:
    """out = the norm of `row`, which it may be."""
    factor = fill_lanes(_reciprocal_root(row, size, epsilon))
    for i in range(0, 4 * size, LANE_BYTES):
        put_lanes(out + i, lanes_at(row + i) * factor * lanes_at(weight + i))


@njit(**SERIAL)
def _low_rank(member: Any, row: Any, size: Any, tokens: Any, token: Any) -> None:
    """hidden = scale · A·row, as records of 8 float32, (block, token), the last filled up with zeros."""
    a, rank, hidden = word(member, at.ADAPTER_A), word(member, at.RANK), word(member, at.HIDDEN)
    scale = number(member, at.ADAPTER_SCALE)
    for j in range(0, rank, 4):
        place = hidden + FLOAT_RECORD * (j // FLOAT_BLOCK * tokens + token) + 4 * (j % FLOAT_BLOCK)
        first = a + 4 * size * j
        # Rows beyond the last stand for it, and are not stored.
        second = a + 4 * size * min(j + 1, rank - 1)
        third = a + 4 * size * min(j + 2, rank - 1)
        fourth = a + 4 * size * min(j + 3, rank - 1)
        s0, s1, s2, s3 = fill_lanes(ZERO), fill_lanes(ZERO), fill_lanes(ZERO), fill_lanes(ZERO)
        for i in range(0, 4 * size, LANE_BYTES):
            x = lanes_at(row + i)
            s0 = multiply_add(lanes_at(first + i), x, s0)
            s1 = multiply_add(lanes_at(second + i), x, s1)
            s2 = multiply_add(lanes_at(third + i), x, s2)
            s3 = multiply_add(lanes_at(fourth + i), x, s3)
        poke(place, scale * sum_lanes(s0))
        poke(place + 4, scale * sum_lanes(s1) if j + 1 < rank else ZERO)
        poke(place + 8, scale * sum_lanes(s2) if j + 2 < rank else ZERO)
        poke(place + 12, scale * sum_lanes(s3) if j + 3 < rank else ZERO)


@njit(**SERIAL)
def _rows(state: Any, phase: Any, token: Any) -> None:
    tokens, size = word(state, at.TOKENS), word(phase, at.ROWS_WIDTH)
    source, delta = word(phase, at.ROWS_SOURCE), word(phase, at.ROWS_DELTA)
    epsilon = number(phase, at.ROWS_EPSILON)
    if source == 0:
        source = word(state, at.RESIDUAL)
    row = source + 4 * size * token
    if delta:
        delta += 4 * size * token
        if word(phase, at.ROWS_DELTA_NORM):
            _normalise(delta, word(phase, at.ROWS_DELTA_NORM), size, epsilon, delta)
        for i in range(0, 4 * size, LANE_BYTES):
            put_lanes(row + i, lanes_at(row + i) + lanes_at(delta + i))
    if word(phase, at.ROWS_NORM):
        normed = word(phase, at.ROWS_NORMED) + 4 * size * token
        _normalise(row, word(phase, at.ROWS_NORM), size, epsilon, normed)
        row = normed
    for c in range(word(phase, at.ROWS_CONVERSIONS)):
        bias = word(phase, at.ROWS_CONVERSION + 2 * c)
        records = word(phase, at.ROWS_CONVERSION + 2 * c + 1)
        if bias == at.FLOAT_RECORDS:
            for b in range(size // FLOAT_BLOCK):
                copy_block(row + FLOAT_RECORD * b, records + FLOAT_RECORD * (b * tokens + token))
        else:
            for b in range(size // BLOCK):
                round_block(row + 4 * BLOCK * b, records + RECORD * (b * tokens + token), bias)
    first = word(phase, at.ROWS_FIRST_MEMBER)
    for m in range(first, first + word(phase, at.ROWS_MEMBERS)):
        member = word(state, at.MEMBERS) + 8 * at.MEMBER_WORDS * m
        if word(member, at.RANK):
            _low_rank(member, row, size, tokens, token)


@njit(**SERIAL)
def _add_low_rank(state: Any, member: Any, n: Any, tokens: Any, sums: Any) -> None:
    """sums += B·hidden for 16 rows from n on."""
    rank, hidden = word(member, at.RANK), word(member, at.HIDDEN)
    b = word(member, at.ADAPTER_B) + 4 * rank * n
    if rank % FLOAT_BLOCK == 0:
        call(word(state, at.UNPACK_F32), b, 4 * rank, rank, hidden, tokens, sums)
        return
    for token in range(tokens):
        for row in range(ROWS):
            place = sums + LANE_BYTES * token + 4 * row
            total = peek(place)
            for j in range(rank):
                record = hidden + FLOAT_RECORD * (j // FLOAT_BLOCK * tokens + token)
                total += peek(b + 4 * (rank * row + j)) * peek(record + 4 * (j % FLOAT_BLOCK))
            poke(place, total)


@njit(**SERIAL)
def _group(state: Any, member: Any, n: Any, tokens: Any, sums: Any) -> None:
    """Lanes of 16 outputs from n on, one a token."""
    _zero(sums, tokens)
    row_bytes = word(member, at.ROW_BYTES)
    call(
        word(member, at.UNPACK),
        word(member, at.DATA) + n * row_bytes,
        row_bytes,
        word(member, at.BLOCKS),
        word(member, at.RECORDS),
        tokens,
        sums,
    )
    if word(member, at.RANK):
        _add_low_rank(state, member, n, tokens, sums)
    if word(member, at.BIAS):
        bias = lanes_at(word(member, at.BIAS) + 4 * n)
        for token in range(tokens):
            put_lanes(sums + LANE_BYTES * token, lanes_at(sums + LANE_BYTES * token) + bias)


@njit(**SERIAL)
def _product(state: Any, phase: Any, task: Any, scratch: Any) -> None:
    tokens, gate = word(state, at.TOKENS), word(phase, at.PRODUCT_GATE)
    first = task * word(phase, at.PRODUCT_TASK_GROUPS)
    stop = min(first + word(phase, at.PRODUCT_TASK_GROUPS), word(phase, at.PRODUCT_GROUPS))
    member = word(state, at.MEMBERS) + 8 * at.MEMBER_WORDS * word(phase, at.PRODUCT_FIRST_MEMBER)
    left = word(phase, at.PRODUCT_MEMBERS) - 1
    other = member + 8 * at.MEMBER_WORDS
    for g in range(first, stop):
        if gate == 0:
            while left and g >= word(member + 8 * at.MEMBER_WORDS, at.FIRST_GROUP):
                member += 8 * at.MEMBER_WORDS
                left -= 1
        outputs, out = word(member, at.OUTPUTS), word(member, at.OUT)
        # The last groups overlap where the rows are not a multiple of 16: computed twice, to the same bits.
        n = min(ROWS * (g - word(member, at.FIRST_GROUP)), outputs - ROWS)
        _group(state, member, n, tokens, scratch)
        if gate:
            up = scratch + LANE_BYTES * tokens
            _group(state, other, n, tokens, up)
            for token in range(tokens):
                x = lanes_at(scratch + LANE_BYTES * token)
                product = x * gate_sigmoid(gate - 1, x) * lanes_at(up + LANE_BYTES * token)
                put_lanes(out + 4 * (token * outputs + n), product)
        else:
            for token in range(tokens):
                put_lanes(out + 4 * (token * outputs + n), lanes_at(scratch + LANE_BYTES * token))


@njit(**SERIAL)
def _turn(head: Any, cos: Any, sin: Any, half: Any, interleaved: Any) -> None:
    step, apart = (8, 4) if interleaved else (4, 4 * half)
    for i in range(half):
        place = head + step * i
        x, y = peek(place), peek(place + apart)
        c, s = peek(cos + 4 * i), peek(sin + 4 * i)
        poke(place, x * c - y * s)
        poke(place + apart, x * s + y * c)


@njit(**SERIAL)
def _store_row(source: Any, size: Any, narrow: Any, target: Any) -> None:
    for i in range(0, size, ROWS):
        if narrow:
            put_halves(target + 2 * i, lanes_at(source + 4 * i))
        else:
            put_lanes(target + 4 * i, lanes_at(source + 4 * i))


@njit(**SERIAL)
def _rotate(state: Any, phase: Any, token: Any) -> None:
    span = word(state, at.SPANS) + 8 * at.SPAN_WORDS * token
    size, half = word(phase, at.ROTATE_SIZE), word(phase, at.ROTATE_HALF)
    interleaved, epsilon = word(phase, at.ROTATE_INTERLEAVED), number(phase, at.ROTATE_EPSILON)
    cos = word(phase, at.ROTATE_COS) + 4 * half * word(span, at.POSITION)
    sin = word(phase, at.ROTATE_SIN) + 4 * half * word(span, at.POSITION)
    heads, kv_heads = word(phase, at.ROTATE_HEADS), word(phase, at.ROTATE_KV_HEADS)
    q = word(phase, at.ROTATE_Q) + 4 * heads * size * token
    for h in range(heads):
        head = q + 4 * size * h
        if word(phase, at.ROTATE_Q_NORM):
            _normalise(head, word(phase, at.ROTATE_Q_NORM), size, epsilon, head)
        _turn(head, cos, sin, half, interleaved)
    width = kv_heads * size
    k = word(phase, at.ROTATE_K) + 4 * width * token
    for h in range(kv_heads):
        head = k + 4 * size * h
        if word(phase, at.ROTATE_K_NORM):
            _normalise(head, word(phase, at.ROTATE_K_NORM), size, epsilon, head)
        _turn(head, cos, sin, half, interleaved)
    narrow = word(phase, at.ROTATE_NARROW)
    place = (2 if narrow else 4) * width * (word(span, at.OWN_START) + word(span, at.OWN_INDEX))
    _store_row(k, width, narrow, word(phase, at.ROTATE_KEYS) + place)
    v = word(phase, at.ROTATE_V) + 4 * width * token
    _store_row(v, width, narrow, word(phase, at.ROTATE_VALUES) + place)


@njit(**SERIAL)
def _score(
    phase: Any,
    keys: Any,
    row: Any,
    count: Any,
    q: Any,
    first: Any,
    stop: Any,
    wide: Any,
    scores: Any,
    pitch: Any,
) -> None:
    """Products of queries [first, stop) with `count` keys from `row` on, to `scores`, `pitch` bytes a head.

    `wide` is room for 16 keys of a head in float32.
    """
    size, kv_heads = word(phase, at.ATTEND_SIZE), word(phase, at.ATTEND_KV_HEADS)
    narrow, shared = word(phase, at.ATTEND_NARROW), word(phase, at.ATTEND_HEADS) // kv_heads
    width = (2 if narrow else 4) * size
    last = row + count
    while row < last:
        # No key is read beyond the end of the cache.
        base = min(row, word(phase, at.ATTEND_ROWS) - ROWS)
        taken = min(base + ROWS, last) - row
        if stop - first == word(phase, at.ATTEND_HEADS):
            # 16 rows are one stretch of memory, read head by head: too many streams to be foreseen.
            start = keys + (base + ROWS) * kv_heads * width
            for line in range(start, start + ROWS * kv_heads * width, LANE_BYTES):
                fetch_line(line)
        h = first
        while h < stop:
            kv_head = h // shared
            place, stride = keys + (base * kv_heads + kv_head) * width, width * kv_heads
            if narrow:
                for r in range(ROWS):
                    for i in range(0, size, ROWS):
                        put_lanes(wide + 4 * (size * r + i), halves_at(place + stride * r + 2 * i))
                place, stride = wide, 4 * size
            for one in range(h, min(stop, (kv_head + 1) * shared)):
                target = scores + pitch * (one - first)
                products = dot_rows(q + 4 * size * one, place, stride, size)
                if base == row:
                    put_lanes(target, products)
                else:
                    put_lanes(wide + 4 * ROWS * size, products)
                    for i in range(taken):
                        poke(target + 4 * i, peek(wide + 4 * (ROWS * size + row - base + i)))
            h = (kv_head + 1) * shared
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
    phase: Any, values: Any, row: Any, count: Any, scores: Any, pitch: Any, first: Any, stop: Any, out: Any
) -> None:
    """out (H, size) of heads [first, stop) += the weighted values of `count` rows, in their order."""
    size, kv_heads = word(phase, at.ATTEND_SIZE), word(phase, at.ATTEND_KV_HEADS)
    narrow, shared = word(phase, at.ATTEND_NARROW), word(phase, at.ATTEND_HEADS) // kv_heads
    width = (2 if narrow else 4) * size
    stride = width * kv_heads
    place = values + row * stride
    whole = count - count % KEYS_TOGETHER
    for j in range(0, count, KEYS_TOGETHER):
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
                    target, weights = out + 4 * (size * h + i), scores + pitch * (h - first)
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
                        for one in range(h, end):
                            target, weights = out + 4 * (size * one + i), scores + pitch * (one - first)
                            weight = fill_lanes(peek(weights + 4 * r))
                            put_lanes(target, multiply_add(weight, v0, lanes_at(target)))
            h = end
        place += KEYS_TOGETHER * stride
        scores += 4 * KEYS_TOGETHER


@njit(**SERIAL)
def _attend(state: Any, phase: Any, task: Any, scratch: Any) -> None:
    size, heads = word(phase, at.ATTEND_SIZE), word(phase, at.ATTEND_HEADS)
    parts = word(state, at.PARTS)
    token, part = task // parts, task % parts
    first, stop = part * heads // parts, (part + 1) * heads // parts
    span = word(state, at.SPANS) + 8 * at.SPAN_WORDS * token
    context, own = word(span, at.CONTEXT_LENGTH), word(span, at.OWN_INDEX) + 1
    # With a window the earliest positions are not seen.
    hidden = 0
    if word(phase, at.ATTEND_WINDOW):
        hidden = max(0, context + own - word(phase, at.ATTEND_WINDOW))
    skipped = min(hidden, context)
    context_row, context = word(span, at.CONTEXT_START) + skipped, context - skipped
    own_row, own = word(span, at.OWN_START) + hidden - skipped, own - (hidden - skipped)
    totals, wide = scratch, scratch + LANE_BYTES * ((heads + ROWS - 1) // ROWS)
    scores, pitch = wide + 4 * ROWS * (size + 1), 4 * word(state, at.SCORES)
    q = word(phase, at.ATTEND_Q) + 4 * size * heads * token
    out = word(phase, at.ATTEND_OUT) + 4 * size * heads * token
    keys, values = word(phase, at.ATTEND_KEYS), word(phase, at.ATTEND_VALUES)
    _score(phase, keys, context_row, context, q, first, stop, wide, scores, pitch)
    _score(phase, keys, own_row, own, q, first, stop, wide, scores + 4 * context, pitch)
    scale, softcap = number(phase, at.ATTEND_SCALE), number(phase, at.ATTEND_SOFTCAP)
    for h in range(stop - first):
        poke(totals + 4 * h, _softmax(scores + pitch * h, context + own, scale, softcap))
    _zero(out + 4 * size * first, (stop - first) * size // ROWS)
    _mix(phase, values, context_row, context, scores, pitch, first, stop, out)
    _mix(phase, values, own_row, own, scores + 4 * context, pitch, first, stop, out)
    for h in range(first, stop):
        factor = fill_lanes(peek(totals + 4 * (h - first)))
        for i in range(4 * size * h, 4 * size * (h + 1), LANE_BYTES):
            put_lanes(out + i, lanes_at(out + i) * factor)


@njit(**SERIAL)
def _task_count(state: Any, phase: Any) -> Any:
    op, tokens = word(phase, at.OP), word(state, at.TOKENS)
    if op == at.PRODUCT:
        each = word(phase, at.PRODUCT_TASK_GROUPS)
        return (word(phase, at.PRODUCT_GROUPS) + each - 1) // each
    if op == at.ATTEND:
        return tokens * word(state, at.PARTS)
    return tokens


def work(state: Any, thread: Any) -> None:
    """All phases of a pass, as one of its threads."""
    scratch = word(state, at.SCRATCH) + thread * word(state, at.SCRATCH_BYTES)
    for p in range(word(state, at.PHASES)):
        phase = word(state, at.PROGRAM) + 8 * at.PHASE_WORDS * p
        op, tasks = word(phase, at.OP), _task_count(state, phase)
        tickets = word(state, at.CONTROL) + at.CONTROL_BYTES * p
        done = 0
        task = add_shared(tickets, 1)
        while task < tasks:
            if op == at.ROWS:
                _rows(state, phase, task)
            elif op == at.PRODUCT:
                _product(state, phase, task, scratch)
            elif op == at.ROTATE:
                _rotate(state, phase, task)
            else:
                _attend(state, phase, task, scratch)
            done += 1
            task = add_shared(tickets, 1)
        if done:
            add_shared(tickets + at.FINISHED_AT, done)
        looks = 0
        while read_shared(tickets + at.FINISHED_AT) < tasks:
            pause()
            looks += 1
            if looks == PATIENCE:
                looks = 0
                call(word(state, at.YIELD))


@njit(nogil=True, cache=True, parallel=True)
def run_stack(worker: Any, state: Any, threads: Any) -> None:
    """One pass on `threads` threads; `worker` is the address of `work`."""
    for thread in prange(threads):
        call(worker, address(state, 0), thread)
