"""The `reference` backend: host memory, NumPy, float64. Slow and right; the oracle of every other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import BuildContext, Component, DeviceInfo, NoConfig, QuantMatrix, hookimpl


class ReferenceBackend:
    """Holds arrays as NumPy arrays and computes in float64."""

    name = "reference"

    def __init__(self, memory_bytes: int) -> None:
        self.compute_dtype: np.dtype[Any] = np.dtype(np.float64)
        self.device = DeviceInfo(
            backend=self.name, description="NumPy float64 (reference)", memory_bytes=memory_bytes
        )

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Uninitialised C-contiguous array."""
        return np.empty(shape, dtype)

    def from_host(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The array itself if it is C-contiguous, else a copy."""
        return np.ascontiguousarray(array)

    def to_host(self, array: Any) -> npt.NDArray[Any]:
        """The array itself."""
        return np.asarray(array)

    def upload(self, matrix: QuantMatrix) -> QuantMatrix:
        """The matrix itself: kernels expand it on first use."""
        return matrix


def build(config: NoConfig, context: BuildContext) -> ReferenceBackend:
    """Probe the host's free memory."""
    import psutil

    return ReferenceBackend(memory_bytes=int(psutil.virtual_memory().available))


@hookimpl
def retrograd_backends() -> Sequence[Component[Any, Any]]:
    """Offer the backend `reference`."""
    return [
        Component(
            name="reference",
            config=NoConfig,
            build=build,
            summary="NumPy float64 on the host: slow, exact, for tests and comparisons.",
        )
    ]
