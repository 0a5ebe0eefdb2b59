"""Float32 lanes for the kernels that hold activations: memory, reductions, exp and tanh.

Each operation has a Python form on NumPy arrays and a compiled form, as in `_simd`. A function of lanes
gives a lane the same bits whatever stands in the others, so kernels built on them keep the bitwise rule.

`array` is a contiguous float32 array of any rank, `at` the flat index of an element; nothing is checked
against its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from ._simd import F32, FLOATS, I32, I64, WIDTH, compiled_form, constant_vector, function, splat
from ._simd_features import has_fused_multiply_add

VECTOR = FLOATS.llvm
INT_VECTOR = ir.VectorType(I32, WIDTH)

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
EXP_LOWEST = -86.5
"""Below it, where exp is about 2.7e-38 and float32 near its smallest normal number, the result is 0."""
EXP_HIGHEST = 88.72283172607422
EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
"""(exp(r) − 1 − r) / r² on |r| <= ln(2) / 2, highest power first.

Source: S. L. Moshier's Cephes, `expf`.
"""
TANH_POLYNOMIAL = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)
"""(tanh(x) − x) / x³ in powers of x² on |x| < 0.625, highest power first.

Source: S. L. Moshier's Cephes, `tanhf`.
"""
TANH_POLYNOMIAL_END = 0.625


def is_float_array(kind: Any) -> bool:
    """True for the Numba type of a contiguous float32 array."""
    return isinstance(kind, types.Array) and kind.dtype == types.float32 and kind.layout == "C"


def data_pointer(builder: Any, array: Any) -> Any:
    """Pointer to the first element: the fifth member of Numba's array structure."""
    return builder.extract_value(array, 4)


def vector_pointer(builder: Any, array: Any, at: Any) -> Any:
    """Pointer to lanes that begin at flat index `at`."""
    return builder.bitcast(builder.gep(data_pointer(builder, array), [at]), VECTOR.as_pointer())


