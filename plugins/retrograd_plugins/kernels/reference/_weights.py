"""Expansion of stored weights to float64, with a cache for weights that cannot change."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.gguf.formats import dequantise
from retrograd_hookspecs import KernelError, QuantMatrix

CACHE_BYTES = 4 * 2**30

Float64 = npt.NDArray[np.float64]


def expand(weight: QuantMatrix) -> Float64:
    """The weight as float64 (N, K), a new array.

    Raises:
        ModelError: the format is unknown, or cannot be decoded.
        KernelError: the rows do not hold `columns` values.
    """
    decode = weight.decode
    expanded = decode(weight.data) if decode is not None else dequantise(weight.data, weight.format)
    if expanded.shape != weight.shape:
        raise KernelError(
            f"weight {weight.name!r}: {weight.data.shape[1]} bytes a row hold {expanded.shape[1]} values of"
            f" format {weight.format}, not the declared {weight.columns}; the file is damaged"
        )
    return expanded.astype(np.float64)


class WeightCache:
    """Expanded weights by place in memory, the least recently used dropped above `limit_bytes`.

    Only read-only data is kept: a writeable weight may be trained in place between two calls.
    """

    def __init__(self, limit_bytes: int = CACHE_BYTES) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        # The stored bytes are kept beside their expansion so that their address is not used again.
        self._entries: OrderedDict[tuple[Any, ...], tuple[npt.NDArray[np.uint8], Float64]] = OrderedDict()

    def get(self, weight: QuantMatrix) -> Float64:
        """The weight as float64 (N, K), not to be written to."""
        if weight.data.flags.writeable:
            return expand(weight)
        key = (weight.format, weight.shape, weight.data.strides, weight.data.ctypes.data)
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry[1]
        expanded = expand(weight)
        self._entries[key] = (weight.data, expanded)
        self._bytes += expanded.nbytes
        while self._bytes > self._limit and len(self._entries) > 1:
            _, (_, dropped) = self._entries.popitem(last=False)
            self._bytes -= dropped.nbytes
        return expanded
