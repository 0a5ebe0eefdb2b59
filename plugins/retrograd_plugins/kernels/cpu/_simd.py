"""Vectors as Numba values, and the few operations that decoders and drivers are written in.

Every operation has two forms under one name: a Python form on NumPy arrays, which is what runs with the
JIT switched off, and a compiled form, emitted as LLVM IR. So a decoder written with them is one
function that can be read, stepped through and tested as Python, and compiles to vector instructions
of whatever width the processor has (LLVM splits vectors that are too wide).

A *lanes* value holds 16 numbers: int32 or float32. In Python it is an array of 16.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import models, register_model

from ._simd_features import has_half_conversion, target_features

WIDTH = 16
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()

Emit = Callable[..., Any]
"""`emit(builder, *llvm values) -> llvm value`, or None for an operation without a result."""
Typer = Callable[..., "tuple[Any, tuple[Any, ...], Emit] | None"]
"""`typer(*numba types) -> (result type, argument types to cast to, emit)`, None if they do not fit."""


class Lanes(types.Type):
    """Numba type of 16 int32 or 16 float32."""

    def __init__(self, name: str, element: Any) -> None:
        self.llvm = ir.VectorType(element, WIDTH)
        super().__init__(name=name)


INTS = Lanes("lanes_int32", I32)
FLOATS = Lanes("lanes_float32", F32)


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Lanes) -> None:
        super().__init__(manager, numba_type, numba_type.llvm)  # type: ignore[no-untyped-call]


def compiled_form(typer: Typer, *, literals: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: give a Python function the compiled form that `typer` describes."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        register_operation(function, typer, (types.VarArg(types.Any),), literals=literals)
        return function

    return decorate


def register_operation(
    key: Callable[..., Any], typer: Typer, lowered: Sequence[Any], *, literals: bool = False
) -> None:
    """Teach Numba to type and lower calls of `key` (a function or an operator)."""

    operation = key

    class Template(AbstractTemplate):
        key = operation
        prefer_literal = literals

        def generic(self, args: Any, kws: Any) -> Any:
            found = typer(*args)
            return None if found is None else signature(found[0], *found[1])

    infer_global(key, types.Function(Template))

    @lower_builtin(key, *lowered)
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = typer(*sig.args)
        assert found is not None
        result = found[2](builder, *args)
        return context.get_dummy_value() if result is None else result


# IR helpers.


def splat(builder: Any, scalar: Any, width: int = WIDTH) -> Any:
    """A vector with `scalar` in every lane."""
    vector = ir.VectorType(scalar.type, width)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, constant_vector(I32, [0] * width))


def constant_vector(element: Any, values: Sequence[float]) -> Any:
    """A constant vector."""
    return ir.Constant(ir.VectorType(element, len(values)), list(values))


def pointer(builder: Any, address: Any, pointee: Any) -> Any:
    """An integer address as a typed pointer."""
    return builder.inttoptr(address, pointee.as_pointer())


def load(builder: Any, base: Any, index: Any, pointee: Any) -> Any:
    """Load `pointee` from element `index` of `base`, which need not be aligned."""
    place = builder.bitcast(builder.gep(base, [index]), pointee.as_pointer())
    return builder.load(place, align=1)


def function(builder: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Declaration of an LLVM intrinsic in the module being built."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


# Arithmetic on lanes.


def _int_op(emit: Callable[[Any, Any, Any], Any]) -> Typer:
    def typer(*args: Any) -> Any:
        if len(args) != 2 or args[0] is not INTS:
            return None
        if args[1] is INTS:
            return INTS, (INTS, INTS), emit
        if isinstance(args[1], types.Integer):
            return INTS, (INTS, types.int32), lambda builder, x, s: emit(builder, x, splat(builder, s))
        return None

    return typer


def _float_op(emit: Callable[[Any, Any, Any], Any]) -> Typer:
    def typer(*args: Any) -> Any:
        if len(args) != 2 or args[0] is not FLOATS:
            return None
        if args[1] is FLOATS:
            return FLOATS, (FLOATS, FLOATS), emit
        if args[1] is types.float32:
            return FLOATS, (FLOATS, types.float32), lambda builder, x, s: emit(builder, x, splat(builder, s))
        return None

    return typer


def _either(*typers: Typer) -> Typer:
    def typer(*args: Any) -> Any:
        return next((found for one in typers if (found := one(*args)) is not None), None)

    return typer


for _operator, _operands in {
    operator.and_: _int_op(lambda b, x, y: b.and_(x, y)),
    operator.or_: _int_op(lambda b, x, y: b.or_(x, y)),
    operator.xor: _int_op(lambda b, x, y: b.xor(x, y)),
    operator.lshift: _int_op(lambda b, x, y: b.shl(x, y)),
    operator.rshift: _int_op(lambda b, x, y: b.ashr(x, y)),
    operator.add: _either(_int_op(lambda b, x, y: b.add(x, y)), _float_op(lambda b, x, y: b.fadd(x, y))),
    operator.sub: _either(_int_op(lambda b, x, y: b.sub(x, y)), _float_op(lambda b, x, y: b.fsub(x, y))),
    operator.mul: _float_op(lambda b, x, y: b.fmul(x, y)),
}.items():
    register_operation(_operator, _operands, (Lanes, types.Any))


def _typer(result: Any, arguments: tuple[Any, ...], emit: Emit) -> Typer:
    return lambda *args: (result, arguments, emit) if len(args) == len(arguments) else None


@compiled_form(_typer(FLOATS, (INTS,), lambda b, v: b.sitofp(v, FLOATS.llvm)))
def to_floats(lanes: Any) -> Any:
    """int32 lanes as float32 lanes."""
    return lanes.astype(np.float32)


@compiled_form(
    _typer(
        INTS,
        (types.int64,),
        lambda b, word: b.and_(
            b.lshr(splat(b, b.trunc(word, I32)), constant_vector(I32, range(WIDTH))),
            constant_vector(I32, [1] * WIDTH),
        ),
    )
)
def bits(word: Any) -> Any:
    """Bits 0 to 15 of an integer as lanes of 0 and 1."""
    return ((int(word) >> np.arange(WIDTH)) & 1).astype(np.int32)


# Reading packed bytes: `source` is uint8, `at` a byte offset.

_BYTES = types.CPointer(types.uint8)
_READ = (_BYTES, types.int64)


def _widened(extend: str) -> Emit:
    def emit(builder: Any, source: Any, at: Any) -> Any:
        loaded = load(builder, source, at, ir.VectorType(I8, WIDTH))
        return getattr(builder, extend)(loaded, INTS.llvm)

    return emit


def half_to_float(builder: Any, half_bits: Any) -> Any:
    """float32 of float16 bits, scalar or vector, exact; subnormals through an integer conversion."""
    vector = isinstance(half_bits.type, ir.VectorType)

    def shaped(element: Any) -> Any:
        return ir.VectorType(element, WIDTH) if vector else element

    def constant(element: Any, value: float) -> Any:
        return constant_vector(element, [value] * WIDTH) if vector else ir.Constant(element, value)

    if has_half_conversion():
        return builder.fpext(builder.bitcast(half_bits, shaped(F16)), shaped(F32))
    word = builder.zext(half_bits, shaped(I32))
    magnitude = builder.and_(word, constant(I32, 0x7FFF))
    shifted = builder.shl(magnitude, constant(I32, 13))
    normal = builder.bitcast(builder.add(shifted, constant(I32, 112 << 23)), shaped(F32))
    infinite = builder.bitcast(builder.or_(shifted, constant(I32, 0x7F800000)), shaped(F32))
    small = builder.fmul(builder.sitofp(magnitude, shaped(F32)), constant(F32, 2.0**-24))
    value = builder.select(
        builder.icmp_unsigned(">=", magnitude, constant(I32, 0x7C00)),
        infinite,
        builder.select(builder.icmp_unsigned("<", magnitude, constant(I32, 0x400)), small, normal),
    )
    sign = builder.shl(builder.and_(word, constant(I32, 0x8000)), constant(I32, 16))
    return builder.bitcast(builder.or_(builder.bitcast(value, shaped(I32)), sign), shaped(F32))


def bfloat_to_float(builder: Any, bfloat_bits: Any) -> Any:
    """float32 of bfloat16 bits, scalar or vector."""
    vector = isinstance(bfloat_bits.type, ir.VectorType)
    wide, result = (INTS.llvm, FLOATS.llvm) if vector else (I32, F32)
    sixteen = constant_vector(I32, [16] * WIDTH) if vector else ir.Constant(I32, 16)
    return builder.bitcast(builder.shl(builder.zext(bfloat_bits, wide), sixteen), result)


def _reader(result: Any, stored: Any, convert: Callable[[Any, Any], Any]) -> Typer:
    return _typer(result, _READ, lambda b, source, at: convert(b, load(b, source, at, stored)))


_HALVES = ir.VectorType(I16, WIDTH)


@compiled_form(_typer(INTS, _READ, _widened("zext")))
def read_bytes(source: Any, at: Any) -> Any:
    """16 unsigned bytes."""
    return source[at : at + WIDTH].astype(np.int32)


@compiled_form(_typer(INTS, _READ, _widened("sext")))
def read_signed_bytes(source: Any, at: Any) -> Any:
    """16 signed bytes."""
    return source[at : at + WIDTH].view(np.int8).astype(np.int32)


@compiled_form(_typer(FLOATS, _READ, lambda b, source, at: load(b, source, at, FLOATS.llvm)))
def read_floats(source: Any, at: Any) -> Any:
    """16 float32."""
    return source[at : at + 4 * WIDTH].view(np.float32)


@compiled_form(_reader(FLOATS, _HALVES, half_to_float))
def read_halves(source: Any, at: Any) -> Any:
    """16 float16, widened."""
    return source[at : at + 2 * WIDTH].view(np.float16).astype(np.float32)


@compiled_form(_reader(FLOATS, _HALVES, bfloat_to_float))
def read_bfloats(source: Any, at: Any) -> Any:
    """16 bfloat16, widened."""
    return (source[at : at + 2 * WIDTH].view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


@compiled_form(_typer(types.float32, _READ, lambda b, source, at: load(b, source, at, F32)))
def read_float(source: Any, at: Any) -> Any:
    """One float32."""
    return source[at : at + 4].view(np.float32)[0]


@compiled_form(_reader(types.float32, I16, half_to_float))
def read_half(source: Any, at: Any) -> Any:
    """One float16, widened."""
    return np.float32(source[at : at + 2].view(np.float16)[0])


@compiled_form(_reader(types.float32, I16, bfloat_to_float))
def read_bfloat(source: Any, at: Any) -> Any:
    """One bfloat16, widened."""
    return (source[at : at + 2].view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)[0]


def _exponent_byte(builder: Any, source: Any, at: Any) -> Any:
    byte = builder.zext(load(builder, source, at, I8), I32)
    one, shift = ir.Constant(I32, 1), ir.Constant(I32, 23)
    normal = builder.shl(builder.sub(byte, one), shift)
    tiny = builder.shl(ir.Constant(I32, 0x00200000), byte)
    small = builder.icmp_unsigned("<", byte, ir.Constant(I32, 2))
    return builder.bitcast(builder.select(small, tiny, normal), F32)


@compiled_form(_typer(types.float32, _READ, _exponent_byte))
def read_exponent(source: Any, at: Any) -> Any:
    """Half of the power of two that an E8M0 byte stands for: 2^(byte - 128)."""
    byte = int(source[at])
    word = 0x00200000 << byte if byte < 2 else (byte - 1) << 23
    return np.array([word], np.uint32).view(np.float32)[0]


# Writing decoded values.


def _store(builder: Any, target: Any, at: Any, lanes: Any) -> None:
    place = builder.bitcast(builder.gep(target, [at]), FLOATS.llvm.as_pointer())
    builder.store(lanes, place, align=4)


@compiled_form(_typer(types.void, (types.CPointer(types.float32), types.int64, FLOATS), _store))
def write_floats(target: Any, at: Any, lanes: Any) -> None:
    """Store 16 float32 at element `at`."""
    target[at : at + WIDTH] = lanes


# Tables of 16 values, indexed by lanes.


def make_codebook(values: Sequence[int]) -> Callable[[Any], Any]:
    """An operation that maps int32 lanes (each 0 to 15) to the float32 `values`."""
    table = np.array(values, np.float32)
    numbers = [float(value) for value in values]

    def emit(builder: Any, index: Any) -> Any:
        if "avx512f" in target_features():
            kind = FLOATS.llvm
            permute = function(builder, "llvm.x86.avx512.permvar.sf.512", kind, [kind, INTS.llvm])
            return builder.call(permute, [constant_vector(F32, numbers), index])
        constant = ir.Constant(ir.ArrayType(F32, WIDTH), numbers)
        place = cgutils.global_constant(builder, "codebook", constant)
        result = ir.Constant(FLOATS.llvm, ir.Undefined)
        for lane in range(WIDTH):
            position = ir.Constant(I32, lane)
            entry = builder.gep(place, [ir.Constant(I32, 0), builder.extract_element(index, position)])
            result = builder.insert_element(result, builder.load(entry), position)
        return result

    def codebook(lanes: Any) -> Any:
        return table[lanes]

    register_operation(codebook, _typer(FLOATS, (INTS,), emit), (types.VarArg(types.Any),))
    return codebook
