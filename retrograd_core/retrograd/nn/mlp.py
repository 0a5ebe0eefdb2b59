"""Gated feed-forward layer."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import KernelTable

from .kept import KeptArrays
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
        self._kept = KeptArrays(kernels, scratch)
        self._gated = kernels.get("gated_activation")
        self._gated_backward = kernels.get("gated_activation_backward")

    def forward(self, x: Any, out: Any, keep: Scope) -> None:
        """x (T, E) to out (T, E); keeps gate(x) and up(x)."""
        shape = x.shape[0], self.gate.weight.rows
        gate, up = (self._kept.fresh(name, keep, *shape) for name in ("gate", "up"))
        product = self._scratch.rows("mlp.product", *shape)
        self._inputs.forward(x, [gate, up], keep)
        self._gated(self._activation, gate, up, product)
        self._kept.save("gate", gate, keep)
        self._kept.save("up", up, keep)
        self._output.forward(product, [out], keep)

    def backward(self, dout: Any, x: Any, dx: Any, keep: Scope) -> None:
        """Overwrites dx, and what was kept: gate(x) and up(x) make room for their own gradients."""
        shape = x.shape[0], self.gate.weight.rows
        gate, up = (self._kept.load(name, keep, *shape) for name in ("gate", "up"))
        product, dproduct = (self._scratch.rows(f"mlp.{name}", *shape) for name in ("product", "dproduct"))
        self._gated(self._activation, gate, up, product)
        self._output.backward([dout], product, dproduct, keep)
        self._gated_backward(self._activation, dproduct, gate, up, gate, up)
        self._inputs.backward([gate, up], x, dx, keep)
