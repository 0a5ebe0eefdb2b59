"""Weights of sixteen rows as AMX tiles of bfloat16, and their products, as LLVM instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from ._rows_integers import Block
from ._rows_kinds import AMX, BLOCK, MOST_TILES, STEP_BYTES, TILE_BYTES, place_of
from ._simd import F32, FLOATS, I8, I16, I32, I64, INTS, WIDTH, constant_vector, function
from ._simd_tiles import BFloatType


def store_pair(builder: Any, target: Any, pair: int, first: Any, second: Any) -> None:
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


def store_block(builder: Any, target: Any, top: int, block: Block) -> None:
    """Store a block, whose quants are at most `top`, as a tile."""
    convert = _converter(builder, top, block.bias)

    def value(number: int) -> Any:
        shift = constant_vector(I32, [8 * (number % 4)] * WIDTH)
        group = number * len(block.scales) // BLOCK
        scaled = builder.fmul(convert(builder.lshr(block.quants[number // 4], shift)), block.scales[group])
        return builder.fadd(scaled, block.minima[group]) if block.minima else scaled

    for pair in range(BLOCK // 2):
        store_pair(builder, target, pair, value(2 * pair), value(2 * pair + 1))


def step_place(builder: Any, kind: int, target: Any, step: Any) -> Any:
    """Where the tile of a step is stored; for AMX one of two places, as the last may still be read."""
    if kind == AMX:
        turn = builder.and_(step, ir.Constant(I64, 1))
        return builder.add(target, builder.mul(turn, ir.Constant(I64, TILE_BYTES)))
    return builder.add(target, builder.mul(step, ir.Constant(I64, STEP_BYTES)))


def multiply_tile(builder: Any, left: Any, tiles: Any, step: Any, place: Any) -> None:
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
