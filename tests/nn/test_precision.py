"""Rounding to f16 and bf16."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.nn import Workspace
from retrograd.nn.precision import ROUNDED_AT_ONCE, restore, round_into, rounded, storage_dtype, store
from tests.model_support import build_backend

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_bf16_is_the_nearest_of_two_neighbours_even_on_a_tie(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    low = (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    high = ((array.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    found = rounded(array, "bf16").astype(np.float64)
    exact = array.astype(np.float64)
    for x, y, a, b in zip(exact, found, low, high.astype(np.float64), strict=True):
        if not np.isfinite(b):
            continue
        below, above = abs(x - a), abs(b - x)
        even = a if not int(np.float32(a).view(np.uint32)) >> 16 & 1 else b
        assert y == (a if below < above else b if above < below else even)


@pytest.mark.parametrize("format", ["f32", "f16", "bf16"])
def test_stored_activations_come_back_rounded(format: str) -> None:
    backend = build_backend("reference")
    workspace = Workspace(backend)
    values = np.random.default_rng(0).standard_normal((5, 8))
    stored = backend.empty(values.shape, storage_dtype(format, backend.compute_dtype))
    store(values, stored, format, workspace.scope("scratch"))
    back = np.empty_like(values)
    restore(stored, back, format, workspace.scope("scratch"))
    expected = values if format == "f32" else rounded(values.astype(np.float32), format)
    assert (back == expected).all()


def test_half_precision_follows_numpy() -> None:
    values = np.array([1.0, 1 + 2**-11, 65504.0, 7e4], dtype=np.float32)
    assert rounded(values, "f16").tolist() == [1.0, 1.0, 65504.0, np.inf]
    assert rounded(values, "f32") is values
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    halfway = ((bits & np.uint32(0xFFFFE000)) | np.uint32(0x1000)).view(np.float32)
    small = (rng.standard_normal(100_000) * 10.0 ** rng.uniform(-9, -3, 100_000)).astype(np.float32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, 65519.9, -65520.0, 2.0**-25, -(2.0**-24)], np.float32)
    for values in (bits.view(np.float32), halfway, small, edges):
        with np.errstate(over="ignore"):
            expected = values.astype(np.float16).astype(np.float32)
        found = rounded(values, "f16")
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("format", ["f32", "f16", "bf16"])
def test_rounding_piece_by_piece_gives_the_same(format: str) -> None:
    values = np.random.default_rng(0).standard_normal(2 * ROUNDED_AT_ONCE + 5).astype(np.float32)
    found = np.empty(values.size)
    round_into(values, found, format)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found, rounded(values, format))  # type: ignore[arg-type]
