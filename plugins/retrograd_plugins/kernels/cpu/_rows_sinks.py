"""What becomes of blocks that were unpacked for sixteen rows: `add_block` and `add_floats`.

The functions of `_rows` end in one of them. Their first argument, a literal, is one of `_rows_kinds`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from ._rows_integers import Block, add_products, block_records, each_token
from ._rows_kinds import (
    BLOCK,
    FLOAT_BLOCK,
    FLOAT_RECORD,
    MULTIPLIED,
    RECORD,
    SCALE_AT,
    TILES,
    broadcast,
    fused,
)
from ._rows_tiles import multiply_tile, step_place, store_block, store_pair
from ._simd import F32, FLOATS, I64, WIDTH, compiled_form
from ._simd_rows import Words, is_words, literals, unpack

Array = npt.NDArray[Any]


def _block_typer(*args: Any) -> Any:
    if len(args) != 11:
        return None
    known = literals(*args[:3])
    rows, groups = args[7:9], args[9:]
    if known is None or not all(is_words(one) and one.count == 4 for one in rows):
        return None
    if any(set(one) - {FLOATS} or len(one) not in (0, 1, 2) for one in groups):
        return None
    kind, top, bias = known

    def emit(builder: Any, *values: Any) -> None:
        left, tokens, sums, number = values[3:7]
        first, second, scales, minima = (unpack(builder, value) for value in values[7:])
        block = Block(quants=[*first, *second], scales=scales, minima=minima, bias=bias)
        if kind == TILES or kind in MULTIPLIED:
            place = step_place(builder, kind, sums, number)
            store_block(builder, place, top, block)
            if kind in MULTIPLIED:
                multiply_tile(builder, kind, left, tokens, number, place)
        else:
            add_products(builder, kind, left, tokens, sums, number, block)

    return types.void, (*args[:3], *[types.int64] * 4, *rows, *groups), emit


@compiled_form(_block_typer, literals=True)
def add_block(
    kind: int,
    top: int,
    bias: int,
    left: Array,
    tokens: int,
    sums: Array,
    block: int,
    first: Words,
    second: Words,
    scales: tuple[Any, ...],
    minima: tuple[Any, ...],
) -> None:
    """Block `block` of 32 weights of 16 rows: w = scale·(q - bias) + minimum.

    `first` and `second` hold the quants, unsigned bytes up to `top`, which is at most 127 unless bias is
    SIGNED_BIAS. `scales` are one or two float32 lanes, for all 32 or each 16; `minima` likewise, or empty;
    with minima bias is 0. `left` is the address of records (block, token), made with the same bias, and
    `sums` that of float32 lanes, one a token, which are added to.

    For TILES `sums` is where step 0 of the pair of tiles is stored; left and tokens are not used. For kinds
    of MULTIPLIED `left` are pairs of tiles of activations (block, pair), `tokens` is the number of pairs, up
    to MOST_TILES, and `sums` room for two pairs.
    """
    quants = np.concatenate(
        [np.ascontiguousarray(word).view(np.uint8).reshape(WIDTH, 4) for word in first + second], 1
    )
    weights = quants.astype(np.int32) - bias
    each = BLOCK // len(scales)
    records = left[block * tokens * RECORD :]
    for token in range(tokens):
        record = records[token * RECORD : (token + 1) * RECORD]
        values = record[:BLOCK].view(np.int8).astype(np.int32)
        total = np.zeros(WIDTH, np.float32)
        for group, scale in enumerate(scales):
            part = slice(group * each, (group + 1) * each)
            total += (weights[:, part] @ values[part]).astype(np.float32) * scale
            if minima:
                total += minima[group] * np.float32(values[part].sum())
        sums[token * WIDTH : (token + 1) * WIDTH] += total * record[SCALE_AT : SCALE_AT + 4].view(np.float32)


def _floats_typer(*args: Any) -> Any:
    if len(args) != 6:
        return None
    known, values = literals(args[0]), args[5]
    if known is None or set(values) != {FLOATS} or len(values) != FLOAT_BLOCK:
        return None

    def emit(builder: Any, _: Any, left: Any, tokens: Any, sums: Any, block: Any, lanes: Any) -> None:
        weights = unpack(builder, lanes)
        if known[0] == TILES or known[0] in MULTIPLIED:
            step = builder.udiv(block, ir.Constant(I64, BLOCK // FLOAT_BLOCK))
            within = builder.and_(block, ir.Constant(I64, BLOCK // FLOAT_BLOCK - 1))
            tile = step_place(builder, known[0], sums, step)
            place = builder.add(tile, builder.mul(within, ir.Constant(I64, 16 * WIDTH)))
            for pair in range(FLOAT_BLOCK // 2):
                store_pair(builder, place, pair, *weights[2 * pair : 2 * pair + 2])
            if known[0] in MULTIPLIED:
                last = ir.Constant(I64, BLOCK // FLOAT_BLOCK - 1)
                with builder.if_then(builder.icmp_signed("==", within, last)):
                    multiply_tile(builder, known[0], left, tokens, step, tile)
            return

        def body(_: Any, record: Any, total: Any) -> Any:
            for number, weight in enumerate(weights):
                total = fused(builder, weight, broadcast(builder, record, 4 * number, F32), total)
            return total

        records = block_records(builder, left, block, tokens, FLOAT_RECORD)
        each_token(builder, records, FLOAT_RECORD, tokens, sums, body)

    return types.void, (args[0], *[types.int64] * 4, values), emit


@compiled_form(_floats_typer, literals=True)
def add_floats(
    kind: int, left: Array, tokens: int, sums: Array, block: int, weights: tuple[Any, ...]
) -> None:
    """Block `block` of 8 float32 weights of 16 rows; as `add_block`, with records of 8 float32."""
    records = left[block * tokens * FLOAT_RECORD :]
    for token in range(tokens):
        values = records[token * FLOAT_RECORD : (token + 1) * FLOAT_RECORD].view(np.float32)
        for weight, value in zip(weights, values, strict=True):
            sums[token * WIDTH : (token + 1) * WIDTH] += weight * value
