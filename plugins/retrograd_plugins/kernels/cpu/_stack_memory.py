"""Memory by address and order between threads, for the compiled functions of `_stack_tasks`.

An address is an int64. A *table* is a row of int64 in memory; float32 settings lie in the low bytes of
their word. The forms that run without the JIT take NumPy views in place of addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from ._simd import F16, F32, FLOATS, I8, I32, I64, WIDTH, compiled_form, constant_vector, function

_HALVES = ir.VectorType(F16, WIDTH)


def _fixed(result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: (result, arguments, emit) if len(given) == len(arguments) else None


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _emit_word(builder: Any, table: Any, index: Any) -> Any:
    return builder.load(builder.gep(_at(builder, table, I64), [index]), align=8)


@compiled_form(_fixed(types.int64, (types.int64, types.int64), _emit_word))
def word(table: Any, index: int) -> int:
    """Entry `index` of a table."""
    return int(table[index])


def _emit_number(builder: Any, table: Any, index: Any) -> Any:
    place = builder.gep(_at(builder, table, I64), [index])
    return builder.load(builder.bitcast(place, F32.as_pointer()), align=8)


@compiled_form(_fixed(types.float32, (types.int64, types.int64), _emit_number))
def number(table: Any, index: int) -> Any:
    """The float32 in entry `index` of a table."""
    return table[index : index + 1].view(np.float32)[0]


@compiled_form(_fixed(FLOATS, (types.int64,), lambda b, place: b.load(_at(b, place, FLOATS.llvm), align=4)))
def lanes_at(place: Any) -> Any:
    """16 float32 from an address on."""
    return place[:WIDTH].copy()


def _emit_put(builder: Any, place: Any, lanes: Any) -> None:
    builder.store(lanes, _at(builder, place, FLOATS.llvm), align=4)


@compiled_form(_fixed(types.void, (types.int64, FLOATS), _emit_put))
def put_lanes(place: Any, lanes: Any) -> None:
    """Store 16 float32 from an address on."""
    place[:WIDTH] = lanes


def _emit_halves(builder: Any, place: Any) -> Any:
    return builder.fpext(builder.load(_at(builder, place, _HALVES), align=2), FLOATS.llvm)


@compiled_form(_fixed(FLOATS, (types.int64,), _emit_halves))
def halves_at(place: Any) -> Any:
    """16 float16 from an address on, widened. The processor must convert them (F16C)."""
    return place[:WIDTH].astype(np.float32)


def _emit_put_halves(builder: Any, place: Any, lanes: Any) -> None:
    builder.store(builder.fptrunc(lanes, _HALVES), _at(builder, place, _HALVES), align=2)


@compiled_form(_fixed(types.void, (types.int64, FLOATS), _emit_put_halves))
def put_halves(place: Any, lanes: Any) -> None:
    """Store 16 float32 from an address on, rounded to float16 (half to even)."""
    place[:WIDTH] = lanes.astype(np.float16)


def _emit_fetch(builder: Any, place: Any) -> None:
    target = builder.inttoptr(place, I8.as_pointer())
    name = "llvm.prefetch.p0" if str(target.type) == "ptr" else "llvm.prefetch.p0i8"
    fetch = function(builder, name, ir.VoidType(), [target.type, I32, I32, I32])
    builder.call(fetch, [target, *(ir.Constant(I32, value) for value in (0, 2, 1))])


@compiled_form(_fixed(types.void, (types.int64,), _emit_fetch))
def fetch_line(place: Any) -> None:
    """Begin to load the cache line of an address into the second cache."""


# Products of rows.


def _exchange(step: int) -> tuple[list[int], list[int]]:
    """Two shuffles of a pair of vectors. In both, a lane is of the second vector if bit `step` of its number
    is set; one takes the lanes without that bit and the other those with it, so that a sum adds neighbours.
    """
    low = [(WIDTH if lane & step else 0) + (lane & ~step) for lane in range(WIDTH)]
    return low, [lane | step for lane in low]


def _emit_dots(builder: Any, x: Any, rows: Any, stride: Any, size: Any) -> Any:
    """16 sums side by side, then halves of pairs are added until lane r holds the sum of row r."""
    kind = FLOATS.llvm
    start = builder.block
    loop, done = (builder.append_basic_block(name) for name in ("dots", "dots_done"))
    builder.branch(loop)
    builder.position_at_end(loop)
    offset = builder.phi(I64)
    offset.add_incoming(ir.Constant(I64, 0), start)
    sums = [builder.phi(kind) for _ in range(WIDTH)]
    fma = function(builder, f"llvm.fma.v{WIDTH}f32", kind, [kind] * 3)
    value = builder.load(_at(builder, builder.add(x, offset), kind), align=4)
    following = []
    place = builder.add(rows, offset)
    for one in sums:
        one.add_incoming(constant_vector(F32, [0.0] * WIDTH), start)
        row = builder.load(_at(builder, place, kind), align=4)
        following.append(builder.call(fma, [row, value, one]))
        place = builder.add(place, stride)
    advanced = builder.add(offset, ir.Constant(I64, 4 * WIDTH))
    offset.add_incoming(advanced, loop)
    for one, later in zip(sums, following, strict=True):
        one.add_incoming(later, loop)
    end = builder.mul(size, ir.Constant(I64, 4))
    builder.cbranch(builder.icmp_signed("<", advanced, end), loop, done)
    builder.position_at_end(done)
    vectors, step = following, 1
    while len(vectors) > 1:
        masks = [constant_vector(I32, lanes) for lanes in _exchange(step)]
        vectors = [
            builder.fadd(*(builder.shuffle_vector(first, second, mask) for mask in masks))
            for first, second in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        step *= 2
    return vectors[0]


@compiled_form(_fixed(FLOATS, (types.int64,) * 4, _emit_dots))
def dot_rows(x: Any, rows: Any, stride: int, size: int) -> Any:
    """Products of x (size,) with 16 rows `stride` bytes apart, float32; size is a multiple of 16."""
    pitch = stride // 4
    return np.array([x[:size] @ rows[pitch * r : pitch * r + size] for r in range(WIDTH)], np.float32)


# Order between threads.


def _emit_add(builder: Any, place: Any, value: Any) -> Any:
    return builder.atomic_rmw("add", _at(builder, place, I64), value, "acq_rel")


@compiled_form(_fixed(types.int64, (types.int64, types.int64), _emit_add))
def add_shared(place: Any, value: int) -> int:
    """The int64 at an address, which is counted up by `value` atomically; orders memory around it."""
    found = int(place[0])
    place[0] += value
    return found


def _emit_fresh(builder: Any, place: Any) -> Any:
    return builder.load_atomic(_at(builder, place, I64), "acquire", 8)


@compiled_form(_fixed(types.int64, (types.int64,), _emit_fresh))
def read_shared(place: Any) -> int:
    """The int64 at an address as other threads left it, and what they wrote before it."""
    return int(place[0])


def _emit_pause(builder: Any) -> None:
    builder.call(function(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])


@compiled_form(_fixed(types.void, (), _emit_pause))
def pause() -> None:
    """Tell the processor that the thread waits."""
