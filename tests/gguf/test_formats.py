"""Formats against the gguf package and against themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retrograd.gguf.formats import (
    FORMATS,
    block_format,
    dequantisable_formats,
    dequantise,
    quantisable_formats,
    quantise,
)
from retrograd.testing.quants import check_quant
from retrograd_hookspecs import BlockLayout, BuildContext, ModelError, NoConfig
from retrograd_plugins.quants.ggml import retrograd_quants

# Largest error as a share of the largest value of a block, from the number of levels of each format.
STEPS = {
    "F32": 0.0,
    "F16": 5e-4,
    "BF16": 4e-3,
    "Q8_0": 5e-3,
    "Q5_0": 0.064,
    "Q5_1": 0.034,
    "Q4_0": 0.13,
    "Q4_1": 0.07,
}


def test_the_common_formats_can_be_read_and_written() -> None:
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"} <= set(
        quantisable_formats()
    )
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ1_M"} <= set(dequantisable_formats())
    assert "I32" not in dequantisable_formats()
    assert "Q8_K" not in dequantisable_formats()


@pytest.mark.parametrize("name", STEPS)
def test_round_trip(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    packed = quantise(values, name)
    assert packed.shape == (5, block_format(name).row_bytes(96))
    back = dequantise(packed, name)
    assert back.dtype == np.float32
    largest = np.abs(values.reshape(5, 3, 32)).max(axis=2, keepdims=True)
    error = np.abs((back - values).reshape(5, 3, 32)) / largest
    assert error.max() <= STEPS[name]
    np.testing.assert_array_equal(dequantise(quantise(back, "F32"), "F32"), back)


def test_dequantise_copies() -> None:
    packed = quantise(np.ones((1, 32), np.float32), "F32")
    packed.flags.writeable = False
    dequantise(packed, "F32")[0, 0] = 5.0


def test_refusals_say_why() -> None:
    with pytest.raises(ModelError, match="33 values cannot be stored as Q8_0: its blocks hold 32"):
        quantise(np.zeros((1, 33)), "q8_0")
    with pytest.raises(ModelError, match=r"70000 is outside the range of F16 \(65504\); use bf16 or f32"):
        quantise(np.array([[70000.0]]), "F16")
    with pytest.raises(ModelError, match="no quantiser for Q4_K; write one of BF16, F16"):
        quantise(np.zeros((1, 256)), "Q4_K")
    with pytest.raises(ModelError, match="I32 does not hold weights"):
        dequantise(np.zeros((1, 4), np.uint8), "I32")
    with pytest.raises(ModelError, match="unknown tensor format 'Q9_Z'"):
        block_format("Q9_Z")


def test_the_component_offers_the_same(tmp_path: Path) -> None:
    (component,) = retrograd_quants()
    quant = component.build(NoConfig(), BuildContext(config=None, base_dir=tmp_path))
    assert quant.formats["Q4_K"] == BlockLayout(type_id=12, values=256, bytes=144)
    assert set(quant.formats) == set(FORMATS)
    assert quant.readable == set(dequantisable_formats())
    assert quant.writable == set(quantisable_formats())
    check_quant(quant, ("F32", "F16", "BF16", "Q8_0", "Q4_K"))
    values = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    packed = quant.quantise(values, "Q8_0")
    np.testing.assert_array_equal(packed, quantise(values, "Q8_0"))
    np.testing.assert_array_equal(quant.dequantise(packed, "Q8_0"), dequantise(packed, "Q8_0"))
