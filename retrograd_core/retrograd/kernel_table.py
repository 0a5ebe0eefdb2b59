"""The frozen table of kernels that serves a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from retrograd_hookspecs import (
    ABSENT,
    ANY_FORMAT,
    FUSED,
    ONE_BY_ONE,
    OPS,
    OPS_BY_FORMAT,
    OPTIONAL,
    STAND_INS,
    DeviceInfo,
    KernelError,
    KernelImpl,
    KernelTable,
    LowRank,
    QuantMatrix,
)


def project(
    table: KernelTable,
    x: Any,
    weights: Sequence[QuantMatrix],
    adapters: Sequence[LowRank | None],
    outs: Sequence[Any],
) -> None:
    """The op `project` by its parts."""
    for weight, adapter, out in zip(weights, adapters, outs, strict=True):
        table.get("matmul", weight.format)(x, weight, out)
        if adapter is not None:
            one = adapter
            table.get("lora_forward")(x, one.a, one.b, one.scale, one.hidden, out)


def project_backward(
    table: KernelTable,
    douts: Sequence[Any],
    x: Any,
    weights: Sequence[QuantMatrix],
    adapters: Sequence[LowRank | None],
    dx: Any,
    accumulate: bool,
    precise: bool = False,
) -> None:
    """The op `project_backward` by its parts, which round as they do, whether `precise` or not."""
    for dout, weight, adapter in zip(douts, weights, adapters, strict=True):
        table.get("matmul_input_grad", weight.format)(dout, weight, dx, accumulate)
        accumulate = True
        if adapter is not None:
            one = adapter
            gradients = table.get("lora_backward")
            gradients(dout, x, one.hidden, one.a, one.b, one.scale, one.da, one.db, dx)


def not_served(*arguments: Any) -> bool:
    """An op that no kernel serves and modules do without, such as `decode_blocks`: they call the parts."""
    return False


Selector = Callable[[str, str, Sequence[KernelImpl]], KernelImpl | None]


class FrozenKernelTable:
    """Ops by name and weight format. The highest priority serves; an exact format beats `ANY_FORMAT`.

    `select` may choose otherwise (the hook `retrograd_select_kernel`); it is asked once an op and format.
    """

    def __init__(
        self, impls: Iterable[KernelImpl], device: DeviceInfo, select: Selector | None = None
    ) -> None:
        self._device = device
        self._select = select
        self._candidates: dict[tuple[str, str], list[KernelImpl]] = {}
        for impl in impls:
            if impl.op not in OPS:
                raise KernelError(f"a kernel registers the op {impl.op!r}, which does not exist: {OPS}")
            self._candidates.setdefault((impl.op, impl.format), []).append(impl)
        for candidates in self._candidates.values():
            candidates.sort(key=lambda impl: -impl.priority)
        self._serving: dict[tuple[str, str], KernelImpl] = {}
        self._one_by_one: dict[str, Callable[..., Any]] = {
            "project": partial(project, self),
            "project_backward": partial(project_backward, self),
            "decode_blocks": not_served,
        }

    def get(self, op: str, format: str = "") -> Callable[..., Any]:
        """The function that serves `op` for weights of `format`."""
        return self.serving(op, format).fn

    def serving(self, op: str, format: str = "") -> KernelImpl:
        """The implementation that serves `op`. Raises `KernelError` if there is none."""
        key = (op, format if op in OPS_BY_FORMAT else "")
        found = self._serving.get(key)
        if found is None and op in FUSED:
            found = self._serving[key] = self._fused(op, format)
        elif found is None:
            candidates = self.candidates(*key)
            if not candidates and op in STAND_INS:
                return self.serving(STAND_INS[op], format)
            if not candidates and op in OPTIONAL:
                return KernelImpl(op=op, fn=not_served, variant=ABSENT)
            if not candidates:
                raise KernelError(
                    f"no kernel of backend {self._device.backend!r} serves {op}"
                    f"{f' for {format} weights' if format else ''}; `retrograd plugins list --kind kernels`"
                    " shows what is installed"
                )
            chosen = self._select(op, key[1], candidates) if self._select else None
            found = self._serving[key] = chosen or candidates[0]
        return found

    def _fused(self, op: str, format: str) -> KernelImpl:
        """The kernel that serves a fused op, or its parts one by one (see `FUSED`)."""
        parts = [self.serving(part, format) for part in FUSED[op]]
        candidates = self.candidates(op, format)
        if candidates:
            chosen = self._select(op, format, candidates) if self._select else None
            fused = chosen or candidates[0]
            if parts[0].variant == fused.variant and all(part.priority <= fused.priority for part in parts):
                return fused
        return KernelImpl(
            op=op,
            format=format,
            fn=self._one_by_one[op],
            variant=ONE_BY_ONE,
            fast=all(part.fast for part in parts),
        )

    def candidates(self, op: str, format: str = "") -> list[KernelImpl]:
        """All implementations, the one that serves by default first."""
        exact = self._candidates.get((op, format), [])
        return [*exact, *self._candidates.get((op, ANY_FORMAT), [])] if op in OPS_BY_FORMAT else exact
