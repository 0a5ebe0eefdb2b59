"""Decoders: the same bits as `gguf`, compiled and as Python, with and without special instructions."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import cfunc

from retrograd.gguf.formats import FORMATS as LAYOUTS
from retrograd.gguf.formats import dequantise
from retrograd_plugins.kernels.cpu import _simd
from retrograd_plugins.kernels.cpu._decode import FORMATS, SIGNATURE, Format, decoder, python_form
from retrograd_plugins.kernels.cpu._simd_features import jit_disabled

ROWS, COLUMNS = 5, 512
needs_jit = pytest.mark.skipif(jit_disabled(), reason="the compiled form is switched off")


def random_blocks(block_format: Format) -> npt.NDArray[np.uint8]:
    """Random bytes: every scale that can be stored occurs, subnormal, infinite and NaN ones too."""
    rng = np.random.default_rng(7)
    width = COLUMNS // block_format.values * block_format.bytes
    return rng.integers(0, 256, (ROWS, width), dtype=np.uint8)


def run_compiled(holder: Any, block_format: Format, packed: npt.NDArray[np.uint8]) -> Any:
    target = np.full((len(packed), COLUMNS + 3), 7.0, np.float32)
    holder.ctypes(
        packed.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)),
        packed.shape[1],
        len(packed),
        COLUMNS // block_format.values,
        target.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        COLUMNS + 3,
    )
    return target


def run_python(block_format: Format, packed: npt.NDArray[np.uint8]) -> Any:
    target = np.full((len(packed), COLUMNS + 3), 7.0, np.float32)
    decode = python_form(block_format.decode)
    with np.errstate(all="ignore"):
        decode(
            packed.reshape(-1),
            packed.shape[1],
            len(packed),
            COLUMNS // block_format.values,
            target.reshape(-1),
            COLUMNS + 3,
        )
    return target


def reference(block_format: Format, packed: npt.NDArray[np.uint8]) -> Any:
    with np.errstate(all="ignore"):
        return dequantise(packed, block_format.name)


@pytest.mark.parametrize("block_format", FORMATS.values(), ids=FORMATS)
def test_layout_is_that_of_gguf(block_format: Format) -> None:
    layout = LAYOUTS[block_format.name]
    assert (block_format.values, block_format.bytes) == (layout.block_size, layout.block_bytes)


@needs_jit
@pytest.mark.parametrize("block_format", FORMATS.values(), ids=FORMATS)
def test_compiled_decoder_gives_the_bits_of_gguf(block_format: Format) -> None:
    packed = random_blocks(block_format)
    target = run_compiled(decoder(block_format), block_format, packed)
    np.testing.assert_array_equal(target[:, :COLUMNS], reference(block_format, packed))
    np.testing.assert_array_equal(target[:, COLUMNS:], 7.0)


@pytest.mark.parametrize("block_format", FORMATS.values(), ids=FORMATS)
def test_python_decoder_gives_the_bits_of_gguf(block_format: Format) -> None:
    packed = random_blocks(block_format)
    target = run_python(block_format, packed)
    np.testing.assert_array_equal(target[:, :COLUMNS], reference(block_format, packed))
    np.testing.assert_array_equal(target[:, COLUMNS:], 7.0)


@needs_jit
@pytest.mark.parametrize("name", ["F16", "Q4_1", "IQ4_NL", "MXFP4"])
def test_decoders_need_no_special_instructions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor without float16 conversion and AVX512, other instructions give the same bits."""
    monkeypatch.setattr(_simd, "has_half_conversion", lambda: False)
    monkeypatch.setattr(_simd, "target_features", frozenset)
    block_format = FORMATS[name]
    holder = cfunc(SIGNATURE)(python_form(block_format.decode))
    packed = random_blocks(block_format)
    target = run_compiled(holder, block_format, packed)
    np.testing.assert_array_equal(target[:, :COLUMNS], reference(block_format, packed))


@needs_jit
@pytest.mark.parametrize("hardware", [True, False])
def test_every_float16_is_widened_exactly(hardware: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hardware:
        monkeypatch.setattr(_simd, "has_half_conversion", lambda: False)
    halves = np.arange(65536, dtype=np.uint16)
    packed = halves.view(np.uint8).reshape(-1, 2 * COLUMNS)
    holder = cfunc(SIGNATURE)(python_form(FORMATS["F16"].decode))
    target = run_compiled(holder, FORMATS["F16"], packed)
    np.testing.assert_array_equal(target[:, :COLUMNS].ravel(), halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_formats_take_any_number_of_values(name: str) -> None:
    """Widths that are not whole vectors."""
    block_format = FORMATS[name]
    decode = python_form(block_format.decode) if jit_disabled() else None
    for count in (1, 15, 16, 17, 37):
        values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
        packed = values.view(np.uint8) if name == "F32" else LAYOUTS[name].quantise(values)
        target = np.zeros(count + 1, np.float32)
        if decode is not None:
            decode(packed, 0, 1, count, target, 0)
        else:
            decoder(block_format).ctypes(
                packed.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)),
                0,
                1,
                count,
                target.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
                0,
            )
        np.testing.assert_array_equal(target, np.append(dequantise(packed, name), np.float32(0)))
