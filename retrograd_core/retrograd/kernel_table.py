"""The frozen table of kernels that serves a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from retrograd_hookspecs import (
    ANY_FORMAT,
    OPS,
    OPS_BY_FORMAT,
    STAND_INS,
    DeviceInfo,
    KernelError,
    KernelImpl,
)

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

    def get(self, op: str, format: str = "") -> Callable[..., Any]:
        """The function that serves `op` for weights of `format`."""
        return self.serving(op, format).fn

    def serving(self, op: str, format: str = "") -> KernelImpl:
        """The implementation that serves `op`. Raises `KernelError` if there is none."""
        key = (op, format if op in OPS_BY_FORMAT else "")
        found = self._serving.get(key)
        if found is None:
            candidates = self.candidates(*key)
            if not candidates and op in STAND_INS:
                return self.serving(STAND_INS[op], format)
            if not candidates:
                raise KernelError(
                    f"no kernel of backend {self._device.backend!r} serves {op}"
                    f"{f' for {format} weights' if format else ''}; `retrograd plugins list --kind kernels`"
                    " shows what is installed"
                )
            chosen = self._select(op, key[1], candidates) if self._select else None
            found = self._serving[key] = chosen or candidates[0]
        return found

    def candidates(self, op: str, format: str = "") -> list[KernelImpl]:
        """All implementations, the one that serves by default first."""
        exact = self._candidates.get((op, format), [])
        return [*exact, *self._candidates.get((op, ANY_FORMAT), [])] if op in OPS_BY_FORMAT else exact
