"""Contract of a sampler: `check_sampler(sampler)` raises `AssertionError` where it is broken."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import BatchSampler, Sampler, SamplingParams

_LOGITS = np.array([1.0, -0.5, 2.0, 0.25, -np.inf, 1.5, -3.0, 0.0], np.float32)
_DRAWS = 2000
_SETTINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=3),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.3),
)


def check_sampler(sampler: Sampler, *, seed: int = 0) -> None:
    """Check what every sampler promises.

    The most likely token at temperature 0; draws in proportion to softmax(logits / temperature), of tokens
    that the filters leave, each with its log-probability under that distribution; the same draw from the
    same generator, whatever was drawn before; logits as they were. A `BatchSampler` gives for each row what
    `sample` gives for it alone.
    """
    logits = _LOGITS.copy()
    logits.flags.writeable = False
    token, _ = sampler.sample(logits, SamplingParams(temperature=0.0), np.random.default_rng(seed))
    assert token == int(np.argmax(_LOGITS)), f"temperature 0 took {token}, not the most likely token"
    for params in _SETTINGS:
        _check_distribution(sampler, logits, params, seed)
        first = [sampler.sample(logits, params, np.random.default_rng(n)) for n in range(20)]
        again = [sampler.sample(logits, params, np.random.default_rng(n)) for n in reversed(range(20))]
        assert first == again[::-1], f"{params}: the same generator gives another draw"
    if isinstance(sampler, BatchSampler):
        _check_batch(sampler, seed)


def _expected(params: SamplingParams) -> npt.NDArray[np.float64]:
    """Probabilities of the tokens of `_LOGITS`."""
    weights = np.exp(_LOGITS.astype(np.float64) / params.temperature)
    p = weights / weights.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    if params.top_p < 1.0:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0.0
    p[p < params.min_p * p.max()] = 0.0
    expected: npt.NDArray[np.float64] = p / p.sum()
    return expected


def _check_distribution(sampler: Sampler, logits: Any, params: SamplingParams, seed: int) -> None:
    expected, rng = _expected(params), np.random.default_rng(seed)
    counts: Counter[int] = Counter()
    for _ in range(_DRAWS):
        token, logp = sampler.sample(logits, params, rng)
        assert expected[token] > 0, f"{params}: token {token} cannot be drawn"
        told = np.log(expected[token])
        assert abs(logp - told) < 1e-4, f"{params}: log p of token {token} is {told:.5f}, not {logp:.5f}"
        counts[token] += 1
    for token, p in enumerate(expected):
        spread = 5.0 * np.sqrt(_DRAWS * p * (1.0 - p)) + 1e-9
        assert abs(counts[token] - _DRAWS * p) <= spread, (
            f"{params}: token {token} was drawn {counts[token]} times of {_DRAWS}, its probability is {p:.4f}"
        )


def _check_batch(sampler: BatchSampler, seed: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((len(_SETTINGS) + 1, 50)).astype(np.float32)
    params = [*_SETTINGS, SamplingParams(temperature=0.0)]
    alone = [
        sampler.sample(row, one, np.random.default_rng(n))
        for n, (row, one) in enumerate(zip(rows, params, strict=True))
    ]
    together = sampler.sample_batch(rows, params, [np.random.default_rng(n) for n in range(len(params))])
    assert list(together) == alone, "rows that are drawn from together give other tokens than each alone"
