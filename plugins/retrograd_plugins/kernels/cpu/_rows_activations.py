"""Activations as the functions of `_rows` want them: rounded to 8 bits, as float32, or as AMX tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from ._rows_kinds import (
    BLOCK,
    FLOAT_BLOCK,
    FLOAT_RECORD,
    RECORD,
    SCALE_AT,
    SUM_AT,
    TILE_BYTES,
    TILE_PAIR,
    WHOLE_BITS,
    place_of,
)
from ._simd import F32, FLOATS, I8, I32, INTS, WIDTH, compiled_form, constant_vector, function, splat
from ._simd_tiles import split_bfloats

Array = npt.NDArray[Any]

_ROUND = 12582912.0
"""1.5 · 2^23: added to a small float32 it rounds to an integer, half to even, found in the low bits."""
_SMALLEST = 2.0**-100


def _emit_round(builder: Any, source: Any, target: Any, bias: Any) -> None:
    def lanes(offset: int) -> Any:
        return builder.load(place_of(builder, source, offset, FLOATS.llvm), align=4)

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
        builder.store(octets, place_of(builder, target, WIDTH * number, octets.type), align=4)
        whole = builder.sub(shifted, builder.bitcast(floats(_ROUND), INTS.llvm))
        sums.append(reduced("add", whole))
    builder.store(scale, place_of(builder, target, SCALE_AT, F32), align=4)
    negative = builder.sub(ir.Constant(I32, 0), builder.trunc(bias, I32))
    plain = builder.icmp_signed("==", negative, ir.Constant(I32, 0))
    for number, total in enumerate([builder.add(*sums), *sums]):
        as_float = builder.bitcast(builder.sitofp(total, F32), I32)
        whole = builder.add(builder.mul(negative, total), ir.Constant(I32, WHOLE_BITS))
        stored = builder.select(plain, as_float, whole)
        builder.store(stored, place_of(builder, target, SUM_AT + 4 * number, I32), align=4)


@compiled_form(
    lambda *args: (types.void, (types.int64,) * 3, _emit_round) if len(args) == 3 else None,
)
def round_block(source: Array, target: Array, bias: int) -> None:
    """Round 32 float32 at `source` to a record at `target`: x = scale·q, q from -127 to 127.

    The scale is the largest size / 127. The three sums of q are stored as float32, or with a bias as
    int32: WHOLE_BITS - bias·sum. Blocks with nothing above 2^-100 count as zero; not-a-number and infinity
    make the scale so.
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
    stored = (WHOLE_BITS - bias * sums).astype(np.int32) if bias else sums.astype(np.float32)
    target[SUM_AT:RECORD] = stored.view(np.uint8)


def _emit_copy(builder: Any, source: Any, target: Any) -> None:
    kind = ir.VectorType(F32, FLOAT_BLOCK)
    values = builder.load(place_of(builder, source, 0, kind), align=4)
    builder.store(values, place_of(builder, target, 0, kind), align=4)


@compiled_form(lambda *args: (types.void, (types.int64,) * 2, _emit_copy) if len(args) == 2 else None)
def copy_block(source: Array, target: Array) -> None:
    """Copy 8 float32 at `source` to a record at `target`."""
    target[:FLOAT_RECORD] = source[:FLOAT_BLOCK].view(np.uint8)


def round_tokens(x: Any, x_stride: Any, tokens: Any, count: Any, records: Any, bias: Any) -> None:
    """Records of 32 values rounded to 8 bits, (block, token), of `tokens` rows of x."""
    for b in range(count // BLOCK):
        for t in range(tokens):
            round_block(x + 4 * (t * x_stride + BLOCK * b), records + RECORD * (b * tokens + t), bias)


def copy_tokens(x: Any, x_stride: Any, tokens: Any, count: Any, records: Any, bias: Any) -> None:
    """Records of 8 float32, (block, token), of `tokens` rows of x; `bias` is not used."""
    for b in range(count // FLOAT_BLOCK):
        for t in range(tokens):
            copy_block(x + 4 * (t * x_stride + FLOAT_BLOCK * b), records + FLOAT_RECORD * (b * tokens + t))


def tile_tokens(x: Any, x_stride: Any, tokens: Any, count: Any, records: Any, bias: Any) -> None:
    """Pairs of tiles of 16 tokens by 32 bfloat16, (block, pair), of `tokens` rows of x: high and low halves.

    The rows of the last pair beyond `tokens` are left as they are: they meet no other row's sums. `bias` is
    not used.
    """
    pairs = (tokens + 15) // 16
    for b in range(count // BLOCK):
        for t in range(tokens):
            place = records + (b * pairs + t // 16) * TILE_PAIR + t % 16 * 64
            split_bfloats(x + 4 * (t * x_stride + BLOCK * b), place, place + TILE_BYTES)
