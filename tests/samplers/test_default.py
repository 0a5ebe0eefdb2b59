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


def batch(count: int, size: int) -> Any:
    return (np.random.default_rng(3).standard_normal((count, size)) * 3).astype(np.float32)


@pytest.mark.parametrize("size", [5, 16, 2048, 2049, 50003])
def test_float32_logits_are_drawn_as_in_float64(size: int) -> None:
    logits = batch(6, size)
    sampler, params = (
        DefaultSampler(),
        [SamplingParams(temperature=t) for t in (1.0, 0.5, 2.0, 1.0, 1.0, 0.1)],
    )
    for seed in range(20):
        rngs = [np.random.default_rng([seed, row]) for row in range(6)]
        found = sampler.sample_batch(logits, params, rngs)
        rngs = [np.random.default_rng([seed, row]) for row in range(6)]
        exact = sampler.sample_batch(logits.astype(np.float64), params, rngs)
        assert [token for token, _ in found] == [token for token, _ in exact]
        np.testing.assert_allclose([p for _, p in found], [p for _, p in exact], atol=2e-6)


def test_a_draw_depends_on_its_own_row_alone() -> None:
    """Rows alone, in any order, among greedy and filtered ones: the same tokens, to the last bit of logp."""
    logits = batch(7, 3000)
    params = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=5)] * 2 + [
        SamplingParams()
    ]
    sampler = DefaultSampler()

    def rngs() -> list[np.random.Generator]:
        return [np.random.default_rng([1, row]) for row in range(7)]

    together = sampler.sample_batch(logits, params, rngs())
    alone = [sampler.sample(*one) for one in zip(logits, params, rngs(), strict=True)]
    assert alone == together
    order = [4, 0, 6, 2, 5, 1, 3]
    shuffled = sampler.sample_batch(logits[order], [params[i] for i in order], [rngs()[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_tokens_without_weight_are_never_drawn() -> None:
    logits = np.full((1, 5000), -np.inf, np.float32)
    logits[0, 4100] = 1.0

    class Last:
        def random(self) -> float:
            return float(np.nextafter(1.0, 0.0))

    assert DefaultSampler().sample_batch(logits, [SamplingParams()], [Last()]) == [(4100, 0.0)]  # type: ignore[list-item]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_float32_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = batch(2, 100)
    logits[1, 50] = bad
    with pytest.raises(RolloutError, match="largest logit is"):
        DefaultSampler().sample_batch(logits, [SamplingParams()] * 2, [np.random.default_rng(0)] * 2)


def test_a_subclass_that_draws_in_its_own_way_is_asked() -> None:
    class First(DefaultSampler):
        def sample(self, logits: Any, params: SamplingParams, rng: np.random.Generator) -> tuple[int, float]:
            return 0, 0.0

    assert (
        First().sample_batch(batch(2, 9), [SamplingParams()] * 2, [np.random.default_rng(0)] * 2)
        == [(0, 0.0)] * 2
    )
