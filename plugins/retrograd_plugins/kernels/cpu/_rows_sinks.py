"""What becomes of blocks that were unpacked for sixteen rows: products with activations, or AMX tiles.

The functions of `_rows_formats` end in `add_block` or `add_floats`. Their first argument, a literal,
selects what these compile to:

- VNNI_512, VNNI_256, MADD_256: sums of products with activations rounded to 8 bits, by `vpdpbusd` on 64 or 32
  bytes, or by `vpmaddubsw` and `vpmaddwd`. Products of a block are integers, so these three agree bit for
  bit; the blocks are added in float32 in their order along the row.
- TILES: the weights in float32, as ggml computes them, rounded to bfloat16 and stored as the right operand
  of AMX products.

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
from ._simd_tiles import to_bfloats

VNNI_512, VNNI_256, MADD_256, TILES = range(4)

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
STEP_BYTES = 2 * TILE_BYTES
"""A step of 32 along the depth of an AMX panel: two tiles."""

Array = npt.NDArray[Any]


def _place(builder: Any, base: Any, offset: int, kind: Any) -> Any:
    address = builder.add(base, ir.Constant(I64, offset)) if offset else base
    return builder.inttoptr(address, kind.as_pointer())


def _broadcast(builder: Any, base: Any, offset: int, kind: Any) -> Any:
    return splat(builder, builder.load(_place(builder, base, offset, kind), align=4))


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
    joined = builder.shuffle_vector(first, second, constant_vector(I32, range(2 * WIDTH)))
    narrow = to_bfloats(builder, joined)
    interleaved = constant_vector(I32, [lane // 2 + WIDTH * (lane % 2) for lane in range(2 * WIDTH)])
    row = builder.shuffle_vector(narrow, narrow, interleaved)
    builder.store(row, _place(builder, target, 4 * WIDTH * pair, row.type), align=64)


def _emit_tiles(bias: int) -> Callable[..., None]:
    def emit(
        builder: Any,
        left: Any,
        tokens: Any,
        target: Any,
        block: Any,
        quants: list[Any],
        scales: list[Any],
        minima: list[Any],
    ) -> None:
        place = builder.add(target, builder.mul(block, ir.Constant(I64, STEP_BYTES)))

        def value(number: int) -> Any:
            word = quants[number // 4]
            shift = constant_vector(I32, [8 * (number % 4)] * WIDTH)
            byte = builder.and_(builder.lshr(word, shift), constant_vector(I32, [255] * WIDTH))
            if bias:
                byte = builder.sub(byte, constant_vector(I32, [bias] * WIDTH))
            group = number * len(scales) // BLOCK
            scaled = builder.fmul(builder.sitofp(byte, FLOATS.llvm), scales[group])
            return builder.fadd(scaled, minima[group]) if minima else scaled

        for pair in range(BLOCK // 2):
            _store_pair(builder, place, pair, value(2 * pair), value(2 * pair + 1))

    return emit


def _block_typer(*args: Any) -> Any:
    if len(args) != 10:
        return None
    known = literals(*args[:2])
    rows, groups = args[6:8], args[8:]
    if known is None or not all(is_words(one) and one.count == 4 for one in rows):
        return None
    if any(set(one) - {FLOATS} or len(one) not in (0, 1, 2) for one in groups):
        return None
    kind, bias = known
    sink = _emit_tiles(bias) if kind == TILES else _emit_products(kind, bias)

    def emit(builder: Any, *values: Any) -> None:
        first, second, scales, minima = (unpack(builder, value) for value in values[6:])
        sink(builder, *values[2:6], [*first, *second], scales, minima)

    return types.void, (*args[:2], *[types.int64] * 4, *rows, *groups), emit


@compiled_form(_block_typer, literals=True)
def add_block(
    kind: int,
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

    `first` and `second` hold the quants, unsigned bytes, at most 127 unless bias is SIGNED_BIAS. `scales` are
    one or two float32 lanes, for all 32 or each 16; `minima` likewise, or empty; with minima bias is 0.
    `left` is the address of records (block, token), made with the same bias, and `sums` that of float32
    lanes, one a token, which are added to. For TILES `sums` is where step 0 of the tile is stored, and left
    and tokens are not used.
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
        if known[0] == TILES:
            offset = builder.mul(builder.udiv(block, ir.Constant(I64, 4)), ir.Constant(I64, STEP_BYTES))
            within = builder.and_(block, ir.Constant(I64, 3))
            offset = builder.add(offset, builder.mul(within, ir.Constant(I64, 16 * WIDTH)))
            place = builder.add(sums, offset)
            for pair in range(FLOAT_BLOCK // 2):
                _store_pair(builder, place, pair, *weights[2 * pair : 2 * pair + 2])
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


# Activations.

_ROUND = 12582912.0
"""1.5 · 2^23: added to a small float32 it rounds to an integer, half to even, found in the low bits."""
_SMALLEST = 2.0**-100


def _emit_round(builder: Any, source: Any, target: Any, bias: Any) -> None:
    def lanes(offset: int) -> Any:
        return builder.load(_place(builder, source, offset, FLOATS.llvm), align=4)

    def floats(value: float) -> Any:
        return constant_vector(F32, [value] * WIDTH)

    def integers(value: int) -> Any:
        return constant_vector(I32, [value] * WIDTH)

    def reduced(name: str, value: Any) -> Any:
        reduce = function(builder, f"llvm.vector.reduce.{name}.v{WIDTH}i32", I32, [INTS.llvm])
        return builder.call(reduce, [value])

    values = [lanes(0), lanes(4 * WIDTH)]
    # Sizes are compared as integers, where NaN is the largest: it makes the scale NaN, and so the result.
    sizes = [builder.and_(builder.bitcast(one, INTS.llvm), integers(0x7FFFFFFF)) for one in values]
    larger = builder.select(builder.icmp_signed(">", *sizes), *sizes)
    largest = builder.bitcast(reduced("smax", larger), F32)
    steps = ir.Constant(F32, 127.0)
    usable = builder.fcmp_unordered(">", largest, ir.Constant(F32, _SMALLEST))
    zero = ir.Constant(F32, 0.0)
    scale = builder.select(usable, builder.fdiv(largest, steps), zero)
    inverse = splat(builder, builder.select(usable, builder.fdiv(steps, largest), zero))
    sums = []
    for number, one in enumerate(values):
        shifted = builder.bitcast(builder.fadd(builder.fmul(one, inverse), floats(_ROUND)), INTS.llvm)
        octets = builder.trunc(shifted, ir.VectorType(I8, WIDTH))
        builder.store(octets, _place(builder, target, WIDTH * number, octets.type), align=4)
        whole = builder.sub(shifted, builder.bitcast(floats(_ROUND), INTS.llvm))
        sums.append(reduced("add", whole))
    builder.store(scale, _place(builder, target, SCALE_AT, F32), align=4)
    negative = builder.sub(ir.Constant(I32, 0), builder.trunc(bias, I32))
    plain = builder.icmp_signed("==", negative, ir.Constant(I32, 0))
    for number, total in enumerate([builder.add(*sums), *sums]):
        as_float = builder.bitcast(builder.sitofp(total, F32), I32)
        stored = builder.select(plain, as_float, builder.mul(negative, total))
        builder.store(stored, _place(builder, target, SUM_AT + 4 * number, I32), align=4)


@compiled_form(
    lambda *args: (types.void, (types.int64,) * 3, _emit_round) if len(args) == 3 else None,
)
def round_block(source: Array, target: Array, bias: int) -> None:
    """Round 32 float32 at `source` to a record at `target`: x = scale·q, q from -127 to 127.

    The scale is the largest size / 127. The three sums of q are stored as float32, or with a bias as
    int32, times -bias. Blocks with nothing above 2^-100 count as zero; not-a-number and infinity make the
    scale so.
    """
    values = source[:BLOCK]
    largest = np.abs(values).max()
    usable = not largest <= np.float32(_SMALLEST)
    with np.errstate(all="ignore"):
        scale = largest / np.float32(127) if usable else np.float32(0)
        inverse = np.float32(127) / largest if usable else np.float32(0)
        q = np.nan_to_num(np.rint(values * inverse)).astype(np.int32)
    target[:BLOCK] = q.astype(np.int8).view(np.uint8)
    target[SCALE_AT:SUM_AT] = np.array([scale], np.float32).view(np.uint8)
    sums = np.array([q.sum(), q[:16].sum(), q[16:].sum()])
    stored = (-bias * sums).astype(np.int32) if bias else sums.astype(np.float32)
    target[SUM_AT:RECORD] = stored.view(np.uint8)


def _emit_copy(builder: Any, source: Any, target: Any) -> None:
    kind = ir.VectorType(F32, FLOAT_BLOCK)
    values = builder.load(_place(builder, source, 0, kind), align=4)
    builder.store(values, _place(builder, target, 0, kind), align=4)


@compiled_form(lambda *args: (types.void, (types.int64,) * 2, _emit_copy) if len(args) == 2 else None)
def copy_block(source: Array, target: Array) -> None:
    """Copy 8 float32 at `source` to a record at `target`."""
    target[:FLOAT_RECORD] = source[:FLOAT_BLOCK].view(np.uint8)
