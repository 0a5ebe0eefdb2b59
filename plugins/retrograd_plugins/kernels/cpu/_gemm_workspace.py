"""Scratch that products share, and the check of their arguments."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import KernelError, QuantMatrix

Floats = npt.NDArray[np.float32]


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def aligned_floats(count: int) -> Floats:
    """Uninitialised float32 array that begins on a cache line."""
    raw = np.empty(count + 16, np.float32)
    start = (-raw.ctypes.data % 64) // 4
    return raw[start : start + count]


class Workspace:
    """Scratch that the products of one run share; grows to the largest and stays.

    `lock` is held during a product: two Python threads take turns.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counter = np.zeros(8, np.int64)
        self._scratch = aligned_floats(0)
        self._activations = aligned_floats(0)

    def scratch(self, count: int) -> Floats:
        """At least `count` float32 for decoded and packed panels."""
        if self._scratch.size < count:
            self._scratch = aligned_floats(count)
        return self._scratch

    def activations(self, count: int) -> Floats:
        """At least `count` float32 for converted activations."""
        if self._activations.size < count:
            self._activations = aligned_floats(count)
        return self._activations

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._scratch.nbytes + self._activations.nbytes


def check(
    argument: str, array: Any, shape: tuple[int, int], w: QuantMatrix, *, written: bool = False
) -> None:
    """Raise `KernelError` unless `array` is float32, C-contiguous and of `shape`."""
    if (
        array.shape != shape
        or array.dtype != np.float32
        or not array.flags.c_contiguous
        or (written and not array.flags.writeable)
    ):
        raise KernelError(
            f"weight {w.name!r} {w.shape}: {argument} must be a C-contiguous"
            f"{' writeable' if written else ''} float32 array of shape {shape}, not"
            f" {array.dtype} {array.shape}{'' if array.flags.c_contiguous else ', not contiguous'}"
        )
