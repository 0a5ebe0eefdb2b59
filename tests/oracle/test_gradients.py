"""Backward ops of the reference against finite differences of its forward ops, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd.testing.quants import random_weights
from retrograd_hookspecs import QuantMatrix
from tests.kernels.support import kernels

Array = npt.NDArray[np.float64]

STEP = 1e-5
TOLERANCE = 2e-9
"""Absolute; central differences of a smooth function of order 1 err by STEP² and rounding by 1e-16 / STEP."""


def op(group: str, name: str) -> Callable[..., Any]:
    return next(impl.fn for impl in kernels("reference", group) if impl.op == name)


def difference(loss: Callable[[], float], array: Array) -> Array:
    """Gradient of `loss` by `array`, which is changed in place and restored, by central differences."""
    gradient = np.empty_like(array)
    flat, target = array.reshape(-1), gradient.reshape(-1)
    for i, kept in enumerate(flat.copy()):
        values = []
        for step in (STEP, -STEP):
            flat[i] = kept + step
            values.append(loss())
        flat[i] = kept
        target[i] = (values[0] - values[1]) / (2 * STEP)
    return gradient


def assert_close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=TOLERANCE * max(1.0, np.abs(expected).max()))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_matmul(rng: np.random.Generator) -> None:
    weight = QuantMatrix(name="w", format="Q8_0", data=random_weights(rng, 5, 32, "Q8_0", 1.0), columns=32)
    x, dout, out, dx = (rng.standard_normal((3, n)) for n in (32, 5, 5, 32))

    def loss() -> float:
        op("matmul", "matmul")(x, weight, out)
        return float(np.sum(out * dout))

    start = dx.copy()
    op("matmul", "matmul_input_grad")(dout, weight, dx, True)
    assert_close(dx - start, difference(loss, x))


def test_rms_norm(rng: np.random.Generator) -> None:
    x, weight = rng.standard_normal((3, 7)), rng.standard_normal(7)
    dout, out, dx, rstd = (*(rng.standard_normal((3, 7)) for _ in range(3)), np.empty(3))

    def loss() -> float:
        op("rms_norm", "rms_norm")(x, weight, 0.1, out, rstd)
        return float(np.sum(out * dout))

    loss()
    op("rms_norm", "rms_norm_backward")(dout, x, weight, rstd, dx, False)
    assert_close(dx, difference(loss, x))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(rng: np.random.Generator, interleaved: bool) -> None:
    x, dout = rng.standard_normal((3, 2, 10)), rng.standard_normal((3, 2, 10))
    angles, positions = rng.uniform(-3, 3, (9, 4)), np.array([8, 0, 5], np.int32)

    def loss() -> float:
        rotated = x.copy()
        op("rope", "rope")(rotated, positions, np.cos(angles), np.sin(angles), interleaved, False)
        return float(np.sum(rotated * dout))

    expected = difference(loss, x)
    op("rope", "rope")(dout, positions, np.cos(angles), np.sin(angles), interleaved, True)
    # `loss` reads dout, so it is rotated back only after the differences were taken.
    assert_close(dout, expected)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_activation(rng: np.random.Generator, kind: str) -> None:
    gate, up, dout, out = (rng.standard_normal((3, 5)) for _ in range(4))
    dgate, dup = np.empty((3, 5)), np.empty((3, 5))

    def loss() -> float:
        op("gated_activation", "gated_activation")(kind, gate, up, out)
        return float(np.sum(out * dout))

    op("gated_activation", "gated_activation_backward")(kind, dout, gate, up, dgate, dup)
    assert_close(dgate, difference(loss, gate))
    assert_close(dup, difference(loss, up))


def test_lora(rng: np.random.Generator) -> None:
    x, a, b = rng.standard_normal((4, 6)), rng.standard_normal((2, 6)), rng.standard_normal((5, 2))
    dout, hidden = rng.standard_normal((4, 5)), np.empty((4, 2))

    def loss() -> float:
        out = np.ones((4, 5))
        op("lora", "lora_forward")(x, a, b, 0.3, hidden, out)
        return float(np.sum(out * dout))

    loss()
    gradients = [rng.standard_normal(array.shape) for array in (a, b, x)]
    before = [array.copy() for array in gradients]
    op("lora", "lora_backward")(dout, x, hidden, a, b, 0.3, *gradients)
    for array, gradient, start in zip((a, b, x), gradients, before, strict=True):
        assert_close(gradient - start, difference(loss, array))


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("tile", [1, 4, 11])
def test_cross_entropy(rng: np.random.Generator, softcap: float, tile: int) -> None:
    logits, dlogp = 2.0 * rng.standard_normal((4, 11)), rng.standard_normal(4)
    targets = np.array([0, 10, 5, -100], np.int32)

    def logsumexp() -> tuple[Array, Array]:
        highest, total, target = np.full(4, -np.inf), np.zeros(4), np.zeros(4)
        for first in range(0, 11, tile):
            op("cross_entropy", "logsumexp_tile")(
                logits[:, first : first + tile].copy(), first, targets, softcap, highest, total, target
            )
        return highest + np.log(total), target

    def loss() -> float:
        lse, target = logsumexp()
        return float(np.sum(dlogp[:3] * (target - lse)[:3]) - dlogp[3] * lse[3])

    lse, _ = logsumexp()
    found = logits.copy()
    for first in range(0, 11, tile):
        part = found[:, first : first + tile].copy()
        op("cross_entropy", "softmax_grad_tile")(part, first, targets, softcap, lse, dlogp)
        found[:, first : first + tile] = part
    assert_close(found, difference(loss, logits))


LAYOUTS = {
    "alone": [[0, 9, 0, 0, 0]],
    "packed": [[0, 4, 0, 0, 0], [4, 5, 0, 0, 4]],
    "shared context": [[0, 3, 0, 0, 0], [3, 4, 0, 3, 3], [7, 2, 0, 3, 7]],
    "context of a context": [[0, 3, 0, 0, 0], [3, 2, 1, 2, 3], [5, 4, 3, 2, 5]],
    "unused rows": [[2, 5, 1, 3, 4]],
}


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention(rng: np.random.Generator, layout: str, softcap: float, window: int) -> None:
    segments = np.array(LAYOUTS[layout])
    q, dout, out = (rng.standard_normal((9, 4, 3)) for _ in range(3))
    k, v = rng.standard_normal((9, 2, 3)), rng.standard_normal((9, 2, 3))
    lse = np.empty((9, 4))
    options = (segments, 0.8, window, softcap)

    def loss() -> float:
        op("attention", "attention")(q, k, v, *options, out, lse)
        return float(np.sum(out * dout))

    loss()
    dq = np.full_like(q, np.nan)
    dk, dv = rng.standard_normal(k.shape), rng.standard_normal(v.shape)
    before = dk.copy(), dv.copy()
    op("attention", "attention_backward")(dout, q, k, v, out, lse, *options, dq, dk, dv)
    assert_close(dq, difference(loss, q))
    assert_close(dk - before[0], difference(loss, k))
    assert_close(dv - before[1], difference(loss, v))
