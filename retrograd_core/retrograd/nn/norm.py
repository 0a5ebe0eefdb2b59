"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import KernelTable


class RMSNorm:
    """out = x / sqrt(mean(x²) + eps) · weight over the last axis.

    Source: Zhang & Sennrich 2019, equation 4.
    """

    def __init__(self, weight: Any, epsilon: float, kernels: KernelTable) -> None:
        self.weight = weight
        self.epsilon = epsilon
        self._forward = kernels.get("rms_norm")
        self._backward = kernels.get("rms_norm_backward")

    def forward(self, x: Any, out: Any, rstd: Any) -> None:
        """x, out (n, K); `rstd` (n,) is what the backward pass needs besides x."""
        self._forward(x, self.weight, self.epsilon, out, rstd)

    def backward(self, dout: Any, x: Any, rstd: Any, dx: Any, *, accumulate: bool = False) -> None:
        """Gradient by x, written to dx or added to it."""
        self._backward(dout, x, self.weight, rstd, dx, accumulate)
