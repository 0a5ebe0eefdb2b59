"""Keys and values of earlier tokens, and the gradients that flow back to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .batch import PassBatch
from .workspace import Workspace


class KVCache:
    """Keys and values by block, (rows + loose rows, G, D).

    `rows` hold sequences, at places the caller hands out; behind them one row a token of the current
    pass, for runs that need no cache but share the pass with some that do. With a `dtype` below the compute
    dtype the sequence rows are stored in it, and a block's live rows are widened into one shared buffer
    for the kernels; a run's own keys and values are rounded in the same way, so that a token's result
    does not depend on where its sequence was cut.
    """

    def __init__(
        self,
        *,
        name: str,
        workspace: Workspace,
        blocks: int,
        heads: int,
        head_length: int,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        compute = workspace.backend.compute_dtype
        self._name = name
        self._workspace = workspace
        self._blocks = blocks
        self._tail = (heads, head_length)
        self.dtype: np.dtype[Any] = np.dtype(dtype) if dtype is not None else compute
        self.widens = self.dtype != compute
        self.rows = 0
        self._loose = 0
        self.stored: list[tuple[Any, Any]] = []
        """Keys and values of each block, (rows, G, D); replaced when the cache grows."""
        self._wide: tuple[Any, Any] = (None, None)

    def reserve(self, rows: int, loose: int) -> None:
        """Make room. Contents are lost if it has to grow."""
        if rows <= self.rows and loose <= self._loose:
            return
        self.rows, self._loose = max(rows, self.rows), max(loose, self._loose)
        everything = self.rows + self._loose
        count = self.rows if self.widens else everything
        self.stored = [self._pair(f"{block}", count, self.dtype) for block in range(self._blocks)]
        if self.widens:
            self._wide = self._pair("wide", everything, None)

    def _pair(self, name: str, rows: int, dtype: npt.DTypeLike | None) -> tuple[Any, Any]:
        shape = (rows, *self._tail)
        return (
            self._workspace.get(f"{self._name}/{name}.k", shape, dtype),
            self._workspace.get(f"{self._name}/{name}.v", shape, dtype),
        )

    def extend(self, block: int, k: Any, v: Any, batch: PassBatch) -> tuple[Any, Any]:
        """Store the pass's k, v (T, G, D) and return what `batch.segments` refers to.

        Storing the same pass again changes nothing, so the backward pass calls this too.
        """
        return (
            self._extend(self.stored[block][0], self._wide[0], k, batch),
            self._extend(self.stored[block][1], self._wide[1], v, batch),
        )

    def _extend(self, stored: Any, wide: Any, own: Any, batch: PassBatch) -> Any:
        seen = wide if self.widens else stored
        for run in batch.cached:
            first, stop = run.row + run.start, run.row + run.start + run.length
            stored[first:stop] = own[run.query : run.query + run.length]
            if self.widens:
                seen[run.row : stop] = stored[run.row : stop]
        if self.widens:
            for first, stop in batch.contexts:
                seen[first:stop] = stored[first:stop]
        for first, stop in batch.loose:
            seen[self.rows + first : self.rows + stop] = own[first:stop]
        return seen

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Copy `count` rows of every block: a prompt into the place of one of its answers."""
        for pair in self.stored:
            for stored in pair:
                stored[target : target + count] = stored[source : source + count]


class KVGradients:
    """Gradients by the keys and values of a `KVCache`, row for row, in the compute dtype.

    Attention adds to them; a run takes out the rows of its own tokens once no later run is left.
    """

    def __init__(self, *, name: str, workspace: Workspace, blocks: int, heads: int, head_length: int) -> None:
        self._name = name
        self._workspace = workspace
        self._blocks = blocks
        self._tail = (heads, head_length)
        self._rows = 0
        self._arrays: list[tuple[Any, Any]] = []

    def reserve(self, rows: int, loose: int) -> None:
        """Make arrays that match a cache of `rows` + `loose` rows; what they hold is anything."""
        shape = (rows + loose, *self._tail)
        self._rows = rows
        self._arrays = [
            (
                self._workspace.get(f"{self._name}/{block}.k", shape),
                self._workspace.get(f"{self._name}/{block}.v", shape),
            )
            for block in range(self._blocks)
        ]

    def clear(self, first: int, stop: int) -> None:
        """Zero the gradients of sequence rows [first, stop)."""
        for pair in self._arrays:
            for array in pair:
                array[first:stop] = 0

    def add_rows(self, source: int, target: int, count: int) -> None:
        """Add the gradients of `count` rows to others: those of a copied prefix to the rows it is from."""
        for pair in self._arrays:
            for array in pair:
                array[target : target + count] += array[source : source + count]

    def of(self, block: int, batch: PassBatch) -> tuple[Any, Any]:
        """The arrays that `attention_backward` adds to, with the loose rows of this pass zeroed."""
        for array in self._arrays[block]:
            array[self._rows : self._rows + batch.length] = 0
        return self._arrays[block]

    def take(self, block: int, batch: PassBatch, dk: Any, dv: Any) -> None:
        """Copy the rows of the pass's own tokens into dk, dv (T, G, D)."""
        for array, out in zip(self._arrays[block], (dk, dv), strict=True):
            for run in batch.cached:
                first = run.row + run.start
                out[run.query : run.query + run.length] = array[first : first + run.length]
            for first, stop in batch.loose:
                out[first:stop] = array[self._rows + first : self._rows + stop]
