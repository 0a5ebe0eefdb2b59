"""The block formats of ggml: every tensor type that a GGUF of a language model uses.

Layouts and arithmetic are `gguf`'s (see `retrograd.gguf.formats`); this component makes them available under
the same contract as a third party's format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from retrograd_hookspecs import BlockLayout, Component, NoConfig, Quant, hookimpl

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class GgmlFormats:
    """All formats that the installed `gguf` package knows. Implements `Quant`."""

    @property
    def formats(self) -> Mapping[str, BlockLayout]:
        """ggml type name to layout."""
        from retrograd.gguf.formats import FORMATS

        return {
            name: BlockLayout(type_id=found.type_id, values=found.block_size, bytes=found.block_bytes)
            for name, found in FORMATS.items()
        }

    @property
    def readable(self) -> frozenset[str]:
        """The formats that `gguf` can dequantise."""
        from retrograd.gguf.formats import dequantisable_formats

        return frozenset(dequantisable_formats())

    @property
    def writable(self) -> frozenset[str]:
        """The formats that `quantise` can write."""
        from retrograd.gguf.formats import quantisable_formats

        return frozenset(quantisable_formats())

    def dequantise(self, data: npt.NDArray[np.uint8], format: str) -> npt.NDArray[np.float32]:
        """Packed rows uint8 (..., row bytes) to float32 (..., K)."""
        from retrograd.gguf.formats import dequantise

        return dequantise(data, format)

    def quantise(self, values: npt.NDArray[np.floating[Any]], format: str) -> npt.NDArray[np.uint8]:
        """Values (..., K) to packed rows uint8 (..., row bytes)."""
        from retrograd.gguf.formats import quantise

        return quantise(values, format)


@hookimpl
def retrograd_quants() -> list[Component[NoConfig, Quant]]:
    return [
        Component(
            name="ggml",
            config=NoConfig,
            build=lambda _config, _context: GgmlFormats(),
            summary="Tensor types of GGUF files: F32, F16, BF16, Q4_0 to Q8_0, K-quants, IQ formats, MXFP4.",
            source="ggml: ggml-common.h, ggml-quants.c, through the gguf package",
        )
    ]
