"""Packed words of sixteen rows of a weight at once: lane r of every value belongs to row r.

Blocks lie row by row in the file. Sixteen bytes of each of sixteen rows are transposed to four vectors
of 32-bit words; from there on scales, minima and quants of sixteen rows are unpacked with the same few
instructions, and no sum runs across lanes. A *words* value is a tuple of int32 lanes; a word holds four
quants, the first in its lowest byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from ._simd import (
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    WIDTH,
    bfloat_to_float,
    compiled_form,
    constant_vector,
    function,
    half_to_float,
    register_operation,
    splat,
)
from ._simd_features import target_features

ROWS = WIDTH
"""Rows of the weight that are read together."""
SOURCE = types.CPointer(types.uint8)
LINE = 64
"""Bytes of a cache line."""
FAR_GROUPS = 4
FIRST_CACHE, SECOND_CACHE = 3, 2
"""LLVM's names of the caches that a prefetch reaches."""

Words = tuple[npt.NDArray[np.int32], ...]


def pack(builder: Any, values: Sequence[Any]) -> Any:
    """Values of one type as Numba's homogeneous tuple."""
    result = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for place, value in enumerate(values):
        result = builder.insert_value(result, value, place)
    return result


def unpack(builder: Any, values: Any) -> list[Any]:
    """Members of a homogeneous tuple; none of an empty one."""
    if not isinstance(values.type, ir.ArrayType):
        return []
    return [builder.extract_value(values, place) for place in range(values.type.count)]


def literals(*arguments: Any) -> list[int] | None:
    """Values of literal arguments, None if one is not a literal."""
    if not all(isinstance(one, types.IntegerLiteral) for one in arguments):
        return None
    return [one.literal_value for one in arguments]


def is_words(kind: Any) -> bool:
    """True for the Numba type of a words value."""
    return isinstance(kind, types.UniTuple) and kind.dtype is INTS


# Reading.


def _interleave(low: bool, unit: int) -> list[int]:
    """Shuffle that takes units of `unit` lanes in turn from two vectors, in each 128 bits."""
    lanes = []
    for quarter in range(0, WIDTH, 4):
        for first in range(0 if low else 2, 2 if low else 4, unit):
            for side in (0, WIDTH):
                lanes += [side + quarter + first + i for i in range(unit)]
    return lanes


def _joined(builder: Any, low: Any, high: Any) -> Any:
    return builder.shuffle_vector(low, high, constant_vector(I32, range(2 * low.type.count)))


def _read_words(builder: Any, source: Any, stride: Any, at: Any) -> Any:
    kind = ir.VectorType(I32, 4)
    start = builder.gep(source, [at])
    quarters = []
    for row in range(ROWS):
        place = builder.gep(start, [builder.mul(stride, ir.Constant(I64, row))])
        quarters.append(builder.load(builder.bitcast(place, kind.as_pointer()), align=1))
    # Rows j, j + 4, j + 8 and j + 12 share a vector, so that transposing within 128 bits sorts them.
    vectors = []
    for j in range(4):
        low = _joined(builder, quarters[j], quarters[j + 4])
        vectors.append(_joined(builder, low, _joined(builder, quarters[j + 8], quarters[j + 12])))

    def exchange(first: Any, second: Any, unit: int) -> list[Any]:
        masks = (constant_vector(I32, _interleave(low, unit)) for low in (True, False))
        return [builder.shuffle_vector(first, second, mask) for mask in masks]

    first, second = exchange(vectors[0], vectors[1], 1), exchange(vectors[2], vectors[3], 1)
    return pack(builder, [*exchange(first[0], second[0], 2), *exchange(first[1], second[1], 2)])


@compiled_form(
    lambda *args: (
        (types.UniTuple(INTS, 4), (SOURCE, types.int64, types.int64), _read_words) if len(args) == 3 else None
    )
)
def read_words(source: Any, stride: int, at: int) -> Words:
    """The 16 bytes at `at` of 16 rows that lie `stride` bytes apart, as four words."""
    rows = [source[at + stride * row : at + stride * row + 16].view(np.int32) for row in range(ROWS)]
    return tuple(np.ascontiguousarray(np.stack(rows).T))


