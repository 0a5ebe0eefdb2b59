"""Weights of sixteen rows as pairs of AMX tiles, and their products, as LLVM instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ._rows_integers import Block
from ._rows_kinds import AMX_HIGH, BLOCK, MOST_TILES, MULTIPLIED, STEP_BYTES, TILE_BYTES, TILE_PAIR, place_of
from ._simd import F32, FLOATS, I8, I32, I64, INTS, WIDTH, constant_vector, function
from ._simd_tiles import split_pairs


def store_pair(builder: Any, target: Any, pair: int, first: Any, second: Any) -> None:
    """Row `pair` of right operands: two weights of each row, in both tiles."""
    for half, row in enumerate(split_pairs(builder, first, second)):
        offset = 4 * WIDTH * pair + TILE_BYTES * half
        builder.store(row, place_of(builder, target, offset, row.type), align=64)


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


def store_block(builder: Any, target: Any, top: int, block: Block) -> None:
    """Store a block, whose quants are at most `top`, as a pair of tiles."""
    convert = _converter(builder, top, block.bias)

    def value(number: int) -> Any:
        shift = constant_vector(I32, [8 * (number % 4)] * WIDTH)
        group = number * len(block.scales) // BLOCK
        scaled = builder.fmul(convert(builder.lshr(block.quants[number // 4], shift)), block.scales[group])
        return builder.fadd(scaled, block.minima[group]) if block.minima else scaled

    for pair in range(BLOCK // 2):
        store_pair(builder, target, pair, value(2 * pair), value(2 * pair + 1))


def step_place(builder: Any, kind: int, target: Any, step: Any) -> Any:
    """Where the tiles of a step are stored; to be multiplied at once one of two places, as the last may still
    be read."""
    if kind in MULTIPLIED:
        turn = builder.and_(step, ir.Constant(I64, 1))
        return builder.add(target, builder.mul(turn, ir.Constant(I64, TILE_PAIR)))
    return builder.add(target, builder.mul(step, ir.Constant(I64, STEP_BYTES)))


def multiply_tile(builder: Any, kind: int, left: Any, pairs: Any, step: Any, place: Any) -> None:
    """Add the products of the tiles at `place` with 1 to 4 pairs of activation tiles to registers 0 to 3.

    Those of two low halves are below what float32 sums keep; AMX_HIGH takes those of two high halves alone.
    The order is that of `_gemm_amx`.
    """
    rounded = kind == AMX_HIGH
    load = function(builder, "llvm.x86.tileloadd64", ir.VoidType(), [I8, I8.as_pointer(), I64])
    multiply = function(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), [I8] * 3)
    pitch = ir.Constant(I64, 64)

    def register(number: int) -> Any:
        return ir.Constant(I8, number)

    def fetch(number: int, base: Any, offset: int) -> None:
        address = builder.add(base, ir.Constant(I64, offset))
        builder.call(load, [register(number), builder.inttoptr(address, I8.as_pointer()), pitch])

    high, low = 6, 7
    fetch(high, place, 0)
    if not rounded:
        fetch(low, place, TILE_BYTES)
    source = builder.add(left, builder.mul(builder.mul(step, pairs), ir.Constant(I64, TILE_PAIR)))
    done = builder.append_basic_block("tiles_done")
    for number in range(MOST_TILES):
        if not rounded:
            fetch(4, source, TILE_PAIR * number + TILE_BYTES)
        fetch(5, source, TILE_PAIR * number)
        for operand, weights in ((5, high),) if rounded else ((4, high), (5, high), (5, low)):
            builder.call(multiply, [register(number), register(operand), register(weights)])
        if number + 1 < MOST_TILES:
            another = builder.append_basic_block("tile")
            more = builder.icmp_signed(">", pairs, ir.Constant(I64, number + 1))
            builder.cbranch(more, another, done)
            builder.position_at_end(another)
    builder.branch(done)
    builder.position_at_end(done)
