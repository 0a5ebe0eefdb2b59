"""Products of blocks of quants with activations rounded to 8 bits, as LLVM instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import llvmlite.binding as llvm
from llvmlite import ir

from ._rows_kinds import (
    FIRST_SUM_AT,
    MADD_256,
    RECORD,
    SCALE_AT,
    SIGNED_BIAS,
    SUM_AT,
    VNNI_256,
    VNNI_512,
    WHOLE,
    WHOLE_BITS,
    broadcast,
    fused,
)
from ._simd import F32, FLOATS, I8, I16, I32, I64, WIDTH, constant_vector, function


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


def each_token(
    builder: Any, source: Any, record: int, count: Any, sums: Any, body: Callable[[Any, Any, Any], Any]
) -> None:
    """For each of `count` tokens: sums = body(number, address of its record, sums), with sums as lanes."""
    start = builder.block
    loop, done = (builder.append_basic_block(name) for name in ("tokens", "tokens_done"))
    builder.branch(loop)
    builder.position_at_end(loop)
    number, place, target = (builder.phi(I64) for _ in range(3))
    steps = (ir.Constant(I64, 1), ir.Constant(I64, record), ir.Constant(I64, 4 * WIDTH))
    phis = (number, place, target)
    for phi, value in zip(phis, (ir.Constant(I64, 0), source, sums), strict=True):
        phi.add_incoming(value, start)
    address = builder.inttoptr(target, FLOATS.llvm.as_pointer())
    builder.store(body(number, place, builder.load(address, align=64)), address, align=64)
    following = [builder.add(phi, step) for phi, step in zip(phis, steps, strict=True)]
    for phi, value in zip(phis, following, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following[0], count), loop, done)
    builder.position_at_end(done)


def block_records(builder: Any, left: Any, block: Any, tokens: Any, record: int) -> Any:
    """Address of the records of a block."""
    return builder.add(left, builder.mul(builder.mul(block, tokens), ir.Constant(I64, record)))


@attrs.frozen(kw_only=True)
class Block:
    """32 weights of 16 rows, in LLVM values: eight words of quants, scales and minima as for `add_block`."""

    quants: list[Any]
    scales: list[Any]
    minima: list[Any]
    bias: int

    def start(self, builder: Any, record: Any, group: int) -> Any:
        """Where sums start: WHOLE_BITS - bias · (sum of activations), so that quants stay unsigned."""
        if not self.bias:
            return constant_vector(I32, [WHOLE_BITS] * WIDTH)
        return broadcast(builder, record, _sum_at(len(self.scales), group), I32)

    def offset(self, builder: Any) -> Any:
        """What WHOLE adds to the first products, negative. A scale has at most 20 bits: this is exact."""
        return builder.fmul(self.scales[0], constant_vector(F32, [-float(WHOLE)] * WIDTH))

    def add(self, builder: Any, record: Any, products: Sequence[Any], offset: Any, total: Any) -> Any:
        """total + the block, from its integer products from `start` on, one for each scale."""
        floats = [builder.bitcast(one, FLOATS.llvm) for one in products]
        value = fused(builder, floats[0], self.scales[0], offset)
        if len(self.scales) == 2:
            second = builder.fsub(floats[1], constant_vector(F32, [float(WHOLE)] * WIDTH))
            value = fused(builder, second, self.scales[1], value)
        for group, minimum in enumerate(self.minima):
            sums = broadcast(builder, record, _sum_at(len(self.minima), group), F32)
            value = fused(builder, minimum, sums, value)
        return fused(builder, value, broadcast(builder, record, SCALE_AT, F32), total)


def _sum_at(groups: int, group: int) -> int:
    return SUM_AT if groups == 1 else FIRST_SUM_AT + 4 * group


def add_products(
    builder: Any, kind: int, left: Any, tokens: Any, sums: Any, number: Any, block: Block
) -> None:
    """Add the products of a block with the records of each token, by vector instructions."""
    signed = block.bias == SIGNED_BIAS
    each = len(block.quants) // len(block.scales)

    def product(record: Any, group: int) -> Any:
        unbiased = kind == MADD_256 and signed
        whole = constant_vector(I32, [WHOLE_BITS] * WIDTH)
        total = whole if unbiased else block.start(builder, record, group)
        for word in range(group * each, group * each + each):
            values = broadcast(builder, record, 4 * word, I32)
            total = _dot(builder, kind, signed, total, block.quants[word], values)
        return total

    def body(_: Any, record: Any, total: Any) -> Any:
        products = [product(record, group) for group in range(len(block.scales))]
        return block.add(builder, record, products, offset, total)

    offset = block.offset(builder)
    records = block_records(builder, left, number, tokens, RECORD)
    each_token(builder, records, RECORD, tokens, sums, body)