def _prefetch(size: Any, *rest: Any) -> Any:
    known = literals(size)
    if known is None or len(rest) != 3:
        return None

    def emit(builder: Any, _: Any, source: Any, stride: Any, at: Any) -> None:
        for groups, cache in ((1, FIRST_CACHE), (FAR_GROUPS, SECOND_CACHE)):
            rows = builder.mul(stride, ir.Constant(I64, groups))
            start = builder.gep(source, [builder.mul(builder.add(rows, at), ir.Constant(I64, ROWS))])
            name = "llvm.prefetch.p0" if str(start.type) == "ptr" else "llvm.prefetch.p0i8"
            fetch = function(builder, name, ir.VoidType(), [start.type, I32, I32, I32])
            for line in range(0, ROWS * known[0], LINE):
                place = builder.gep(start, [ir.Constant(I64, line)])
                builder.call(fetch, [place, *(ir.Constant(I32, number) for number in (0, cache, 1))])

    return types.void, (size, SOURCE, types.int64, types.int64), emit


@compiled_form(_prefetch, literals=True)
def prefetch_rows(size: int, source: Any, stride: int, at: int) -> None:
    """Begin to load the share of the following 16 rows that corresponds to `size` bytes of each at `at`.

    Rows of a group are read side by side, in more streams than the processor follows by itself; the next
    group is one stretch of memory. The same share of a group further on goes to the second cache: the first
    has too few places for loads in flight to hide the time to memory.
    """


# Unpacking.


def _on_words(emit_one: Callable[..., Any]) -> Any:
    def typer(words: Any, *rest: Any) -> Any:
        if not is_words(words) or not all(isinstance(one, types.Integer) for one in rest):
            return None

        def emit(builder: Any, values: Any, *numbers: Any) -> Any:
            lanes = [splat(builder, number) for number in numbers]
            return pack(builder, [emit_one(builder, one, *lanes) for one in unpack(builder, values)])

        return words, (words, *[types.int32] * len(rest)), emit

    return typer


@compiled_form(_on_words(lambda b, word, shift, mask: b.and_(b.ashr(word, shift), mask)))
def fields(words: Words, shift: int, mask: int) -> Words:
    """(words >> shift) & mask; the mask drops what the shift brings in at the top."""
    return tuple((word >> shift) & mask for word in words)


@compiled_form(_on_words(lambda b, word, mask: b.xor(word, mask)))
def flipped(words: Words, mask: int) -> Words:
    """words ^ mask."""
    return tuple(word ^ mask for word in words)


def _with_bits(words: Any, others: Any, shift: Any) -> Any:
    if not is_words(words) or others != words or not isinstance(shift, types.Integer):
        return None

    def emit(builder: Any, values: Any, tops: Any, number: Any) -> Any:
        by = splat(builder, number)
        pairs = zip(unpack(builder, values), unpack(builder, tops), strict=True)
        return pack(builder, [builder.or_(one, builder.shl(top, by)) for one, top in pairs])

    return words, (words, others, types.int32), emit


@compiled_form(_with_bits)
def with_bits(words: Words, tops: Words, shift: int) -> Words:
    """words | (tops << shift)."""
    return tuple(word | (top << shift) for word, top in zip(words, tops, strict=True))


def _spread(builder: Any, word: Any, first: Any, bit: Any) -> Any:
    """Bits first + 4i + j to bit `bit` of byte j of word i."""

    def constant(value: int) -> Any:
        return constant_vector(I32, [value] * WIDTH)

    base = builder.lshr(word, splat(builder, first))
    results = []
    for i in range(4):
        nibble = builder.and_(builder.lshr(base, constant(4 * i)), constant(15))
        pair = builder.or_(nibble, builder.shl(nibble, constant(7)))
        spread = builder.or_(pair, builder.shl(pair, constant(14)))
        results.append(builder.shl(builder.and_(spread, constant(0x01010101)), splat(builder, bit)))
    return pack(builder, results)


@compiled_form(
    lambda *args: (
        (types.UniTuple(INTS, 4), (INTS, types.int32, types.int32), _spread) if len(args) == 3 else None
    )
)
def spread_bits(word: Any, first: int, bit: int) -> Words:
    """Bits [first, first + 16) of lanes, one to a byte of four words, there as bit `bit`."""
    places = first + np.arange(16)
    single = ((word[:, None].astype(np.int64) >> places) & 1).astype(np.uint8) << np.uint8(bit)
    return tuple(np.ascontiguousarray(single[:, 4 * i : 4 * i + 4]).view(np.int32)[:, 0] for i in range(4))


