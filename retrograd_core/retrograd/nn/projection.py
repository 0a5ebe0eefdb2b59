"""Linear maps with a stored (quantised) weight, and the low-rank adapter on top."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs

from retrograd_hookspecs import KernelTable, LowRank, Parameter, QuantMatrix

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
    """out = x·Wᵀ (+ bias) (+ LoRA). W is frozen; with `lora` set, its factors are trained.

    Computed by the `ProjectionGroup` it is in.
    """

    def __init__(self, name: str, weight: QuantMatrix, bias: Any | None) -> None:
        self.name = name
        """Name within the block, such as `attn_q`."""
        self.weight = weight
        self.bias = bias
        self.lora: LoraFactors | None = None
        self.few_rows = False
        """Forward through `matmul_few`; see `CausalLM.few_rows`."""

    def adapter(self, tokens: int, keep: Scope, *, gradients: bool) -> LowRank | None:
        """Arrays of the adapter for a pass, if one is attached; x·Aᵀ (T, r) is kept."""
        if self.lora is None:
            return None
        a, b = self.lora.a, self.lora.b
        return LowRank(
            a=a.weight,
            b=b.weight,
            scale=self.lora.scale,
            hidden=keep.rows(f"{self.name}.lora", tokens, self.lora.rank),
            da=a.grad if gradients else None,
            db=b.grad if gradients else None,
        )


class ProjectionGroup:
    """Projections of one input, which kernels may compute in one pass."""

    def __init__(
        self, members: Sequence[Projection], kernels: KernelTable, *, precise_gradient: bool = False
    ) -> None:
        self._members = tuple(members)
        self._precise = precise_gradient
        self._add_bias = kernels.get("add_bias")
        self._few = [kernels.get("matmul_few", member.weight.format) for member in members]
        self._lora_forward = kernels.get("lora_forward")
        self._project = self._served(kernels, "project")
        self._backward = self._served(kernels, "project_backward")

    def forward(self, x: Any, outs: Sequence[Any], keep: Scope) -> None:
        """x (T, K) to the members' outputs (T, N); keeps x·Aᵀ (T, r) of each."""
        weights, adapters = self._operands(x.shape[0], keep, gradients=False)
        if self._members[0].few_rows:
            for multiply, weight, low, out in zip(self._few, weights, adapters, outs, strict=True):
                multiply(x, weight, out)
                if low is not None:
                    self._lora_forward(x, low.a, low.b, low.scale, low.hidden, out)
        else:
            for function, chosen in self._project:
                function(x, chosen(weights), chosen(adapters), chosen(outs))
        for member, out in zip(self._members, outs, strict=True):
            if member.bias is not None:
                self._add_bias(out, member.bias)

    def backward(self, douts: Sequence[Any], x: Any, dx: Any, keep: Scope) -> None:
        """Gradient by x into dx, and by the adapters' factors into their `grad`."""
        weights, adapters = self._operands(x.shape[0], keep, gradients=True)
        for number, (function, chosen) in enumerate(self._backward):
            function(chosen(douts), x, chosen(weights), chosen(adapters), dx, number > 0, self._precise)

    def _operands(self, tokens: int, keep: Scope, *, gradients: bool) -> tuple[list[Any], list[Any]]:
        adapters = [member.adapter(tokens, keep, gradients=gradients) for member in self._members]
        return [member.weight for member in self._members], adapters

    def _served(self, kernels: KernelTable, op: str) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
        """What serves the op for the members' formats, each with the choice of the members it serves."""
        places: dict[Callable[..., Any], list[int]] = {}
        formats: dict[Callable[..., Any], str] = {}
        for place, member in enumerate(self._members):
            function = kernels.serving(op, member.weight.format).fn
            places.setdefault(function, []).append(place)
            formats.setdefault(function, member.weight.format)
        return [(kernels.get(op, formats[one]), partial(_chosen, places[one])) for one in places]


def _chosen(places: Sequence[int], values: Sequence[Any]) -> Sequence[Any]:
    return [values[place] for place in places]
