"""Tables of rotary position embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import Backend, BlockStyle


def rope_angles(style: BlockStyle, dimensions: int, positions: int) -> npt.NDArray[np.float64]:
    """Angles (positions, dimensions / 2) in radians: position / rope_scale · base^(−2i/R) / factor_i.

    Source: Su et al. 2021, section 3.2.2; linear scaling: Chen et al. 2023, equation 3; per-frequency
    factors: `rope_freqs.weight` of Llama 3.1 files.
    """
    exponents = np.arange(0, dimensions, 2, dtype=np.float64) / dimensions
    frequencies = style.rope_base**-exponents / style.rope_scale
    if style.rope_factors:
        frequencies /= np.asarray(style.rope_factors, dtype=np.float64)
    return np.outer(np.arange(positions, dtype=np.float64), frequencies)


class RopeTable:
    """Cosines and sines of one style, for as many positions as were asked for so far."""

    def __init__(self, style: BlockStyle, dimensions: int, backend: Backend) -> None:
        self._style = style
        self._dimensions = dimensions
        self._backend = backend
        self._positions = 0
        self._cos: Any = None
        self._sin: Any = None

    def tables(self, positions: int) -> tuple[Any, Any]:
        """cos and sin, each (P, R/2) with P ≥ positions, of the compute dtype."""
        if positions > self._positions:
            # Doubling: a sequence that grows token by token rebuilds the table rarely.
            self._positions = max(positions, 2 * self._positions, 64)
            angles = rope_angles(self._style, self._dimensions, self._positions)
            dtype = self._backend.compute_dtype
            self._cos = self._backend.from_host(np.cos(angles).astype(dtype))
            self._sin = self._backend.from_host(np.sin(angles).astype(dtype))
        return self._cos, self._sin

    def nbytes(self) -> int:
        """Memory of both tables."""
        width = self._dimensions // 2
        return 2 * self._positions * width * int(self._backend.compute_dtype.itemsize)


class RopeTables:
    """One table a distinct style: blocks with the same base, scale and factors share it."""

    def __init__(self, dimensions: int, backend: Backend) -> None:
        self._dimensions = dimensions
        self._backend = backend
        self._tables: dict[tuple[float, float, tuple[float, ...]], RopeTable] = {}

    def of(self, style: BlockStyle) -> RopeTable:
        """The table for a block's style."""
        key = (style.rope_base, style.rope_scale, style.rope_factors)
        if key not in self._tables:
            self._tables[key] = RopeTable(style, self._dimensions, self._backend)
        return self._tables[key]

    def nbytes(self) -> int:
        """Memory of all tables."""
        return sum(table.nbytes() for table in self._tables.values())