def _half_of(high: bool, convert: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def emit(builder: Any, word: Any) -> Any:
        if high:
            word = builder.lshr(word, constant_vector(I32, [16] * WIDTH))
        return convert(builder, builder.trunc(word, ir.VectorType(I16, WIDTH)))

    return emit


def _to_floats(emit: Callable[..., Any]) -> Any:
    return lambda *args: (FLOATS, (INTS,), emit) if len(args) == 1 else None


@compiled_form(_to_floats(_half_of(False, half_to_float)))
def low_half(word: Any) -> Any:
    """The float16 in the low 16 bits."""
    return word.astype(np.uint16).view(np.float16).astype(np.float32)


@compiled_form(_to_floats(_half_of(True, half_to_float)))
def high_half(word: Any) -> Any:
    """The float16 in the high 16 bits."""
    return (word >> 16).astype(np.uint16).view(np.float16).astype(np.float32)


@compiled_form(_to_floats(_half_of(False, bfloat_to_float)))
def low_bfloat(word: Any) -> Any:
    """The bfloat16 in the low 16 bits."""
    return (word << 16).view(np.float32)


@compiled_form(_to_floats(_half_of(True, bfloat_to_float)))
def high_bfloat(word: Any) -> Any:
    """The bfloat16 in the high 16 bits."""
    return (word & -0x10000).view(np.float32)


@compiled_form(_to_floats(lambda b, word: b.bitcast(word, FLOATS.llvm)))
def float_bits(word: Any) -> Any:
    """Words as the float32 whose bits they are."""
    return np.ascontiguousarray(word).view(np.float32)


def _exponent(builder: Any, byte: Any) -> Any:
    def constant(value: int) -> Any:
        return constant_vector(I32, [value] * WIDTH)

    normal = builder.shl(builder.sub(byte, constant(1)), constant(23))
    tiny = builder.select(
        builder.icmp_signed("==", byte, constant(0)), constant(0x00200000), constant(0x00400000)
    )
    chosen = builder.select(builder.icmp_signed("<", byte, constant(2)), tiny, normal)
    return builder.bitcast(chosen, FLOATS.llvm)


@compiled_form(_to_floats(_exponent))
def exponents(byte: Any) -> Any:
    """Half of the powers of two that E8M0 bytes stand for: 2^(byte - 128)."""
    return np.where(byte < 2, 0x00200000 << (byte & 1), (byte - 1) << 23).astype(np.int32).view(np.float32)


# Tables of 16 bytes.


def make_byte_codebook(values: Sequence[int], bias: int) -> Callable[[Words], Words]:
    """An operation that maps each byte of words, 0 to 15, to one of `values` plus `bias`, unsigned."""
    table = np.array(values, np.int64) + bias
    if len(table) != 16 or table.min() < 0 or table.max() > 255:
        raise ValueError(f"16 values between {-bias} and {255 - bias} are needed, not {list(values)}")
    entries = [int(value) for value in table]

    def look_up(builder: Any, word: Any) -> Any:
        if {"avx512f", "avx512bw"} <= target_features():
            kind = ir.VectorType(I8, 64)
            shuffle = function(builder, "llvm.x86.avx512.pshuf.b.512", kind, [kind, kind])
            found = builder.call(shuffle, [constant_vector(I8, entries * 4), builder.bitcast(word, kind)])
            return builder.bitcast(found, INTS.llvm)
        kind, part = ir.VectorType(I8, 32), ir.VectorType(I32, 8)
        shuffle = function(builder, "llvm.x86.avx2.pshuf.b", kind, [kind, kind])
        halves = []
        for first in (0, 8):
            index = builder.shuffle_vector(word, word, constant_vector(I32, range(first, first + 8)))
            found = builder.call(shuffle, [constant_vector(I8, entries * 2), builder.bitcast(index, kind)])
            halves.append(builder.bitcast(found, part))
        return _joined(builder, *halves)

    def emit(builder: Any, words: Any) -> Any:
        return pack(builder, [look_up(builder, word) for word in unpack(builder, words)])

    def codebook(words: Words) -> Words:
        return tuple(
            table[np.ascontiguousarray(word).view(np.uint8)].astype(np.uint8).view(np.int32) for word in words
        )

    register_operation(
        codebook,
        lambda *args: (args[0], (args[0],), emit) if len(args) == 1 and is_words(args[0]) else None,
        (types.VarArg(types.Any),),
    )
    return codebook
