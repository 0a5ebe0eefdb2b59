"""Gated feed-forward layer."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import GATED_KEPT, KernelTable

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
        # Who replaces the activation is not passed over.
        variant = kernels.serving("gated_activation").variant
        offered = all(kernels.serving(op).variant == variant for op in GATED_KEPT)
        self._kept_ops = [kernels.get(op) for op in GATED_KEPT] if offered else None
        """The activation with what is kept written and read on the way, where kernels offer it."""

    def forward(self, x: Any, out: Any, keep: Scope) -> None:
        """x (T, E) to out (T, E); keeps gate(x) and up(x)."""
        shape = x.shape[0], self.gate.weight.rows
        gate, up = (self._kept.fresh(name, keep, *shape) for name in ("gate", "up"))
        product = self._scratch.rows("mlp.product", *shape)
        self._inputs.forward(x, [gate, up], keep)
        if self._kept_ops is not None and keep.keeps:
            self._kept_ops[0](self._activation, gate, up, product, *self._halves(keep, shape))
        else:
            self._gated(self._activation, gate, up, product)
            self._kept.save("gate", gate, keep)
            self._kept.save("up", up, keep)
        self._output.forward(product, [out], keep)

    def backward(self, dout: Any, x: Any, dx: Any, keep: Scope) -> None:
        """Overwrites dx, and what was kept: gate(x) and up(x) make room for their own gradients."""
        shape = x.shape[0], self.gate.weight.rows
        product, dproduct = (self._scratch.rows(f"mlp.{name}", *shape) for name in ("product", "dproduct"))
        if self._kept_ops is not None:
            _, activate, gradient = self._kept_ops
            halves = self._halves(keep, shape)
            dgate, dup = (self._kept.fresh(name, keep, *shape) for name in ("gate", "up"))
            activate(self._activation, *halves, product)
            self._output.backward([dout], product, dproduct, keep)
            gradient(self._activation, dproduct, *halves, dgate, dup)
        else:
            dgate, dup = (self._kept.load(name, keep, *shape) for name in ("gate", "up"))
            self._gated(self._activation, dgate, dup, product)
            self._output.backward([dout], product, dproduct, keep)
            self._gated_backward(self._activation, dproduct, dgate, dup, dgate, dup)
        self._inputs.backward([dgate, dup], x, dx, keep)

    def _halves(self, keep: Scope, shape: tuple[int, int]) -> list[Any]:
        return [self._kept.narrowed(name, keep, *shape) for name in ("gate", "up")]
