"""Scratch memory of a run: every intermediate array has a name and is allocated once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import Backend

KEPT_ROWS = 256
"""Arrays that a scope gives again without asking the workspace: a pass asks for thousands."""


class Workspace:
    """Arrays by name. A name is allocated at first use and again only if it must grow.

    Args:
        backend: device that holds the arrays.
        token_capacity: tokens that arrays with a row a token are sized for, so that passes of any length
            up to it share one allocation.
    """

    def __init__(self, backend: Backend, token_capacity: int = 0) -> None:
        self.backend = backend
        self.token_capacity = token_capacity
        self.allocations = 0
        """How often memory was asked for; constant once a run is in its steady state."""
        self._buffers: dict[str, Any] = {}
        self._rows: dict[str, dict[Any, Any]] = {}

    def get(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, *, capacity: int = 0
    ) -> Any:
        """The array `name` (C-contiguous, of the compute dtype unless given); contents are what they were.

        `capacity` is a number of elements to allocate ahead.
        """
        wanted = np.dtype(dtype) if dtype is not None else self.backend.compute_dtype
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != wanted or buffer.shape[0] < size:
            # Forget the old buffer first: both together would be the peak of the run.
            for rows in self._rows.values():
                rows.clear()
            self._buffers.pop(name, None)
            del buffer
            buffer = self.backend.empty((max(size, capacity),), wanted)
            self._buffers[name] = buffer
            self.allocations += 1
        return buffer[:size].reshape(shape)

    def scope(self, prefix: str, *, keeps: bool = True) -> Scope:
        """A view of this workspace in which all names begin with `prefix`; `keeps` as in `Scope`."""
        return Scope(self, prefix, self._rows.setdefault(prefix, {}), keeps=keeps)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of every array."""
        for name, buffer in self._buffers.items():
            yield name, int(buffer.shape[0]) * int(buffer.dtype.itemsize)


class Scope:
    """Names of a workspace under a prefix: the arrays of one block, or scratch that blocks share."""

    def __init__(
        self, workspace: Workspace, prefix: str, rows: dict[Any, Any], *, keeps: bool = True
    ) -> None:
        self.workspace = workspace
        self.keeps = keeps
        """False for the arrays of a pass that no backward pass follows: they may hold anything after it."""
        self._prefix = prefix
        self._rows = rows

    def rows(self, name: str, count: int, *tail: int, dtype: npt.DTypeLike | None = None) -> Any:
        """Array (count, *tail) with a row a token."""
        key = (name, count, tail, dtype)
        found = self._rows.get(key)
        if found is None:
            if len(self._rows) >= KEPT_ROWS:
                self._rows.clear()
            capacity = max(count, self.workspace.token_capacity) * math.prod(tail)
            found = self.workspace.get(f"{self._prefix}/{name}", (count, *tail), dtype, capacity=capacity)
            self._rows[key] = found
        return found

    def get(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None) -> Any:
        """Array of a shape that has nothing to do with tokens."""
        return self.workspace.get(f"{self._prefix}/{name}", shape, dtype)
