"""Memory and calls by address, for drivers that serve every format with one compiled function.

A driver gets kernels as addresses of compiled functions (Numba `cfunc`s), so it is compiled once and
not once a format. Without the JIT, `address` gives a NumPy view and `call` calls a Python function.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from ._simd import F32, I8, I32, I64, compiled_form, function


def _address(array: Any, index: Any) -> Any:
    if not isinstance(array, types.Array) or array.layout != "C":
        return None
    size = array.dtype.bitwidth // 8

    def emit(builder: Any, value: Any, position: Any) -> Any:
        # The data pointer is the fifth member of Numba's array structure.
        data = builder.ptrtoint(builder.extract_value(value, 4), I64)
        return builder.add(data, builder.mul(position, ir.Constant(I64, size)))

    return types.int64, (array, types.int64), emit


@compiled_form(_address)
def address(array: Any, index: Any) -> Any:
    """Address of element `index`, counted flat, of a contiguous array; in Python the view from there."""
    return array.reshape(-1)[index:]


def _call(*signature: Any) -> Any:
    def emit(builder: Any, target: Any, *arguments: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(arguments))
        builder.call(builder.inttoptr(target, kind.as_pointer()), arguments)

    return types.void, (types.int64,) * len(signature), emit


@compiled_form(_call)
def call(target: Any, *arguments: Any) -> None:
    """Call a compiled function at an address with integers and addresses; in Python, the function."""
    target(*arguments)


def _take(array: Any) -> Any:
    def emit(builder: Any, value: Any) -> Any:
        return builder.atomic_rmw("add", builder.extract_value(value, 4), ir.Constant(I64, 1), "monotonic")

    return types.int64, (array,), emit


@compiled_form(_take)
def take_ticket(counter: Any) -> Any:
    """Value of `counter[0]` (int64), which is counted up atomically: hands out tasks to threads."""
    ticket = int(counter[0])
    counter[0] += 1
    return ticket


# Single values behind an address; used by compiled kernels only.


def _read_f32(place: Any) -> Any:
    return (
        types.float32,
        (types.int64,),
        lambda b, p: b.load(b.inttoptr(p, F32.as_pointer()), align=4),
    )


@compiled_form(_read_f32)
def peek(place: Any) -> Any:
    """The float32 at an address; in Python the first element of the view."""
    return place[0]


def _write_f32(place: Any, value: Any) -> Any:
    def emit(builder: Any, target: Any, number: Any) -> None:
        builder.store(number, builder.inttoptr(target, F32.as_pointer()), align=4)

    return types.void, (types.int64, types.float32), emit


@compiled_form(_write_f32)
def poke(place: Any, value: Any) -> None:
    """Store a float32 at an address; in Python in the first element of the view."""
    place[0] = value


PREFETCHED = 8
"""Lines of a `prefetch_for_writing`."""


def _prefetch(place: Any, stride: Any) -> Any:
    def emit(builder: Any, start: Any, step: Any) -> None:
        pointer = I8.as_pointer()
        name = "llvm.prefetch.p0" if str(pointer) == "ptr" else "llvm.prefetch.p0i8"
        fetch = function(builder, name, ir.VoidType(), [pointer, I32, I32, I32])
        hints = [ir.Constant(I32, number) for number in (1, 2, 1)]
        for line in range(PREFETCHED):
            at = builder.add(start, builder.mul(step, ir.Constant(I64, line)))
            builder.call(fetch, [builder.inttoptr(at, pointer), *hints])

    return types.void, (types.int64, types.int64), emit


@compiled_form(_prefetch)
def prefetch_for_writing(place: Any, stride: Any) -> None:
    """Begin to own, in the second cache, the lines at `PREFETCHED` places `stride` bytes apart."""
