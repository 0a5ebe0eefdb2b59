"""The `cpu` backend: host memory, float32, kernels compiled by Numba for the processor at hand.

[model]
device = "cpu"
[plugin.cpu]
kernels = "avx2"      # default "auto": the fastest that the processor has
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import (
    BuildContext,
    Component,
    ConfigError,
    DeviceInfo,
    Problem,
    QuantMatrix,
    hookimpl,
    key,
)

CACHE_LINE = 64
"""Bytes."""


@attrs.frozen(kw_only=True)
class CpuConfig:
    """Keys of `[plugin.cpu]`."""

    kernels: Literal["auto", "amx", "amx-bf16", "avx512", "avx2", "portable"] = key(
        "auto",
        doc="Instruction set of the matrix products: amx (bfloat16 tiles, forward with the precision of"
        " float32), avx512, avx2 and portable (float32). auto takes the first of these that the processor"
        " has. amx-bf16 rounds to bfloat16 in forward passes too: faster, less exact.",
    )


class CpuBackend:
    """Holds arrays as NumPy arrays and computes in float32."""

    name = "cpu"

    def __init__(self, device: DeviceInfo, variants: Sequence[str]) -> None:
        self.compute_dtype: np.dtype[Any] = np.dtype(np.float32)
        self.device = device
        self.variants = tuple(variants)
        """Instruction sets that kernels may be built for, the preferred first; one if it is forced."""
        self._shared: dict[str, Any] = {}

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """An object that the kernels of this run share (scratch, compiled parts), made on first use."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Uninitialised C-contiguous array that begins on a cache line, so that no vector crosses two."""
        kind = np.dtype(dtype)
        count = math.prod(shape) * kind.itemsize
        raw = np.empty(count + CACHE_LINE, np.uint8)
        start = -raw.ctypes.data % CACHE_LINE
        return raw[start : start + count].view(kind).reshape(shape)

    def from_host(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The array itself if it is C-contiguous, else a copy."""
        return np.ascontiguousarray(array)

    def to_host(self, array: Any) -> npt.NDArray[Any]:
        """The array itself."""
        return np.asarray(array)

    def upload(self, matrix: QuantMatrix) -> QuantMatrix:
        """The matrix itself: kernels read weights as they lie in the file."""
        return matrix


def build(config: CpuConfig, context: BuildContext) -> CpuBackend:
    """Probe the processor and set up the thread pool.

    Raises:
        ConfigError: more threads than processors, or kernels that the processor cannot run.
    """
    from . import _cpu_host as host

    host.prepare_environment()
    threads = _threads(context.config.training.threads)

    import numba

    from retrograd_plugins.kernels.cpu._simd_features import usable_features, usable_variants

    variants = _variants(config.kernels, usable_variants())
    layer = host.choose_threading_layer()
    numba.set_num_threads(threads)
    host.limit_blas()
    device = DeviceInfo(
        backend=CpuBackend.name,
        description=f"{host.processor_name()}, {threads} threads ({layer}), {variants[0]} kernels",
        features=usable_features(),
        threads=threads,
        memory_bytes=host.free_memory(),
    )
    return CpuBackend(device, variants)


def _threads(wanted: int | None) -> int:
    from . import _cpu_host as host

    if wanted is None:
        return host.default_threads()
    available = host.available_processors()
    if wanted > available:
        problem = Problem(
            where="[training]",
            key="training.threads",
            message=f"{wanted} threads, but this process may use {available} processors",
            hint=f"set it to at most {available}, or leave it out",
        )
        raise ConfigError([problem])
    return wanted


def _variants(wanted: str, usable: Sequence[str]) -> Sequence[str]:
    if wanted == "auto":
        return usable
    if wanted.removesuffix("-bf16") not in usable:
        problem = Problem(
            where="[plugin.cpu]",
            key="plugin.cpu.kernels",
            message=f"this processor cannot run the {wanted!r} kernels",
            hint=f'one of {", ".join(usable)}, or "auto"',
        )
        raise ConfigError([problem])
    return (wanted,)


@hookimpl
def retrograd_backends() -> Sequence[Component[Any, Any]]:
    """Offer the backend `cpu`."""
    return [
        Component(
            name="cpu",
            config=CpuConfig,
            build=build,
            summary="This machine's processor: float32 and bfloat16 kernels compiled by Numba.",
            fallback=True,
        )
    ]
