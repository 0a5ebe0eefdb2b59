"""Operations that emit many instructions: transposes, the float32 register tile, AMX tiles.

Compiled only; addresses are integers, strides are in bytes unless said otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from ._simd import F16, F32, FLOATS, I8, I16, I32, I64, compiled_form, constant_vector, function, splat
from ._simd_features import has_fused_multiply_add

VOID = ir.VoidType()
BYTE_POINTER = I8.as_pointer()


class BFloatType(ir.Type):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)


def _offset(builder: Any, base: Any, stride: Any, index: int) -> Any:
    return builder.add(base, builder.mul(stride, ir.Constant(I64, index)))


def _load_vector(builder: Any, place: Any, element: Any, width: int) -> Any:
    kind = ir.VectorType(element, width)
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def _store_vector(builder: Any, place: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=1)


def transposed(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Transpose of n vectors of n lanes: n·log2(n) two-input shuffles that exchange blocks."""
    vectors = list(rows)
    width = len(vectors)
    step = 1
    while step < width:
        upper = [j if not j & step else width + j - step for j in range(width)]
        lower = [j + step if not j & step else width + j for j in range(width)]
        for i in range(width):
            if not i & step:
                first, second = vectors[i], vectors[i + step]
                vectors[i] = builder.shuffle_vector(first, second, constant_vector(I32, upper))
                vectors[i + step] = builder.shuffle_vector(first, second, constant_vector(I32, lower))
        step *= 2
    return vectors


def _literals(*arguments: Any) -> list[int] | None:
    if not all(isinstance(one, types.IntegerLiteral) for one in arguments):
        return None
    return [one.literal_value for one in arguments]


def _transpose(width: Any, *rest: Any) -> Any:
    known = _literals(width)
    if known is None:
        return None
    n = known[0]

    def emit(builder: Any, _: Any, source: Any, stride: Any, target: Any, target_stride: Any) -> None:
        rows = [_load_vector(builder, _offset(builder, source, stride, i), F32, n) for i in range(n)]
        for i, column in enumerate(transposed(builder, rows)):
            _store_vector(builder, _offset(builder, target, target_stride, i), column)

    return types.void, (width, *[types.int64] * 4), emit


@compiled_form(_transpose, literals=True)
def transpose_floats(width: int, source: int, stride: int, target: int, target_stride: int) -> None:
    """Transpose a width x width block of float32 (`width` a literal)."""
    raise RuntimeError("transpose_floats has a compiled form only")


# The float32 tile: rows x (vectors · width) accumulators that stay in registers.


def _multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    if has_fused_multiply_add():
        fma = function(builder, f"llvm.fma.v{x.type.count}f32", x.type, [x.type] * 3)
        return builder.call(fma, [x, y, z])
    return builder.fadd(builder.fmul(x, y), z)


def _float_tile(rows: Any, vectors: Any, width: Any, step: Any, *rest: Any) -> Any:
    known = _literals(rows, vectors, width, step)
    if known is None:
        return None
    m, v, w, a_step = known

    def emit(builder: Any, *arguments: Any) -> None:
        a, b, c, ldc, k, accumulate = arguments[4:]
        kind = ir.VectorType(F32, w)
        places = [
            builder.add(_offset(builder, c, ldc, i), ir.Constant(I64, 4 * w * j))
            for i in range(m)
            for j in range(v)
        ]
        fresh = builder.append_basic_block("fresh")
        again = builder.append_basic_block("again")
        loop = builder.append_basic_block("loop")
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("!=", accumulate, ir.Constant(I64, 0)), again, fresh)
        builder.position_at_end(again)
        loaded = [_load_vector(builder, place, F32, w) for place in places]
        builder.branch(loop)
        builder.position_at_end(fresh)
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(I64)
        sums = [builder.phi(kind) for _ in places]
        for start in (again, fresh):
            index.add_incoming(ir.Constant(I64, 0), start)
        zero = constant_vector(F32, [0.0] * w)
        for total, value in zip(sums, loaded, strict=True):
            total.add_incoming(value, again)
            total.add_incoming(zero, fresh)
        b_place = builder.add(b, builder.mul(index, ir.Constant(I64, 4 * v * w)))
        a_place = builder.add(a, builder.mul(index, ir.Constant(I64, 4 * a_step)))
        columns = [
            _load_vector(builder, builder.add(b_place, ir.Constant(I64, 4 * w * j)), F32, w) for j in range(v)
        ]
        updated = []
        for i in range(m):
            place = builder.add(a_place, ir.Constant(I64, 4 * i))
            scalar = builder.load(builder.inttoptr(place, F32.as_pointer()), align=4)
            factor = splat(builder, scalar, w)
            updated += [_multiply_add(builder, factor, columns[j], sums[i * v + j]) for j in range(v)]
        following = builder.add(index, ir.Constant(I64, 1))
        index.add_incoming(following, loop)
        for total, value in zip(sums, updated, strict=True):
            total.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, k), loop, done)
        builder.position_at_end(done)
        for place, value in zip(places, updated, strict=True):
            _store_vector(builder, place, value)

    return types.void, (rows, vectors, width, step, *[types.int64] * 6), emit


