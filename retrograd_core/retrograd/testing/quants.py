"""What block formats of every plugin must do, and random weights in any of ggml's, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from retrograd.gguf.formats import block_format, quantisable_formats
from retrograd_hookspecs import ModelError, Quant

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


def check_quant(quant: Quant, formats: Iterable[str] | None = None) -> None:
    """Assert the contract of `retrograd_hookspecs.Quant`, on `formats` or on all that can be read."""
    layouts = quant.formats
    assert layouts, "there are no formats"
    for name, layout in layouts.items():
        assert name == name.upper(), f"{name} must be in upper case"
        assert min(layout.values, layout.bytes) > 0, f"{name}: a block holds something"
        assert layout.type_id >= 0, f"{name}: {layout.type_id} is no number of a tensor type"
    ids = [layout.type_id for layout in layouts.values()]
    assert len(set(ids)) == len(ids), "two formats have the same number"
    assert quant.readable <= set(layouts), "a readable format has no layout"
    assert quant.writable <= quant.readable, "what can be written can be read"
    assert quant.readable, "no format can be read"
    for name in quant.readable if formats is None else formats:
        _check_reading(quant, name)
        if name in quant.writable:
            _check_writing(quant, name)
    zeros = np.zeros((1, 64), np.uint8)
    for name in ("NO_SUCH_FORMAT", *sorted(set(layouts) - quant.readable)):
        _refuses(f"dequantise to refuse {name}", partial(quant.dequantise, zeros, name))
    for name in ("NO_SUCH_FORMAT", *sorted(set(layouts) - quant.writable)):
        values = np.zeros((1, layouts[name].values if name in layouts else 1), np.float32)
        _refuses(f"quantise to refuse {name}", partial(quant.quantise, values, name))


def _check_reading(quant: Quant, name: str) -> None:
    layout = quant.formats[name]
    rows = np.zeros((2, 3, 2 * layout.bytes), np.uint8)
    rows[0, 0] = np.arange(2 * layout.bytes) % 7
    rows.flags.writeable = False
    values = quant.dequantise(rows, name)
    assert values.dtype == np.float32, f"{name}: values are float32"
    assert values.shape == (2, 3, 2 * layout.values), f"{name}: {values.shape} for {rows.shape} bytes"
    assert not np.shares_memory(values, rows), f"{name}: values are a new array"
    alone = quant.dequantise(np.ascontiguousarray(rows[0, :1]), name)
    assert alone.tobytes() == np.ascontiguousarray(values[0, :1]).tobytes(), (
        f"{name}: a row does not depend on what is beside it"
    )


def _check_writing(quant: Quant, name: str) -> None:
    layout = quant.formats[name]
    values = np.random.default_rng(0).standard_normal((2, 3, 4 * layout.values)).astype(np.float32)
    given = values.copy()
    packed = quant.quantise(values, name)
    np.testing.assert_array_equal(values, given, f"{name}: quantise changes what it is given")
    assert packed.dtype == np.uint8, f"{name}: packed rows are uint8"
    assert packed.shape == (2, 3, 4 * layout.bytes), f"{name}: {packed.shape} for {values.shape} values"
    read = quant.dequantise(packed, name)
    error = np.sqrt(np.mean((read - values) ** 2) / np.mean(values**2))
    assert error < 1, f"{name}: what is read has nothing to do with what was written (error {error:.2g})"
    again = quant.dequantise(quant.quantise(read, name), name)
    np.testing.assert_allclose(
        again, read, rtol=0.02, atol=0.02 * float(np.abs(read).max()), err_msg=f"{name}: written twice"
    )
    if layout.values > 1:
        short = np.zeros((1, layout.values + 1), np.float32)
        _refuses(
            f"quantise to refuse rows that are no whole {name} blocks", lambda: quant.quantise(short, name)
        )


def _refuses(what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except ModelError:
        return
    raise AssertionError(f"expected {what} with a ModelError")


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
