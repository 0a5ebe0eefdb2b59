"""Random weights in any ggml format, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from retrograd.gguf.formats import block_format, quantisable_formats

# Byte offsets in a block of the F16 scale, and of the F16 minimum with the mean of the quants it has to
# cancel: (scale offset, minimum offset, mean quant times mean sub-scale over mean sub-minimum).
_SCALES: Mapping[str, tuple[int, int, float]] = MappingProxyType(
    {
        "Q2_K": (80, 82, 1.5),
        "Q3_K": (108, -1, 0.0),
        "Q4_K": (0, 2, 7.5),
        "Q5_K": (0, 2, 15.5),
        "Q6_K": (208, -1, 0.0),
        "IQ1_S": (0, -1, 0.0),
        "IQ2_XXS": (0, -1, 0.0),
        "IQ2_XS": (0, -1, 0.0),
        "IQ2_S": (0, -1, 0.0),
        "IQ3_XXS": (0, -1, 0.0),
        "IQ3_S": (0, -1, 0.0),
        "IQ4_NL": (0, -1, 0.0),
        "IQ4_XS": (0, -1, 0.0),
        "Q1_0": (0, -1, 0.0),
    }
)


def random_weights(
    rng: np.random.Generator, rows: int, columns: int, name: str, deviation: float
) -> npt.NDArray[np.uint8]:
    """Packed rows (rows, row bytes) of zero-mean random weights in the format `name`.

    Formats that can be quantised hold rounded normal values. The others (K-quants, IQ formats) get random
    valid blocks whose scales are set so that the dequantised values have the standard deviation
    `deviation`. Raises `ModelError` for a format that is unknown or whose blocks `columns` do not fit.
    """
    layout = block_format(name)
    if layout.name in quantisable_formats():
        return layout.quantise(deviation * rng.standard_normal((rows, columns)))
    row_bytes = layout.row_bytes(columns)
    packed = rng.integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    blocks = packed.reshape(-1, layout.block_bytes)
    if layout.name == "IQ1_M":
        # The F16 scale is spread over the top nibbles of four 16-bit words at the end of the block.
        _set_iq1_m_scale(blocks, 1.0)
        _set_iq1_m_scale(blocks, deviation / float(layout.dequantise(packed).std()))
        return packed
    if layout.name == "NVFP4":
        # Four scale bytes in unsigned E4M3 a block: the nearest of the 126 possible ones.
        def spread(scale: int) -> float:
            blocks[:, :4] = scale
            return float(layout.dequantise(packed).std())

        blocks[:, :4] = min(range(1, 127), key=lambda scale: abs(spread(scale) - deviation))
        return packed
    scale_at, minimum_at, ratio = _SCALES[layout.name]
    _set_scales(blocks, scale_at, minimum_at, 1.0, ratio)
    factor = deviation / float(layout.dequantise(packed).std())
    _set_scales(blocks, scale_at, minimum_at, factor, ratio)
    return packed


def _set_scales(
    blocks: npt.NDArray[np.uint8], scale_at: int, minimum_at: int, scale: float, ratio: float
) -> None:
    blocks[:, scale_at : scale_at + 2] = _half(scale)
    if minimum_at >= 0:
        blocks[:, minimum_at : minimum_at + 2] = _half(scale * ratio)


def _set_iq1_m_scale(blocks: npt.NDArray[np.uint8], scale: float) -> None:
    bits = int(np.float16(scale).view(np.uint16))
    words = blocks[:, 48:56].view(np.uint16)
    for index in range(4):
        words[:, index] = (words[:, index] & 0x0FFF) | (((bits >> (4 * index)) & 0xF) << 12)
    blocks[:, 48:56] = words.view(np.uint8)


def _half(value: float) -> npt.NDArray[np.uint8]:
    return np.array([value], dtype="<f2").view(np.uint8)
