"""Token embedding."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import KernelTable, QuantMatrix


class Embedding:
    """out = scale · W[token]. Never trained, so it has no backward."""

    def __init__(self, weight: QuantMatrix, scale: float, kernels: KernelTable) -> None:
        self.weight = weight
        self.scale = scale
        self._lookup = kernels.get("embedding", weight.format)

    def forward(self, tokens: Any, out: Any) -> None:
        """tokens int32 (T,) to out (T, E)."""
        self._lookup(tokens, self.weight, self.scale, out)