def multiply_add_vectors(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, fused where the processor can."""
    if has_fused_multiply_add():
        fma = function(builder, f"llvm.fma.v{WIDTH}f32", VECTOR, [VECTOR] * 3)
        return builder.call(fma, [x, y, z])
    return builder.fadd(builder.fmul(x, y), z)


def _constant(value: float) -> Any:
    return constant_vector(F32, [float(np.float32(value))] * WIDTH)


def _integer(value: int) -> Any:
    return constant_vector(I32, [value] * WIDTH)


def _typed(result: Any, arguments: Sequence[Any], emit: Callable[..., Any]) -> Callable[..., Any]:
    """Typer of an operation; None among `arguments` stands for a float32 array."""

    def typer(*given: Any) -> Any:
        if len(given) != len(arguments):
            return None
        if any(want is None and not is_float_array(got) for want, got in zip(arguments, given, strict=True)):
            return None
        kinds = (got if want is None else want for want, got in zip(arguments, given, strict=True))
        return result, tuple(kinds), emit

    return typer


# Memory.


def _emit_load(builder: Any, array: Any, at: Any) -> Any:
    return builder.load(vector_pointer(builder, array, at), align=4)


@compiled_form(_typed(FLOATS, (None, types.int64), _emit_load))
def load_lanes(array: Any, at: Any) -> Any:
    """Elements [at, at + 16)."""
    return array.reshape(-1)[at : at + WIDTH].copy()


def _emit_store(builder: Any, array: Any, at: Any, lanes: Any) -> None:
    builder.store(lanes, vector_pointer(builder, array, at), align=4)


@compiled_form(_typed(types.void, (None, types.int64, FLOATS), _emit_store))
def store_lanes(array: Any, at: Any, lanes: Any) -> None:
    """Set elements [at, at + 16)."""
    array.reshape(-1)[at : at + WIDTH] = lanes


def emit_load_some(builder: Any, array: Any, at: Any, count: Any, fill: Any) -> Any:
    # Through the stack: LLVM's masked loads changed their signature between versions.
    buffer = cgutils.alloca_once(builder, VECTOR)
    builder.store(splat(builder, fill), buffer, align=4)
    source, target = data_pointer(builder, array), builder.bitcast(buffer, F32.as_pointer())
    with cgutils.for_range(builder, count, intp=I64) as loop:
        value = builder.load(builder.gep(source, [builder.add(at, loop.index)]))
        builder.store(value, builder.gep(target, [loop.index]))
    return builder.load(buffer, align=4)


@compiled_form(_typed(FLOATS, (None, types.int64, types.int64, types.float32), emit_load_some))
def load_some(array: Any, at: Any, count: Any, fill: Any) -> Any:
    """Elements [at, at + count), count <= 16, and `fill` in the lanes after them."""
    lanes = np.full(WIDTH, fill, np.float32)
    lanes[:count] = array.reshape(-1)[at : at + count]
    return lanes


def _emit_store_some(builder: Any, array: Any, at: Any, count: Any, lanes: Any) -> None:
    buffer = cgutils.alloca_once_value(builder, lanes)
    source, target = builder.bitcast(buffer, F32.as_pointer()), data_pointer(builder, array)
    with cgutils.for_range(builder, count, intp=I64) as loop:
        value = builder.load(builder.gep(source, [loop.index]))
        builder.store(value, builder.gep(target, [builder.add(at, loop.index)]))


@compiled_form(_typed(types.void, (None, types.int64, types.int64, FLOATS), _emit_store_some))
def store_some(array: Any, at: Any, count: Any, lanes: Any) -> None:
    """Set elements [at, at + count), count <= 16, to the first lanes."""
    array.reshape(-1)[at : at + count] = lanes[:count]


# Arithmetic beyond the operators + - *.


@compiled_form(_typed(FLOATS, (types.float32,), splat))
def fill_lanes(value: Any) -> Any:
    """The same number in every lane."""
    return np.full(WIDTH, value, np.float32)


@compiled_form(_typed(FLOATS, (FLOATS, FLOATS, FLOATS), multiply_add_vectors))
def multiply_add(x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once where the processor fuses."""
    return x * y + z


@compiled_form(_typed(FLOATS, (FLOATS, FLOATS), lambda b, x, y: b.fdiv(x, y)))
def divide(x: Any, y: Any) -> Any:
    """x / y."""
    return x / y


def _emit_maximum(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@compiled_form(_typed(FLOATS, (FLOATS, FLOATS), _emit_maximum))
def maximum(x: Any, y: Any) -> Any:
    """The larger of x and y; y where either is not a number."""
    return np.where(x > y, x, y)


def _emit_keep(builder: Any, lanes: Any, low: Any, high: Any, other: Any) -> Any:
    numbers = constant_vector(I32, range(WIDTH))
    above = builder.icmp_signed(">=", numbers, splat(builder, low))
    below = builder.icmp_signed("<", numbers, splat(builder, high))
    return builder.select(builder.and_(above, below), lanes, splat(builder, other))


@compiled_form(_typed(FLOATS, (FLOATS, types.int32, types.int32, types.float32), _emit_keep))
def keep_between(lanes: Any, low: Any, high: Any, other: Any) -> Any:
    """The lanes numbered [low, high), and `other` in the rest."""
    numbers = np.arange(WIDTH)
    return np.where((numbers >= low) & (numbers < high), lanes, np.float32(other)).astype(np.float32)


def _emit_keep_not_below(builder: Any, lanes: Any, value: Any, bound: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">=", value, bound), lanes, _constant(0.0))


@compiled_form(_typed(FLOATS, (FLOATS, FLOATS, FLOATS), _emit_keep_not_below))
def keep_not_below(lanes: Any, value: Any, bound: Any) -> Any:
    """The lanes where value >= bound, and 0 in the rest."""
    return np.where(value >= bound, lanes, np.float32(0.0)).astype(np.float32)


# Reductions, as a tree: halves are combined until one lane is left.


def _tree(combine: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    def emit(builder: Any, lanes: Any) -> Any:
        width = WIDTH
        while width > 1:
            width //= 2
            low = builder.shuffle_vector(lanes, lanes, constant_vector(I32, range(width)))
            high = builder.shuffle_vector(lanes, lanes, constant_vector(I32, range(width, 2 * width)))
            lanes = combine(builder, low, high)
        return builder.extract_element(lanes, ir.Constant(I32, 0))

    return emit


emit_sum = _tree(lambda builder, x, y: builder.fadd(x, y))


@compiled_form(_typed(types.float32, (FLOATS,), emit_sum))
def sum_lanes(lanes: Any) -> Any:
    """The sum of all lanes, in a fixed order."""
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return lanes[0]


@compiled_form(_typed(types.float32, (FLOATS,), _tree(_emit_maximum)))
def max_lanes(lanes: Any) -> Any:
    """The largest lane."""
    return lanes.max()


@compiled_form(_typed(types.float32, (FLOATS,), lambda b, x: b.extract_element(x, ir.Constant(I32, 0))))
def first_lane(lanes: Any) -> Any:
    """Lane 0."""
    return lanes[0]


# Functions.


def _polynomial(builder: Any, x: Any, coefficients: Sequence[float]) -> Any:
    value = _constant(coefficients[0])
    for coefficient in coefficients[1:]:
        value = multiply_add_vectors(builder, value, x, _constant(coefficient))
    return value


def emit_exp(builder: Any, x: Any) -> Any:
    """exp of lanes: x = n·ln 2 + r, a polynomial in r, and 2^n put together from bits.

    Without a fused multiply-add n·ln 2 still comes out nearly exact, as its high part has few bits.
    """
    low, high = _constant(EXP_LOWEST), _constant(EXP_HIGHEST)
    too_low = builder.fcmp_ordered("<", x, low)
    too_high = builder.fcmp_ordered(">", x, high)
    clamped = builder.select(too_low, low, builder.select(too_high, high, x))
    # Adding 1.5·2^23 rounds to an integer, which is then in the low bits.
    magic = _constant(12582912.0)
    shifted = multiply_add_vectors(builder, clamped, _constant(LOG2_E), magic)
    n = builder.fsub(shifted, magic)
    r = multiply_add_vectors(builder, n, _constant(-LN2_HIGH), clamped)
    r = multiply_add_vectors(builder, n, _constant(-LN2_LOW), r)
    curve = multiply_add_vectors(builder, _polynomial(builder, r, EXP_POLYNOMIAL), builder.fmul(r, r), r)
    curve = builder.fadd(curve, _constant(1.0))
    # n reaches 128, whose power is no float32: multiply by 2^(n - 1) and by 2.
    exponent = builder.add(builder.bitcast(shifted, INT_VECTOR), _integer(126))
    power = builder.bitcast(builder.shl(exponent, _integer(23)), VECTOR)
    value = builder.fmul(builder.fmul(curve, _constant(2.0)), power)
    value = builder.select(too_low, _constant(0.0), value)
    return builder.select(too_high, _constant(float("inf")), value)


def _emit_tanh(builder: Any, x: Any) -> Any:
    sign = builder.and_(builder.bitcast(x, INT_VECTOR), _integer(-(2**31)))
    bits = builder.and_(builder.bitcast(x, INT_VECTOR), _integer(2**31 - 1))
    size = builder.bitcast(bits, VECTOR)
    square = builder.fmul(x, x)
    small = multiply_add_vectors(
        builder, builder.fmul(_polynomial(builder, square, TANH_POLYNOMIAL), square), x, x
    )
    raised = builder.fadd(emit_exp(builder, builder.fadd(size, size)), _constant(1.0))
    large = builder.fsub(_constant(1.0), builder.fdiv(_constant(2.0), raised))
    signed = builder.bitcast(builder.or_(builder.bitcast(large, INT_VECTOR), sign), VECTOR)
    near = builder.fcmp_ordered("<", size, _constant(TANH_POLYNOMIAL_END))
    return builder.select(near, small, signed)


@compiled_form(_typed(FLOATS, (FLOATS,), emit_exp))
def exp_lanes(x: Any) -> Any:
    """exp(x) with a relative error below 2e-7; exactly 1 at 0, exactly 0 below −86.5."""
    with np.errstate(over="ignore", under="ignore"):
        value = np.exp(x.astype(np.float64)).astype(np.float32)
    return np.where(x < np.float32(EXP_LOWEST), np.float32(0.0), value)


@compiled_form(_typed(FLOATS, (FLOATS,), _emit_tanh))
def tanh_lanes(x: Any) -> Any:
    """tanh(x) with a relative error below 3e-7."""
    return np.tanh(x.astype(np.float64)).astype(np.float32)
