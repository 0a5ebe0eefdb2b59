"""Contract of a loss: `check_loss(loss)` raises `AssertionError` where it is broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import Loss, LossBatch

Extra = Callable[[np.random.Generator, int], Mapping[str, npt.NDArray[Any]]]


def check_loss(loss: Loss, *, extra: Extra | None = None, seed: int = 0, tolerance: float = 1e-6) -> None:
    """Check what every loss promises, in float64, on random log-probabilities of five sequences.

    It is pure and leaves its input alone; `dlogp` is the derivative of `value` (central differences, to
    `tolerance` relative); a batch cut between sequences gives the same value, derivatives and metrics in
    sum; float32 in gives float32 out. `extra(rng, n)` makes `LossBatch.extra` for losses that read it.
    """
    batch = _random_batch(np.random.default_rng(seed), extra)
    before = _copy(batch)
    result = loss(batch)
    assert np.isfinite(result.value)
    assert result.dlogp.shape == batch.logp.shape, f"dlogp has shape {result.dlogp.shape}"
    assert _equal(batch, before), "the loss changed its input"
    again = loss(batch)
    assert again.value == result.value, "the loss is not a pure function"
    assert np.array_equal(again.dlogp, result.dlogp), "the loss is not a pure function"
    _check_derivative(loss, batch, result.dlogp, tolerance)
    _check_passes(loss, batch)
    narrow = attrs.evolve(
        batch,
        logp=batch.logp.astype(np.float32),
        weight=batch.weight.astype(np.float32),
        extra={name: array.astype(np.float32) for name, array in batch.extra.items()},
    )
    assert loss(narrow).dlogp.dtype == np.float32, "float32 log-probabilities must give float32 dlogp"


def _random_batch(rng: np.random.Generator, extra: Extra | None) -> LossBatch:
    sequence = np.repeat(np.arange(5), [1, 7, 3, 12, 5])
    n = sequence.size
    return LossBatch(
        logp=-rng.exponential(1.5, n) - 1e-3,
        weight=rng.uniform(0.25, 2.0, n),
        sequence=sequence.astype(np.int64),
        position=np.concatenate([np.arange(1, count + 1) for count in np.bincount(sequence)]),
        normalizer=37.0,
        extra=dict(extra(rng, n)) if extra is not None else {},
    )


def _check_derivative(loss: Loss, batch: LossBatch, dlogp: npt.NDArray[Any], tolerance: float) -> None:
    step = 1e-6
    for i in range(batch.logp.size):
        values = []
        for sign in (1.0, -1.0):
            moved = batch.logp.copy()
            moved[i] += sign * step
            values.append(loss(attrs.evolve(batch, logp=moved)).value)
        numeric = (values[0] - values[1]) / (2 * step)
        bound = tolerance * max(abs(numeric), abs(float(dlogp[i])), 1.0)
        assert abs(numeric - dlogp[i]) <= bound, f"dlogp[{i}] is {dlogp[i]}, differences give {numeric}"


def _check_passes(loss: Loss, batch: LossBatch) -> None:
    whole = loss(batch)
    parts = [
        loss(_select(batch, batch.sequence < 2)),
        loss(_select(batch, (batch.sequence >= 2) & (batch.sequence < 4))),
        loss(_select(batch, batch.sequence >= 4)),
    ]
    assert np.isclose(sum(part.value for part in parts), whole.value, rtol=1e-9), (
        "the value depends on how the step is cut into passes: divide by batch.normalizer, not by a count"
    )
    assert np.allclose(np.concatenate([part.dlogp for part in parts]), whole.dlogp, rtol=1e-9)
    for name, value in whole.metrics.items():
        total = sum(part.metrics[name] for part in parts)
        assert np.isclose(total, value, rtol=1e-9), f"metric {name!r} is not a sum over passes"


def _select(batch: LossBatch, mask: npt.NDArray[np.bool_]) -> LossBatch:
    return attrs.evolve(
        batch,
        logp=batch.logp[mask],
        weight=batch.weight[mask],
        sequence=batch.sequence[mask],
        position=batch.position[mask],
        extra={name: array[mask] for name, array in batch.extra.items()},
    )


def _copy(batch: LossBatch) -> LossBatch:
    return _select(batch, np.ones(batch.logp.size, np.bool_))


def _equal(first: LossBatch, second: LossBatch) -> bool:
    return (
        np.array_equal(first.logp, second.logp)
        and np.array_equal(first.weight, second.weight)
        and np.array_equal(first.sequence, second.sequence)
        and np.array_equal(first.position, second.position)
        and all(np.array_equal(first.extra[name], second.extra[name]) for name in first.extra)
    )
