"""Linear maps with a stored (quantised) weight, and the low-rank adapter on top."""

from __future__ import annotations

from typing import Any

import attrs

from retrograd_hookspecs import KernelTable, Parameter, QuantMatrix

from .workspace import Scope


@attrs.frozen(eq=False, kw_only=True)
class LoraFactors:
    """The adapter of one projection: scale · (x·Aᵀ)·Bᵀ, A (r, K), B (N, r).

    Source: Hu et al. 2021, equation 3 (scale = alpha / r).
    """

    a: Parameter
    b: Parameter
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.value.shape[0])


class Projection:
    """out = x·Wᵀ (+ bias) (+ LoRA). W is frozen; with `lora` set, its factors are trained."""

    def __init__(self, name: str, weight: QuantMatrix, bias: Any | None, kernels: KernelTable) -> None:
        self.name = name
        """Name within the block, such as `attn_q`."""
        self.weight = weight
        self.bias = bias
        self.lora: LoraFactors | None = None
        self._matmul = kernels.get("matmul", weight.format)
        self._input_grad = kernels.get("matmul_input_grad", weight.format)
        self._add_bias = kernels.get("add_bias")
        self._lora_forward = kernels.get("lora_forward")
        self._lora_backward = kernels.get("lora_backward")

    def forward(self, x: Any, out: Any, keep: Scope) -> None:
        """x (T, K) to out (T, N); keeps x·Aᵀ (T, r)."""
        self._matmul(x, self.weight, out)
        if self.bias is not None:
            self._add_bias(out, self.bias)
        if self.lora is not None:
            hidden = self._hidden(x.shape[0], self.lora, keep)
            self._lora_forward(x, self.lora.a.weight, self.lora.b.weight, self.lora.scale, hidden, out)

    def backward(self, dout: Any, x: Any, dx: Any, keep: Scope, *, accumulate: bool = False) -> None:
        """Gradient by x into dx (or added), and by the adapter's factors into their `grad`."""
        self._input_grad(dout, self.weight, dx, accumulate)
        lora = self.lora
        if lora is not None:
            hidden = self._hidden(x.shape[0], lora, keep)
            a, b = lora.a, lora.b
            self._lora_backward(dout, x, hidden, a.weight, b.weight, lora.scale, a.grad, b.grad, dx)

    def _hidden(self, tokens: int, lora: LoraFactors, keep: Scope) -> Any:
        return keep.rows(f"{self.name}.lora", tokens, lora.rank)