@compiled_form(_float_tile, literals=True)
def float_tile(
    rows: int, vectors: int, width: int, step: int, a: int, b: int, c: int, ldc: int, k: int, accumulate: int
) -> None:
    """C (rows, vectors·width) = or += sum over k >= 1 steps of a column of A times a row of B.

    A holds `step` float32 a step, of which the first `rows` are used; B vectors·width. The first four
    arguments are literals. Each element is one chain of multiply-adds in the order of k, so its bits do
    not depend on the shape of the tile.
    """
    raise RuntimeError("float_tile has a compiled form only")


def _copy(width: Any, *rest: Any) -> Any:
    known = _literals(width)
    if known is None:
        return None

    def emit(builder: Any, _: Any, source: Any, target: Any) -> None:
        _store_vector(builder, target, _load_vector(builder, source, F32, known[0]))

    return types.void, (width, types.int64, types.int64), emit


@compiled_form(_copy, literals=True)
def copy_floats(width: int, source: int, target: int) -> None:
    """Copy `width` float32 (a literal)."""
    raise RuntimeError("copy_floats has a compiled form only")


# bfloat16 packing for AMX. The processor rounds to nearest even (AVX512-BF16, which every AMX one has).


def to_bfloats(builder: Any, floats: Any) -> Any:
    """float32 lanes as the int16 bits of bfloat16 lanes."""
    count = floats.type.count
    narrow = builder.fptrunc(floats, ir.VectorType(BFloatType(), count))
    return builder.bitcast(narrow, ir.VectorType(I16, count))


def _all_integers(emit: Callable[..., None]) -> Callable[..., Any]:
    return lambda *arguments: (types.void, (types.int64,) * len(arguments), emit)


def _emit_convert(builder: Any, source: Any, target: Any) -> None:
    _store_vector(builder, target, to_bfloats(builder, _load_vector(builder, source, F32, 32)))


@compiled_form(_all_integers(_emit_convert))
def convert_bfloats(source: int, target: int) -> None:
    """32 float32 rounded to 32 bfloat16."""
    raise RuntimeError("convert_bfloats has a compiled form only")


def _emit_store_bfloats(builder: Any, place: Any, lanes: Any) -> None:
    _store_vector(builder, place, to_bfloats(builder, lanes))


@compiled_form(lambda place, lanes: (types.void, (types.int64, FLOATS), _emit_store_bfloats))
def store_bfloats(place: int, lanes: Any) -> None:
    """Store float32 lanes rounded to bfloat16."""
    raise RuntimeError("store_bfloats has a compiled form only")


def _emit_store_halves(builder: Any, place: Any, lanes: Any) -> None:
    _store_vector(builder, place, builder.fptrunc(lanes, ir.VectorType(F16, lanes.type.count)))


@compiled_form(lambda place, lanes: (types.void, (types.int64, FLOATS), _emit_store_halves))
def store_halves(place: int, lanes: Any) -> None:
    """Store float32 lanes rounded to float16; needs a processor that converts them (F16C)."""
    raise RuntimeError("store_halves has a compiled form only")


def _emit_load_halves(builder: Any, place: Any) -> Any:
    return builder.fpext(_load_vector(builder, place, F16, FLOATS.llvm.count), FLOATS.llvm)


@compiled_form(lambda place: (FLOATS, (types.int64,), _emit_load_halves))
def load_halves(place: int) -> Any:
    """16 float16 as float32 lanes; as `store_halves`."""
    raise RuntimeError("load_halves has a compiled form only")


def _emit_poke_bfloat(builder: Any, place: Any, value: Any) -> None:
    narrow = builder.bitcast(builder.fptrunc(value, BFloatType()), I16)
    builder.store(narrow, builder.inttoptr(place, I16.as_pointer()), align=2)


@compiled_form(lambda place, value: (types.void, (types.int64, types.float32), _emit_poke_bfloat))
def poke_bfloat(place: int, value: float) -> None:
    """Store one float32 rounded to bfloat16."""
    raise RuntimeError("poke_bfloat has a compiled form only")


