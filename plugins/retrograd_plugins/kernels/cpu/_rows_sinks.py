"""What becomes of blocks that were unpacked for sixteen rows: products with activations, or AMX tiles.

The functions of `_rows_formats` end in `add_block` or `add_floats`. Their first argument, a literal,
selects what these compile to:

- VNNI_512, VNNI_256, MADD_256: sums of products with activations rounded to 8 bits, by `vpdpbusd` on 64 or 32
  bytes, or by `vpmaddubsw` and `vpmaddwd`. Products of a block are integers, so these three agree bit for
  bit; the blocks are added in float32 in their order along the row.
- TILES: the weights in float32, as ggml computes them, rounded to bfloat16 and stored as the right operand
  of AMX products.
- AMX: the same tiles, multiplied with bfloat16 activations at once, while the next are unpacked; the sums
  stay in tile registers 0 to 3.

Source: Intel SDM, VPDPBUSD and VPMADDUBSW; rounding in blocks of 32 as ggml's Q8_0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from ._simd import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    WIDTH,
    compiled_form,
    constant_vector,
    function,
    splat,
)
from ._simd_rows import Words, is_words, literals, unpack
from ._simd_tiles import BFloatType

VNNI_512, VNNI_256, MADD_256, TILES, AMX = range(5)

BLOCK = 32
"""Activations that share a scale."""
RECORD = 48
"""Bytes of a block of rounded activations: 32 int8, their scale, the sums of all, of the first 16 and of
the last 16 (see `round_block`)."""
SCALE_AT, SUM_AT, FIRST_SUM_AT = 32, 36, 40
SIGNED_BIAS = 128
"""Bias of quants that are signed bytes, stored with the top bit flipped."""
FLOAT_BLOCK = 8
"""Float activations of a block of formats without quants."""
FLOAT_RECORD = 4 * FLOAT_BLOCK
TILE_BYTES = 1024
MOST_TILES = 4
"""Tiles of 16 tokens whose sums stay in registers."""
STEP_BYTES = 2 * TILE_BYTES
"""A step of 32 along the depth of an AMX panel: two tiles."""

Array = npt.NDArray[Any]


def place_of(builder: Any, base: Any, offset: int, kind: Any) -> Any:
    """`base` + `offset` bytes as a pointer to `kind`."""
    address = builder.add(base, ir.Constant(I64, offset)) if offset else base
    return builder.inttoptr(address, kind.as_pointer())


def _broadcast(builder: Any, base: Any, offset: int, kind: Any) -> Any:
    return splat(builder, builder.load(place_of(builder, base, offset, kind), align=4))


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    kind = FLOATS.llvm
    return builder.call(function(builder, f"llvm.fma.v{WIDTH}f32", kind, [kind] * 3), [x, y, z])


# Products of bytes.


def _halves(builder: Any, vector: Any) -> list[Any]:
    half = vector.type.count // 2
    return [
        builder.shuffle_vector(vector, vector, constant_vector(I32, range(first, first + half)))
        for first in (0, half)
    ]


def _vnni(builder: Any, total: Any, quants: Any, values: Any) -> Any:
    width = total.type.count
    # LLVM 22 changed the intrinsic's operands from int32 to bytes.
    kind = ir.VectorType(I8, 4 * width) if llvm.llvm_version_info[0] >= 22 else total.type
    name = f"llvm.x86.avx512.vpdpbusd.{32 * width}"
    multiply = function(builder, name, total.type, [total.type, kind, kind])
    return builder.call(multiply, [total, builder.bitcast(quants, kind), builder.bitcast(values, kind)])


def _madd(builder: Any, total: Any, quants: Any, values: Any, *, signed: bool) -> Any:
    """Pairs are summed in 16 bits: quants up to 127, or signed ones by their size, do not overflow."""
    octets, words = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
    left, right = builder.bitcast(quants, octets), builder.bitcast(values, octets)
    if signed:
        stored = builder.xor(left, constant_vector(I8, [-128] * 32))
        zero = constant_vector(I8, [0] * 32)
        negative = builder.icmp_signed("<", stored, zero)
        left = builder.select(negative, builder.sub(zero, stored), stored)
        sign = function(builder, "llvm.x86.avx2.psign.b", octets, [octets, octets])
        right = builder.call(sign, [right, stored])
    pairs = function(builder, "llvm.x86.avx2.pmadd.ub.sw", words, [octets, octets])
    fours = function(builder, "llvm.x86.avx2.pmadd.wd", total.type, [words, words])
    ones = constant_vector(I16, [1] * 16)
    return builder.add(total, builder.call(fours, [builder.call(pairs, [left, right]), ones]))


def _dot(builder: Any, kind: int, signed: bool, total: Any, quants: Any, values: Any) -> Any:
    """total + the products of four quants and four activations in each lane."""
    if kind == VNNI_512:
        return _vnni(builder, total, quants, values)
    low, high = (
        _vnni(builder, *part) if kind == VNNI_256 else _madd(builder, *part, signed=signed)
        for part in zip(*(_halves(builder, one) for one in (total, quants, values)), strict=True)
    )
    return builder.shuffle_vector(low, high, constant_vector(I32, range(WIDTH)))


def _loop(
    builder: Any, left: Any, first: Any, record: int, tokens: Any, sums: Any, body: Callable[..., Any]
) -> None:
    """For each token: sums = body(address of its record, sums), with sums as lanes."""
    start = builder.block
    loop, done = (builder.append_basic_block(name) for name in ("tokens", "tokens_done"))
    place = builder.add(left, builder.mul(builder.mul(first, tokens), ir.Constant(I64, record)))
    builder.branch(loop)
    builder.position_at_end(loop)
    count, source, target = (builder.phi(I64) for _ in range(3))
    for phi, value in ((count, tokens), (source, place), (target, sums)):
        phi.add_incoming(value, start)
    address = builder.inttoptr(target, FLOATS.llvm.as_pointer())
    builder.store(body(source, builder.load(address, align=64)), address, align=64)
    following = builder.sub(count, ir.Constant(I64, 1))
    count.add_incoming(following, builder.block)
    source.add_incoming(builder.add(source, ir.Constant(I64, record)), builder.block)
    target.add_incoming(builder.add(target, ir.Constant(I64, 4 * WIDTH)), builder.block)
    builder.cbranch(builder.icmp_signed(">", following, ir.Constant(I64, 0)), loop, done)
    builder.position_at_end(done)


def _emit_products(kind: int, bias: int) -> Callable[..., None]:
    signed = bias == SIGNED_BIAS

    def emit(
        builder: Any,
        left: Any,
        tokens: Any,
        sums: Any,
        block: Any,
        quants: list[Any],
        scales: list[Any],
        minima: list[Any],
    ) -> None:
        groups = len(scales)

        def product(record: Any, group: int) -> Any:
            sum_at = SUM_AT if groups == 1 else FIRST_SUM_AT + 4 * group
            # The sum starts at -bias · (sum of activations), so that quants need not be made signed.
            biased = bias and not (kind == MADD_256 and signed)
            total = (
                _broadcast(builder, record, sum_at, I32) if biased else ir.Constant(INTS.llvm, [0] * WIDTH)
            )
            each = len(quants) // groups
            for number in range(group * each, group * each + each):
                values = _broadcast(builder, record, 4 * number, I32)
                total = _dot(builder, kind, signed, total, quants[number], values)
            return builder.sitofp(total, FLOATS.llvm)

        def body(record: Any, total: Any) -> Any:
            value = builder.fmul(product(record, 0), scales[0])
            if groups == 2:
                value = _fma(builder, product(record, 1), scales[1], value)
            for number, minimum in enumerate(minima):
                sum_at = SUM_AT if len(minima) == 1 else FIRST_SUM_AT + 4 * number
                value = _fma(builder, minimum, _broadcast(builder, record, sum_at, F32), value)
            return _fma(builder, value, _broadcast(builder, record, SCALE_AT, F32), total)

        _loop(builder, left, block, RECORD, tokens, sums, body)

    return emit


# Tiles.


def _store_pair(builder: Any, target: Any, pair: int, first: Any, second: Any) -> None:
    """Row `pair` of a right operand: two weights of each row, as bfloat16."""
    # Written as one conversion and one shuffle: LLVM makes seven instructions of a `fptrunc`.
    version = llvm.llvm_version_info[0]
    kind = ir.VectorType(BFloatType() if version >= 16 else I16, 2 * WIDTH)
    convert = function(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, [FLOATS.llvm] * 2)
    narrow = builder.bitcast(builder.call(convert, [second, first]), ir.VectorType(I16, 2 * WIDTH))
    interleaved = constant_vector(I32, [lane // 2 + WIDTH * (lane % 2) for lane in range(2 * WIDTH)])
    row = builder.shuffle_vector(narrow, narrow, interleaved)
    builder.store(row, place_of(builder, target, 4 * WIDTH * pair, row.type), align=64)


def _converter(builder: Any, top: int, bias: int) -> Callable[[Any], Any]:
    """Maps the lowest bytes of lanes, at most `top`, to float32 less `bias`; tables spare instructions."""
    kind, index = FLOATS.llvm, INTS.llvm

    def table(first: int) -> Any:
        return constant_vector(F32, [float(first + i - bias) for i in range(WIDTH)])

    if top < WIDTH:
        one = function(builder, "llvm.x86.avx512.permvar.sf.512", kind, [kind, index])
        return lambda word: builder.call(one, [table(0), word])
    if top < 2 * WIDTH:
        two = function(builder, "llvm.x86.avx512.vpermi2var.ps.512", kind, [kind, index, kind])
        return lambda word: builder.call(two, [table(0), word, table(WIDTH)])

    def convert(word: Any) -> Any:
        byte = builder.and_(word, constant_vector(I32, [255] * WIDTH))
        if bias:
            byte = builder.sub(byte, constant_vector(I32, [bias] * WIDTH))
        return builder.sitofp(byte, kind)

    return convert


def _store_block(
    builder: Any, target: Any, top: int, bias: int, quants: list[Any], scales: list[Any], minima: list[Any]
) -> None:
    convert = _converter(builder, top, bias)

    def value(number: int) -> Any:
        shift = constant_vector(I32, [8 * (number % 4)] * WIDTH)
        group = number * len(scales) // BLOCK
        scaled = builder.fmul(convert(builder.lshr(quants[number // 4], shift)), scales[group])
        return builder.fadd(scaled, minima[group]) if minima else scaled

    for pair in range(BLOCK // 2):
        _store_pair(builder, target, pair, value(2 * pair), value(2 * pair + 1))


def _step_place(builder: Any, kind: int, target: Any, step: Any) -> Any:
    """Where the tile of a step is stored; for AMX one of two places, as the last may still be read."""
    if kind == AMX:
        turn = builder.and_(step, ir.Constant(I64, 1))
        return builder.add(target, builder.mul(turn, ir.Constant(I64, TILE_BYTES)))
    return builder.add(target, builder.mul(step, ir.Constant(I64, STEP_BYTES)))


def _multiply_tile(builder: Any, left: Any, tiles: Any, step: Any, place: Any) -> None:
    """Add the products of a tile at `place` with 1 to 4 tiles of activations to registers 0 to 3."""
    load = function(builder, "llvm.x86.tileloadd64", ir.VoidType(), [I8, I8.as_pointer(), I64])
    multiply = function(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), [I8] * 3)
    pitch = ir.Constant(I64, 64)

    def register(number: int) -> Any:
        return ir.Constant(I8, number)

    builder.call(load, [register(6), builder.inttoptr(place, I8.as_pointer()), pitch])
    source = builder.add(left, builder.mul(builder.mul(step, tiles), ir.Constant(I64, TILE_BYTES)))
    done = builder.append_basic_block("tiles_done")
    for number in range(MOST_TILES):
        operand = register(4 + number % 2)
        address = builder.add(source, ir.Constant(I64, TILE_BYTES * number))
        builder.call(load, [operand, builder.inttoptr(address, I8.as_pointer()), pitch])
        builder.call(multiply, [register(number), operand, register(6)])
        if number + 1 < MOST_TILES:
            another = builder.append_basic_block("tile")
            more = builder.icmp_signed(">", tiles, ir.Constant(I64, number + 1))
            builder.cbranch(more, another, done)
            builder.position_at_end(another)
    builder.branch(done)
    builder.position_at_end(done)


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
        left, tokens, sums, block = values[3:7]
        first, second, scales, minima = (unpack(builder, value) for value in values[7:])
        if kind in (TILES, AMX):
            place = _step_place(builder, kind, sums, block)
            _store_block(builder, place, top, bias, [*first, *second], scales, minima)
            if kind == AMX:
                _multiply_tile(builder, left, tokens, block, place)
        else:
            products = _emit_products(kind, bias)
            products(builder, left, tokens, sums, block, [*first, *second], scales, minima)

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

    For TILES `sums` is where step 0 of the tile is stored; left and tokens are not used. For AMX `left` are
    tiles of activations (block, tile), `tokens` is the number of tiles, up to MOST_TILES, and `sums` room
    for two tiles.
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
        if known[0] in (TILES, AMX):
            step = builder.udiv(block, ir.Constant(I64, BLOCK // FLOAT_BLOCK))
            within = builder.and_(block, ir.Constant(I64, BLOCK // FLOAT_BLOCK - 1))
            tile = _step_place(builder, known[0], sums, step)
            place = builder.add(tile, builder.mul(within, ir.Constant(I64, 16 * WIDTH)))
            for pair in range(FLOAT_BLOCK // 2):
                _store_pair(builder, place, pair, *weights[2 * pair : 2 * pair + 2])
            if known[0] == AMX:
                last = ir.Constant(I64, BLOCK // FLOAT_BLOCK - 1)
                with builder.if_then(builder.icmp_signed("==", within, last)):
                    _multiply_tile(builder, left, tokens, step, tile)
            return

        def body(record: Any, total: Any) -> Any:
            for number, weight in enumerate(weights):
                total = _fma(builder, weight, _broadcast(builder, record, 4 * number, F32), total)
            return total

        _loop(builder, left, block, FLOAT_RECORD, tokens, sums, body)

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
