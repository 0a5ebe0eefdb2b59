"""Activations that wait for the backward pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from retrograd_hookspecs import ABSENT, KernelTable

from .workspace import Scope


class KeptArrays:
    """Keeps arrays as they are, or in 16 bits where kernels offer the ops `narrow` and `widen`.

    Those in 16 bits are computed in scratch that all blocks share: it stays in the caches, and what waits
    takes half the memory. A pass without a backward pass keeps nothing.
    """

    def __init__(self, kernels: KernelTable, scratch: Scope) -> None:
        self._scratch = scratch
        ops = ("narrow", "widen")
        absent = any(kernels.serving(op).variant == ABSENT for op in ops)
        self._ops = None if absent else [kernels.get(op) for op in ops]

    def fresh(self, name: str, keep: Scope, count: int, *tail: int) -> Any:
        """The array (count, *tail) to compute `name` in, before `save`."""
        return (keep if self._ops is None else self._scratch).rows(name, count, *tail)

    def save(self, name: str, array: Any, keep: Scope) -> None:
        """Keep what `fresh` gave, once nothing changes in it any more."""
        if self._ops is not None and keep.keeps:
            self._ops[0](array, self.narrowed(name, keep, *array.shape))

    def load(self, name: str, keep: Scope, count: int, *tail: int) -> Any:
        """What was saved, until the next `fresh` or `load` of the name; it may be overwritten."""
        if self._ops is None:
            return keep.rows(name, count, *tail)
        array = self._scratch.rows(name, count, *tail)
        self._ops[1](self.narrowed(name, keep, count, *tail), array)
        return array

    def narrowed(self, name: str, keep: Scope, count: int, *tail: int) -> Any:
        """The array in which `save` keeps in 16 bits, for kernels that write or read it themselves."""
        return keep.rows(name, count, *tail, dtype=np.uint16)
