"""What the kernels that hold activations share: how they are compiled, split and checked."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numba
import numpy.typing as npt
from numba.core import types

from retrograd_hookspecs import KernelError

Array = npt.NDArray[Any]

SERIAL: Mapping[str, Any] = MappingProxyType({"nogil": True, "cache": True, "error_model": "numpy"})
PARALLEL: Mapping[str, Any] = MappingProxyType({**SERIAL, "parallel": True})

# Inputs are read-only types, which writeable arrays convert to: one compiled form serves both.
IN1, IN2, IN3 = (types.Array(types.float32, rank, "C", readonly=True) for rank in (1, 2, 3))
OUT1, OUT2, OUT3 = (types.Array(types.float32, rank, "C") for rank in (1, 2, 3))
IDS = types.Array(types.int32, 1, "C", readonly=True)
WHOLE1, WHOLE2 = (types.Array(types.int64, rank, "C", readonly=True) for rank in (1, 2))
COUNTER = types.Array(types.int64, 1, "C")
INT = types.int64
F32 = types.float32
NONE = types.void

SERIAL_ELEMENTS = 16384
"""Work below this many elements is done on the calling thread: waking the others takes longer."""


def chunks_for(elements: int) -> int:
    """Into how many shares work on so many elements is split: 1, or one a thread."""
    return 1 if elements < SERIAL_ELEMENTS else int(numba.get_num_threads())


def require_shape(op: str, name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Raise `KernelError` unless `array` has `shape`: kernels do not check indices."""
    if array.shape != shape:
        raise KernelError(
            f"{op}: {name} has shape {array.shape} where {shape} is needed; see the table of ops in"
            " retrograd_hookspecs.kernels"
        )
