"""The head in tiles: the same numbers however it is cut, and finite differences."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from retrograd.nn import Head, HeadPlan, RMSNorm, Workspace
from retrograd.nn.head import vocabulary_tiles
from retrograd_hookspecs import QuantMatrix
from tests.model_support import build_backend, build_kernels

VOCABULARY, WIDTH, COUNT = 300, 8, 7


def make(softcap: float) -> Head:
    backend = build_backend("reference")
    kernels = build_kernels(backend)
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    weight = QuantMatrix(name="output", format="F32", data=matrix.view(np.uint8), columns=WIDTH)
    norm = RMSNorm(rng.standard_normal(WIDTH) + 1.0, 1e-5, kernels)
    scratch = Workspace(backend).scope("scratch")
    return Head(weight=weight, norm=norm, softcap=softcap, kernels=kernels, scratch=scratch)


def inputs() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((COUNT, WIDTH))
    targets = np.array([0, 63, 64, 65, 127, 128, VOCABULARY - 1], dtype=np.int32)
    return x, targets, rng.standard_normal(COUNT)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(
    "plan", [HeadPlan(tiles=1, rows=0), HeadPlan(tiles=1, rows=3), HeadPlan(tiles=4, rows=2)]
)
def test_log_probabilities_and_gradient(softcap: float, plan: HeadPlan) -> None:
    head = make(softcap)
    x, targets, dlogp = inputs()
    logits = np.empty((COUNT, VOCABULARY))
    head.logits(x, logits)
    logsumexp = np.log(np.exp(logits).sum(axis=1))
    logp, device = head.log_probabilities(x, targets, plan, gradients=True)
    np.testing.assert_allclose(device, logsumexp, rtol=1e-13)
    np.testing.assert_allclose(logp, logits[np.arange(COUNT), targets] - logsumexp, rtol=1e-12)
    if softcap:
        assert np.abs(logits).max() <= softcap

    dx = np.empty_like(x)
    head.backward(x, targets, device, dlogp, dx, plan)
    direction = np.random.default_rng(2).standard_normal(x.shape)
    ahead, behind = (
        float(head.log_probabilities(x + step * direction, targets, plan)[0] @ dlogp)
        for step in (1e-6, -1e-6)
    )
    assert float((dx * direction).sum()) == pytest.approx((ahead - behind) / 2e-6, rel=1e-7)


def test_tiles_cover_the_vocabulary() -> None:
    assert vocabulary_tiles(300, 1) == [(0, 300)]
    assert vocabulary_tiles(300, 4) == [(0, 128), (128, 256), (256, 300)]
    for vocabulary, tiles in ((49152, 8), (262144, 8), (65, 3), (1, 8)):
        cuts = vocabulary_tiles(vocabulary, tiles)
        assert cuts[0][0] == 0
        assert cuts[-1][1] == vocabulary
        assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
        assert len(cuts) <= tiles


@pytest.mark.parametrize("variant", build_backend("cpu").variants)  # type: ignore[attr-defined]
def test_the_gradient_of_tokens_that_are_nearly_certain(variant: str) -> None:
    """It is small beside the weights it is made of, whose rounding must not outweigh it."""
    width, count = 64, 16
    rng = np.random.default_rng(3)
    matrix = rng.standard_normal((VOCABULARY, width)).astype(np.float32)
    targets = np.arange(0, count * 16, 16, dtype=np.int32)
    x = (matrix[targets] + 0.1 * rng.standard_normal((count, width))).astype(np.float32)
    dlogp = np.ones(count)
    found: list[Any] = []
    certain: list[Any] = []
    for backend in (build_backend("reference"), build_backend("cpu", kernels=variant)):
        kernels, kind = build_kernels(backend), backend.compute_dtype
        weight = QuantMatrix(name="output", format="F32", data=matrix.view(np.uint8), columns=width)
        norm = RMSNorm(np.full(width, 0.16, kind), 1e-5, kernels)
        scratch = Workspace(backend).scope("scratch")
        head = Head(weight=weight, norm=norm, softcap=0.0, kernels=kernels, scratch=scratch)
        own = x.astype(kind)
        logp, device = head.log_probabilities(own, targets, HeadPlan(tiles=4, rows=8), gradients=True)
        dx = np.empty_like(own)
        head.backward(own, targets, device, dlogp.astype(kind), dx, HeadPlan(tiles=4, rows=8))
        found.append(np.array(dx, dtype=np.float64))
        certain.append(np.exp(logp))
    assert np.median(certain[0]) > 0.97
    gap = np.linalg.norm(found[1] - found[0], axis=1) / np.linalg.norm(found[0], axis=1)
    assert gap.max() < (3e-2 if variant == "amx" else 1e-3)
