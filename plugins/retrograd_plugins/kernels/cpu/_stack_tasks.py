"""What the threads of a decoding pass do: `work` goes through all phases of all blocks.

One parallel region serves the whole stack of blocks. Between phases threads wait for each other by
counters in memory, which takes a fraction of a microsecond where a parallel region takes several. Tasks are
handed out by ticket, and a thread waits only for tasks that another has begun: a thread that comes late, or
never, makes a pass slower and does not stop it. A thread begins with a stretch of tasks of its own, so that
weights it has fetched ahead are those it comes to, and then takes from the stretches of others.

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
from ._math_lanes import fill_lanes, multiply_add, sum_lanes
from ._rows_activations import copy_block, round_block
from ._rows_kinds import BLOCK, FLOAT_BLOCK, FLOAT_RECORD, RECORD
from ._simd_memory import address, call, peek, poke
from ._simd_rows import ROWS
from ._stack_attention import LANE_BYTES, attend, zero_lanes
from ._stack_memory import (
    add_shared,
    fetch_line,
    lanes_at,
    number,
    pause,
    put_halves,
    put_lanes,
    read_shared,
    word,
)

FETCHED = 8192
"""Bytes of a weight, at most, that are fetched before its product begins."""
PATIENCE = 2000
"""Looks at a counter before a waiting thread lets others run."""
ZERO, ONE = np.float32(0.0), np.float32(1.0)


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
def _put_hidden(member: Any, tokens: Any, token: Any, j: Any, s0: Any, s1: Any, s2: Any, s3: Any) -> None:
    """scale · sums of rows [j, j + 4) of A to hidden, zeros beyond the last row."""
    scale, rank = number(member, at.ADAPTER_SCALE), word(member, at.RANK)
    record = j // FLOAT_BLOCK * tokens + token
    place = word(member, at.HIDDEN) + FLOAT_RECORD * record + 4 * (j % FLOAT_BLOCK)
    poke(place, scale * sum_lanes(s0))
    poke(place + 4, scale * sum_lanes(s1) if j + 1 < rank else ZERO)
    poke(place + 8, scale * sum_lanes(s2) if j + 2 < rank else ZERO)
    poke(place + 12, scale * sum_lanes(s3) if j + 3 < rank else ZERO)


@njit(**SERIAL)
def _low_rank(member: Any, row: Any, size: Any, tokens: Any, token: Any) -> None:
    """hidden = scale · A·row, as records of 8 float32, (block, token), the last filled up with zeros."""
    a, rank = word(member, at.ADAPTER_A), word(member, at.RANK)
    for j in range(0, rank, 4):
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
        _put_hidden(member, tokens, token, j, s0, s1, s2, s3)


@njit(**SERIAL)
def _low_rank_of_four(member: Any, row: Any, size: Any, tokens: Any, token: Any) -> None:
    """`_low_rank` of tokens [token, token + 4): A is read once for all. Their sums are those of one alone."""
    a, rank = word(member, at.ADAPTER_A), word(member, at.RANK)
    zero = fill_lanes(ZERO)
    pitch = 4 * size
    for j in range(0, rank, 4):
        first = a + pitch * j
        second = a + pitch * min(j + 1, rank - 1)
        third = a + pitch * min(j + 2, rank - 1)
        fourth = a + pitch * min(j + 3, rank - 1)
        p0, p1, p2, p3 = zero, zero, zero, zero
        q0, q1, q2, q3 = zero, zero, zero, zero
        r0, r1, r2, r3 = zero, zero, zero, zero
        s0, s1, s2, s3 = zero, zero, zero, zero
        for i in range(0, pitch, LANE_BYTES):
            a0, a1, a2, a3 = (
                lanes_at(first + i),
                lanes_at(second + i),
                lanes_at(third + i),
                lanes_at(fourth + i),
            )
            x = lanes_at(row + i)
            p0, p1 = multiply_add(a0, x, p0), multiply_add(a1, x, p1)
            p2, p3 = multiply_add(a2, x, p2), multiply_add(a3, x, p3)
            x = lanes_at(row + pitch + i)
            q0, q1 = multiply_add(a0, x, q0), multiply_add(a1, x, q1)
            q2, q3 = multiply_add(a2, x, q2), multiply_add(a3, x, q3)
            x = lanes_at(row + 2 * pitch + i)
            r0, r1 = multiply_add(a0, x, r0), multiply_add(a1, x, r1)
            r2, r3 = multiply_add(a2, x, r2), multiply_add(a3, x, r3)
            x = lanes_at(row + 3 * pitch + i)
            s0, s1 = multiply_add(a0, x, s0), multiply_add(a1, x, s1)
            s2, s3 = multiply_add(a2, x, s2), multiply_add(a3, x, s3)
        _put_hidden(member, tokens, token, j, p0, p1, p2, p3)
        _put_hidden(member, tokens, token + 1, j, q0, q1, q2, q3)
        _put_hidden(member, tokens, token + 2, j, r0, r1, r2, r3)
        _put_hidden(member, tokens, token + 3, j, s0, s1, s2, s3)


@njit(**SERIAL)
def _row(state: Any, phase: Any, token: Any) -> Any:
    """What a phase of rows does for one token, but for adapters; the address of the row that they want."""
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
    return row


@njit(**SERIAL)
def _rows(state: Any, phase: Any, task: Any) -> None:
    tokens, size, each = word(state, at.TOKENS), word(phase, at.ROWS_WIDTH), word(state, at.ROWS_TOGETHER)
    token = task * each
    count = min(each, tokens - token)
    row = _row(state, phase, token)
    for t in range(1, count):
        _row(state, phase, token + t)
    first = word(phase, at.ROWS_FIRST_MEMBER)
    for m in range(first, first + word(phase, at.ROWS_MEMBERS)):
        member = word(state, at.MEMBERS) + 8 * at.MEMBER_WORDS * m
        if word(member, at.RANK):
            whole = count - count % 4
            for t in range(0, whole, 4):
                _low_rank_of_four(member, row + 4 * size * t, size, tokens, token + t)
            for t in range(whole, count):
                _low_rank(member, row + 4 * size * t, size, tokens, token + t)


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
    zero_lanes(sums, tokens)
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
    step, apart, done = 8, 4, 0
    if not interleaved:
        step, apart, done = 4, 4 * half, half // ROWS * ROWS
    for i in range(0, 4 * done, LANE_BYTES):
        x, y = lanes_at(head + i), lanes_at(head + apart + i)
        c, s = lanes_at(cos + i), lanes_at(sin + i)
        put_lanes(head + i, x * c - y * s)
        put_lanes(head + apart + i, x * s + y * c)
    for i in range(done, half):
        place = head + step * i
        first, second = peek(place), peek(place + apart)
        cosine, sine = peek(cos + 4 * i), peek(sin + 4 * i)
        poke(place, first * cosine - second * sine)
        poke(place + apart, first * sine + second * cosine)


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
def _task_count(state: Any, phase: Any) -> Any:
    op, tokens = word(phase, at.OP), word(state, at.TOKENS)
    if op == at.PRODUCT:
        each = word(phase, at.PRODUCT_TASK_GROUPS)
        return (word(phase, at.PRODUCT_GROUPS) + each - 1) // each
    if op == at.ATTEND:
        return word(state, at.ATTEND_TASKS)
    if op == at.ROWS:
        each = word(state, at.ROWS_TOGETHER)
        return (tokens + each - 1) // each
    return tokens


@njit(**SERIAL)
def _fetch_weights(state: Any, phase: Any, share: Any) -> None:
    """Begin to load the weights that a share of a phase of products begins with."""
    each, groups = word(phase, at.PRODUCT_TASK_GROUPS), word(phase, at.PRODUCT_GROUPS)
    tasks, shares = (groups + each - 1) // each, word(state, at.SHARES)
    g = each * (tasks * share // shares)
    member = word(state, at.MEMBERS) + 8 * at.MEMBER_WORDS * word(phase, at.PRODUCT_FIRST_MEMBER)
    members = word(phase, at.PRODUCT_MEMBERS)
    gate = word(phase, at.PRODUCT_GATE)
    if gate == 0:
        while members > 1 and g >= word(member + 8 * at.MEMBER_WORDS, at.FIRST_GROUP):
            member += 8 * at.MEMBER_WORDS
            members -= 1
        members = 1
    n = ROWS * (g - word(member, at.FIRST_GROUP))
    for m in range(members):
        other = member + 8 * at.MEMBER_WORDS * m
        row_bytes = word(other, at.ROW_BYTES)
        start = word(other, at.DATA) + n * row_bytes
        for place in range(start, start + min(ROWS * row_bytes, FETCHED), at.LINE_BYTES):
            fetch_line(place)


def work(state: Any, thread: Any) -> None:
    """All phases of a pass, as one of its threads."""
    scratch = word(state, at.SCRATCH) + thread * word(state, at.SCRATCH_BYTES)
    shares, phases = word(state, at.SHARES), word(state, at.PHASES)
    for p in range(phases):
        phase = word(state, at.PROGRAM) + 8 * at.PHASE_WORDS * p
        op, tasks = word(phase, at.OP), _task_count(state, phase)
        if op == at.ROWS and p + 1 < phases:
            _fetch_weights(state, phase + 8 * at.PHASE_WORDS, thread % shares)
        finished = word(state, at.CONTROL) + at.LINE_BYTES * (shares + 1) * p
        done = 0
        for turn in range(shares):
            share = (thread + turn) % shares
            tickets = finished + at.LINE_BYTES * (share + 1)
            first, stop = tasks * share // shares, tasks * (share + 1) // shares
            task = first + add_shared(tickets, 1)
            while task < stop:
                if op == at.ROWS:
                    _rows(state, phase, task)
                elif op == at.PRODUCT:
                    _product(state, phase, task, scratch)
                elif op == at.ROTATE:
                    _rotate(state, phase, task)
                else:
                    attend(state, phase, task, scratch)
                done += 1
                task = first + add_shared(tickets, 1)
        if done:
            add_shared(finished, done)
        looks = 0
        while read_shared(finished) < tasks:
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
