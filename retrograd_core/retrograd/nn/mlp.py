"""Gated feed-forward layer."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import KernelTable

from .projection import Projection, ProjectionGroup
from .workspace import Scope


class GatedMLP:
    """out = down(act(gate(x)) · up(x)).

    Source: Shazeer 2020, equation 6 (SwiGLU, GEGLU).
    """

    def __init__(
        self,
        *,
        gate: Projection,
        up: Projection,
        down: Projection,
        activation: str,
        kernels: KernelTable,
        scratch: Scope,
    ) -> None:
        self.gate = gate
        self.up = up
        self.down = down
        self._inputs = ProjectionGroup((gate, up), kernels)
        self._output = ProjectionGroup((down,), kernels)
        self._activation = activation
        self._scratch = scratch
        self._gated = kernels.get("gated_activation")
        self._gated_backward = kernels.get("gated_activation_backward")

    def forward(self, x: Any, out: Any, keep: Scope) -> None:
        """x (T, E) to out (T, E); keeps gate(x) and up(x)."""
        gate, up, product = self._arrays(x.shape[0], keep)
        self._inputs.forward(x, [gate, up], keep)
        self._gated(self._activation, gate, up, product)
        self._output.forward(product, [out], keep)

    def backward(self, dout: Any, x: Any, dx: Any, keep: Scope) -> None:
        """Overwrites dx, and what was kept: gate(x) and up(x) make room for their own gradients."""
        gate, up, product = self._arrays(x.shape[0], keep)
        dproduct = self._scratch.rows("mlp.dproduct", x.shape[0], self.gate.weight.rows)
        self._gated(self._activation, gate, up, product)
        self._output.backward([dout], product, dproduct, keep)
        self._gated_backward(self._activation, dproduct, gate, up, gate, up)
        self._inputs.backward([gate, up], x, dx, keep)

    def _arrays(self, tokens: int, keep: Scope) -> tuple[Any, Any, Any]:
        width = self.gate.weight.rows
        return (
            keep.rows("gate", tokens, width),
            keep.rows("up", tokens, width),
            self._scratch.rows("mlp.product", tokens, width),
        )
