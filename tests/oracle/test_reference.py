"""The reference against what is known independently: definitions written another way, `gguf`, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gguf
from retrograd.testing.quants import random_weights
from retrograd_hookspecs import KernelError, ModelError, QuantMatrix
from retrograd_plugins.kernels.reference._weights import WeightCache
from tests.kernels.support import backend, kernels

FORMATS = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)


def op(group: str, name: str) -> Callable[..., Any]:
    return next(impl.fn for impl in kernels("reference", group) if impl.op == name)


def weight(name: str, rows: int = 6, columns: int = 256, writeable: bool = False) -> QuantMatrix:
    data = random_weights(np.random.default_rng(3), rows, columns, name, 0.1)
    data.flags.writeable = writeable
    return QuantMatrix(name="blk.0.attn_q.weight", format=name, data=data, columns=columns)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(9)


def test_backend() -> None:
    reference = backend("reference")
    assert reference.compute_dtype == np.float64
    assert reference.device.features == frozenset()
    assert reference.device.memory_bytes > 2**20
    assert reference.empty((2, 3), np.float32).shape == (2, 3)
    turned = np.arange(6.0).reshape(2, 3).T
    held = reference.from_host(turned)
    assert held.flags.c_contiguous
    np.testing.assert_array_equal(reference.to_host(held), turned)


@pytest.mark.parametrize("name", FORMATS)
def test_products_with_every_format(name: str, rng: np.random.Generator) -> None:
    w = weight(name)
    values = gguf.quants.dequantize(w.data, gguf.GGMLQuantizationType[name]).astype(np.float64)
    x, out, dx = rng.standard_normal((3, 256)), np.empty((3, 6)), np.ones((3, 256))
    op("matmul", "matmul")(x, w, out)
    np.testing.assert_allclose(out, x @ values.T, rtol=1e-12, atol=1e-12)
    op("matmul", "matmul_input_grad")(out, w, dx, True)
    np.testing.assert_allclose(dx - 1.0, out @ values, rtol=1e-12, atol=1e-12)
    rows = np.empty((4, 256))
    op("matmul", "embedding")(np.array([5, 0, 5, 2], np.int32), w, 2.0, rows)
    np.testing.assert_array_equal(rows, 2.0 * values[[5, 0, 5, 2]])


def test_a_weight_that_is_trained_is_read_anew(rng: np.random.Generator) -> None:
    w = weight("F32", writeable=True)
    x, out = rng.standard_normal((2, 256)), np.empty((2, 6))
    op("matmul", "matmul")(x, w, out)
    w.data.view(np.float32)[...] *= 2.0
    doubled = np.empty((2, 6))
    op("matmul", "matmul")(x, w, doubled)
    np.testing.assert_array_equal(doubled, 2.0 * out)


def test_cache_keeps_what_was_used_last() -> None:
    cache = WeightCache(limit_bytes=3 * 6 * 256 * 8)
    matrices = [weight(name) for name in ("Q4_0", "Q5_0", "Q8_0", "F16")]
    kept = [cache.get(matrix) for matrix in matrices[:3]]
    assert cache.get(matrices[0]) is kept[0]
    cache.get(matrices[3])  # drops the one unused for longest, the second
    assert cache.get(matrices[0]) is kept[0]
    again = cache.get(matrices[1])
    assert again is not kept[1]
    np.testing.assert_array_equal(again, kept[1])
    assert cache.get(matrices[1].row_slice(2, 4)).shape == (2, 256)


def test_errors_of_weights() -> None:
    with pytest.raises(ModelError, match="unknown tensor format 'Q9_X'"):
        op("matmul", "matmul")(
            np.zeros((1, 4)),
            QuantMatrix(name="w", format="Q9_X", data=np.zeros((1, 4), np.uint8), columns=4),
            np.zeros((1, 1)),
        )
    wrong = QuantMatrix(name="w", format="F32", data=np.zeros((1, 16), np.uint8), columns=5)
    with pytest.raises(KernelError, match="hold 4 values of format F32, not the declared 5"):
        op("matmul", "matmul")(np.zeros((1, 5)), wrong, np.zeros((1, 1)))
    for ids in ([6], [-1]):
        with pytest.raises(KernelError, match="has 6 rows"):
            op("matmul", "embedding")(np.array(ids, np.int32), weight("F32"), 1.0, np.empty((1, 256)))


def test_rope_turns_by_the_angle(rng: np.random.Generator) -> None:
    angles = rng.uniform(-3, 3, (4, 3))
    x = rng.standard_normal((1, 1, 8))
    for interleaved in (False, True):
        turned = x.copy()
        op("rope", "rope")(
            turned, np.array([2], np.int32), np.cos(angles), np.sin(angles), interleaved, False
        )
        pairs = (x[0, 0, 0:6:2], x[0, 0, 1:6:2]) if interleaved else (x[0, 0, :3], x[0, 0, 3:6])
        expected = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angles[2])
        found = turned[0, 0, 0:6:2] + 1j * turned[0, 0, 1:6:2]
        if not interleaved:
            found = turned[0, 0, :3] + 1j * turned[0, 0, 3:6]
        np.testing.assert_allclose(found, expected, atol=1e-14)
        np.testing.assert_array_equal(turned[0, 0, 6:], x[0, 0, 6:])
    with pytest.raises(KernelError, match="4 rows: the sequence is longer than the context"):
        op("rope", "rope")(x, np.array([4], np.int32), np.cos(angles), np.sin(angles), False, False)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attention_is_masked_softmax(rng: np.random.Generator, window: int, softcap: float) -> None:
    prompt, lengths = 5, (4, 6)
    q = rng.standard_normal((15, 4, 8))
    k, v = rng.standard_normal((15, 2, 8)), rng.standard_normal((15, 2, 8))
    segments = np.array([[0, 5, 0, 0, 0], [5, 4, 0, 5, 5], [9, 6, 0, 5, 9]])
    out, lse = np.empty_like(q), np.empty((15, 4))
    op("attention", "attention")(q, k, v, segments, 0.5, window, softcap, out, lse)
    owner = np.repeat([-1, 0, 1], [prompt, *lengths])
    place = np.concatenate([np.arange(prompt), *(prompt + np.arange(n) for n in lengths)])
    visible = (owner[None] == -1) | (owner[None] == owner[:, None])
    visible &= place[None] <= place[:, None]
    if window:
        visible &= place[None] > place[:, None] - window
    scores = 0.5 * np.einsum("thd,nhd->htn", q, np.repeat(k, 2, axis=1))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(np.where(visible, scores, -np.inf))
    np.testing.assert_allclose(lse, np.log(weights.sum(axis=2)).T, atol=1e-13)
    weights /= weights.sum(axis=2, keepdims=True)
    expected = np.einsum("htn,nhd->thd", weights, np.repeat(v, 2, axis=1))
    np.testing.assert_allclose(out, expected, atol=1e-13)


def test_attention_of_rows_in_no_segment_is_empty(rng: np.random.Generator) -> None:
    q, k = rng.standard_normal((3, 1, 2)), rng.standard_normal((3, 1, 2))
    out, lse = np.full_like(q, np.nan), np.full((3, 1), np.nan)
    op("attention", "attention")(q, k, k, np.array([[1, 1, 0, 0, 2]]), 1.0, 0, 0.0, out, lse)
    np.testing.assert_array_equal(out[[0, 2]], 0.0)
    np.testing.assert_array_equal(lse[[0, 2]], -np.inf)
    np.testing.assert_allclose(out[1], k[2])


@given(st.floats(-700, 700), st.sampled_from(["silu", "gelu_tanh"]))
@settings(max_examples=60, deadline=None)
def test_activations_have_their_limits(x: float, kind: str) -> None:
    out = np.empty((1, 1))
    op("gated_activation", "gated_activation")(kind, np.array([[x]]), np.ones((1, 1)), out)
    assert np.isfinite(out[0, 0])
    assert -0.3 <= out[0, 0] <= max(0.0, x)
    if abs(x) > 40:
        assert out[0, 0] == pytest.approx(max(0.0, x), abs=1e-12)


def test_unknown_activation_is_refused() -> None:
    for name in ("reference", "cpu"):
        fn = next(impl.fn for impl in kernels(name, "gated_activation") if impl.op == "gated_activation")
        one = np.ones((1, 1), backend(name).compute_dtype)
        with pytest.raises(KernelError, match="unknown kind 'relu'; known: silu, gelu_tanh"):
            fn("relu", one, one, one)


def test_logsumexp_of_nothing_but_minus_infinity() -> None:
    highest, total = np.full(2, -np.inf), np.zeros(2)
    logits = np.array([[-np.inf, -np.inf], [-np.inf, 1.0]])
    op("cross_entropy", "logsumexp_tile")(
        logits, 0, np.array([0, 0], np.int32), 0.0, highest, total, np.zeros(2)
    )
    np.testing.assert_array_equal(highest, [-np.inf, 1.0])
    np.testing.assert_array_equal(total, [0.0, 1.0])


def test_adamw_by_hand() -> None:
    value, grad = np.array([1.0], np.float32), np.array([0.5], np.float32)
    first, second = np.zeros(1, np.float32), np.zeros(1, np.float32)
    op("optimizers", "adamw")(value, grad, first, second, 0.1, 0.9, 0.99, 0.0, 0.2, 1)
    # Bias correction makes the first step lr · sign(grad); the decay takes lr · 0.2 · value more.
    assert value[0] == np.float32(1.0 - 0.1 - 0.02)
    assert first[0] == np.float32(0.05)
    assert second[0] == np.float32(0.0025)
    with pytest.raises(KernelError, match="step 0 is not positive"):
        op("optimizers", "adamw")(value, grad, first, second, 0.1, 0.9, 0.99, 0.0, 0.0, 0)


def test_sgd_by_hand() -> None:
    value, grad = np.array([1.0], np.float32), np.array([0.5], np.float32)
    buffer = np.array([0.25], np.float32)
    op("optimizers", "sgd")(value, grad, buffer, 0.5, 0.5, 0.25)
    assert buffer[0] == np.float32(0.625)
    assert value[0] == np.float32(1.0 - 0.5 * (0.625 + 0.25))


def test_sum_squares() -> None:
    assert op("optimizers", "sum_squares")(np.array([3.0, 4.0], np.float32)) == 25.0
    assert op("optimizers", "sum_squares")(np.empty(0, np.float32)) == 0.0
