"""The default sampler: filters by hand, distributions by counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd_hookspecs import RolloutError, SamplingParams
from retrograd_plugins.samplers.default import DefaultSampler

P = np.array([0.4, 0.05, 0.3, 0.25])


def drawn(count: int = 400, logits: Any = None, **params: Any) -> list[tuple[int, float]]:
    sampler, rng = DefaultSampler(), np.random.default_rng(0)
    logits = np.log(P) if logits is None else logits
    return [sampler.sample(logits, SamplingParams(**params), rng) for _ in range(count)]


def distribution(**params: Any) -> dict[int, float]:
    """Probabilities that the sampler reports, by token."""
    return {token: float(np.exp(logp)) for token, logp in drawn(**params)}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.05, 0.3, 0.25]),
        ({"temperature": 0.5}, P**2 / (P**2).sum()),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 4}, P),
        ({"top_p": 0.7}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.71}, [0.4 / 0.95, 0, 0.3 / 0.95, 0.25 / 0.95]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"min_p": 0.7}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 0, 3 / 7, 0]),
    ],
    ids=str,
)
def test_reported_probabilities(params: dict[str, Any], expected: Any) -> None:
    found = distribution(**params)
    assert found == {i: pytest.approx(p) for i, p in enumerate(expected) if p > 0}


def test_tokens_come_as_often_as_reported() -> None:
    tokens = [token for token, _ in drawn(20000)]
    np.testing.assert_allclose(np.bincount(tokens) / 20000, P, atol=0.012)


def test_greedy_takes_the_lowest_of_the_best() -> None:
    logits = np.array([1.0, 3.0, 3.0, 2.0])
    assert drawn(3, logits, temperature=0.0) == [(1, 0.0)] * 3


def test_ties_at_the_border_of_top_k_go_to_the_lowest_ids() -> None:
    assert set(distribution(logits=np.zeros(5), top_k=2)) == {0, 1}


def test_one_random_number_a_token() -> None:
    params = SamplingParams(top_p=0.9, top_k=3)
    rng, other = np.random.default_rng(5), np.random.default_rng(5)
    DefaultSampler().sample(np.log(P), params, rng)
    other.random()
    assert rng.random() == other.random()


def test_the_nucleus_of_a_large_vocabulary_is_exact() -> None:
    logits = np.random.default_rng(1).standard_normal(5000).astype(np.float32) * 3
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), 0.9)) + 1]
    for token, logp in drawn(300, logits, top_p=0.9):
        assert token in kept
        assert np.exp(logp) == pytest.approx(p[token] / p[kept].sum())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(RolloutError, match="largest logit is"):
        drawn(1, np.array([0.0, bad]))
