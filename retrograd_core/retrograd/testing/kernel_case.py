"""One call of a kernel: what the cases of `kernel_cases` and `attention_cases` are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Random = np.random.Generator


def normal(rng: Random, *shape: int) -> Array:
    """Standard normal float32 values."""
    return rng.standard_normal(shape, dtype=np.float32)


@attrs.frozen
class SameAs:
    """Stands for the array of another argument: the op works in place."""

    name: str


@attrs.frozen(kw_only=True)
class KernelCase:
    """One call of an op: its arguments in the order of the contract."""

    op: str
    label: str
    arguments: Mapping[str, Any]
    outputs: tuple[str, ...]
    """Arguments that the op writes; "result" is what it returns."""
    by_row: tuple[str, ...] = ()
    """Arguments with a row a token, to which the bitwise rule applies; empty if there are none."""
    float32: tuple[str, ...] = ()
    """Arguments that are float32 on every backend."""
    tolerance: float = 1e-6
    """Largest error that float32 arithmetic makes, relative to the largest value of an output."""

    def rows(self, first: int, last: int) -> KernelCase:
        """The same call on rows [first, last) only."""
        cut = {
            name: value[first:last] if name in self.by_row and isinstance(value, np.ndarray) else value
            for name, value in self.arguments.items()
        }
        return attrs.evolve(self, label=f"{self.label}, rows {first} to {last}", arguments=cut)