# Halves of float32 for AMX products that keep float32's precision: x = high + low, both bfloat16. High is the
# nearest (of two as near, the one away from 0), so that it may also stand for x alone; the rest is exact in
# float32, of which low is the upper 16 bits.

HIGH_BITS = -65536
HALF_A_BIT = 1 << 15
"""Added to the bits of a float32, it rounds the upper 16."""


def _high_and_rest(builder: Any, floats: Any) -> tuple[Any, Any]:
    """The int32 bits of lanes rounded to their upper 16, and of what that leaves of the float32 lanes."""
    kind = ir.VectorType(I32, floats.type.count)
    raised = builder.add(builder.bitcast(floats, kind), ir.Constant(kind, [HALF_A_BIT] * kind.count))
    high = builder.and_(raised, ir.Constant(kind, [HIGH_BITS] * kind.count))
    return high, builder.bitcast(builder.fsub(floats, builder.bitcast(high, floats.type)), kind)


def split_pairs(builder: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Two vectors of float32 as int32 lanes of bfloat16 pairs, first below second: high and low halves."""

    def paired(below: Any, above: Any) -> Any:
        sixteen = constant_vector(I32, [16] * below.type.count)
        mask = constant_vector(I32, [HIGH_BITS] * below.type.count)
        return builder.or_(builder.lshr(below, sixteen), builder.and_(above, mask))

    below, above = (_high_and_rest(builder, one) for one in (first, second))
    return paired(below[0], above[0]), paired(below[1], above[1])


def _split_row(builder: Any, source: Any) -> tuple[Any, Any]:
    """32 float32 in memory as 16 lanes of bfloat16 pairs: high and low halves."""
    floats = _load_vector(builder, source, F32, 32)
    even, odd = (
        builder.shuffle_vector(floats, floats, constant_vector(I32, range(start, 32, 2)))
        for start in range(2)
    )
    return split_pairs(builder, even, odd)


def _emit_split(builder: Any, source: Any, high: Any, low: Any) -> None:
    for place, half in zip((high, low), _split_row(builder, source), strict=True):
        _store_vector(builder, place, half)


@compiled_form(_all_integers(_emit_split))
def split_bfloats(source: int, high: int, low: int) -> None:
    """32 float32 as 32 bfloat16 at `high` and 32 at `low`, whose sum they are to 16 bits."""
    raise RuntimeError("split_bfloats has a compiled form only")


def _emit_poke_split(builder: Any, high: Any, low: Any, value: Any) -> None:
    raised = builder.add(builder.bitcast(value, I32), ir.Constant(I32, HALF_A_BIT))
    bits = builder.and_(raised, ir.Constant(I32, HIGH_BITS))
    rest = builder.bitcast(builder.fsub(value, builder.bitcast(bits, F32)), I32)
    for place, word in ((high, bits), (low, rest)):
        half = builder.trunc(builder.lshr(word, ir.Constant(I32, 16)), I16)
        builder.store(half, builder.inttoptr(place, I16.as_pointer()), align=2)


@compiled_form(
    lambda high, low, value: (types.void, (types.int64, types.int64, types.float32), _emit_poke_split)
)
def poke_split(high: int, low: int, value: float) -> None:
    """Store the bfloat16 halves of one float32."""
    raise RuntimeError("poke_split has a compiled form only")


def _emit_pack_rows(builder: Any, source: Any, stride: Any, high: Any, low: Any) -> None:
    halves = [_split_row(builder, _offset(builder, source, stride, i)) for i in range(16)]
    for place, rows in ((high, [half[0] for half in halves]), (low, [half[1] for half in halves])):
        for i, column in enumerate(transposed(builder, rows)):
            _store_vector(builder, builder.add(place, ir.Constant(I64, 64 * i)), column)


@compiled_form(_all_integers(_emit_pack_rows))
def pack_tiles_from_rows(source: int, stride: int, high: int, low: int) -> None:
    """Right operand tiles from 16 rows of 32 float32, each a column of B: their halves, pairs transposed."""
    raise RuntimeError("pack_tiles_from_rows has a compiled form only")


def _emit_pack_columns(builder: Any, source: Any, stride: Any, target: Any) -> None:
    interleaved = constant_vector(I32, [lane // 2 + 16 * (lane % 2) for lane in range(32)])
    for pair in range(16):
        first, second = (
            _load_vector(builder, _offset(builder, source, stride, 2 * pair + i), F32, 16) for i in range(2)
        )
        both = to_bfloats(builder, builder.shuffle_vector(first, second, interleaved))
        _store_vector(builder, builder.add(target, ir.Constant(I64, 64 * pair)), both)


@compiled_form(_all_integers(_emit_pack_columns))
def pack_tile_from_columns(source: int, stride: int, target: int) -> None:
    """Right operand tile from 32 rows of 16 float32, which are rows of B: pairs interleaved."""
    raise RuntimeError("pack_tile_from_columns has a compiled form only")


def _emit_split_columns(builder: Any, source: Any, stride: Any, high: Any, low: Any) -> None:
    for pair in range(16):
        first, second = (
            _load_vector(builder, _offset(builder, source, stride, 2 * pair + i), F32, 16) for i in range(2)
        )
        for place, half in zip((high, low), split_pairs(builder, first, second), strict=True):
            _store_vector(builder, builder.add(place, ir.Constant(I64, 64 * pair)), half)


@compiled_form(_all_integers(_emit_split_columns))
def pack_tiles_from_columns(source: int, stride: int, high: int, low: int) -> None:
    """As `pack_tile_from_columns`, in halves."""
    raise RuntimeError("pack_tiles_from_columns has a compiled form only")


# AMX. Registers 0-3 accumulate, 4-7 hold operands.

TILE_CONFIG = struct.pack("<BB14x8H16x8B8x", 1, 0, *[64] * 8, *[16] * 8)
"""Palette 1; all eight registers 16 rows of 64 bytes (Intel SDM volume 1, chapter 18)."""


def _emit_configure(builder: Any) -> None:
    constant = cgutils.create_constant_array(I8, bytearray(TILE_CONFIG))
    place = builder.bitcast(cgutils.global_constant(builder, "tile_config", constant), BYTE_POINTER)
    builder.call(function(builder, "llvm.x86.ldtilecfg", VOID, [BYTE_POINTER]), [place])


@compiled_form(_all_integers(_emit_configure))
def tiles_configure() -> None:
    """Set up this thread's tile registers and zero them."""
    raise RuntimeError("tiles_configure has a compiled form only")


def _emit_release(builder: Any) -> None:
    builder.call(function(builder, "llvm.x86.tilerelease", VOID, []), [])


@compiled_form(_all_integers(_emit_release))
def tiles_release() -> None:
    """Give the tile registers back, so that context switches need not save them."""
    raise RuntimeError("tiles_release has a compiled form only")


def _tile_move(name: str) -> Any:
    def typer(register: Any, *rest: Any) -> Any:
        known = _literals(register)
        if known is None:
            return None

        def emit(builder: Any, _: Any, place: Any, stride: Any) -> None:
            move = function(builder, name, VOID, [I8, BYTE_POINTER, I64])
            arguments = [ir.Constant(I8, known[0]), builder.inttoptr(place, BYTE_POINTER), stride]
            builder.call(move, arguments)

        return types.void, (register, types.int64, types.int64), emit

    return typer


@compiled_form(_tile_move("llvm.x86.tileloadd64"), literals=True)
def tile_load(register: int, place: int, stride: int) -> None:
    """Load 16 rows of 64 bytes."""
    raise RuntimeError("tile_load has a compiled form only")


@compiled_form(_tile_move("llvm.x86.tilestored64"), literals=True)
def tile_store(register: int, place: int, stride: int) -> None:
    """Store 16 rows of 64 bytes."""
    raise RuntimeError("tile_store has a compiled form only")


def _tile_zero(register: Any) -> Any:
    known = _literals(register)
    if known is None:
        return None

    def emit(builder: Any, _: Any) -> None:
        zero = function(builder, "llvm.x86.tilezero", VOID, [I8])
        builder.call(zero, [ir.Constant(I8, known[0])])

    return types.void, (register,), emit


@compiled_form(_tile_zero, literals=True)
def tile_zero(register: int) -> None:
    """Zero a register."""
    raise RuntimeError("tile_zero has a compiled form only")


def _tile_multiply(total: Any, left: Any, right: Any) -> Any:
    known = _literals(total, left, right)
    if known is None:
        return None

    def emit(builder: Any, *_: Any) -> None:
        multiply = function(builder, "llvm.x86.tdpbf16ps", VOID, [I8] * 3)
        builder.call(multiply, [ir.Constant(I8, number) for number in known])

    return types.void, (total, left, right), emit


@compiled_form(_tile_multiply, literals=True)
def tile_multiply(total: int, left: int, right: int) -> None:
    """total (16, 16 float32) += left (16, 32 bfloat16) · right (16 pairs of rows, 16)."""
    raise RuntimeError("tile_multiply has a compiled form only")
