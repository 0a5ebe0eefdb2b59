"""Contracts of losses; they raise `AssertionError` where one is broken.

`check_loss` is for losses of log-probabilities alone, `check_policy_loss` for those that learn from rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import Loss, LossBatch, LossResult, PolicyObjective, TrainingError

Extra = Callable[[np.random.Generator, int], Mapping[str, npt.NDArray[Any]]]


def check_loss(loss: Loss, *, extra: Extra | None = None, seed: int = 0, tolerance: float = 1e-6) -> None:
    """Check what every loss promises, in float64, on random log-probabilities of five sequences.

    It is pure and leaves its input alone; `dlogp` is the derivative of `value` (central differences, to
    `tolerance` relative); a batch cut between sequences gives the same value, derivatives and metrics in
    sum; float32 in gives float32 out. `extra(rng, n)` makes `LossBatch.extra` for losses that read it.
    """
    batch = _random_batch(np.random.default_rng(seed), extra)
    _check(loss, batch, tolerance, hold_ratio=False)
    _check_passes(loss, batch)


def check_policy_loss(
    loss: Loss, *, hold_ratio: bool = False, seed: int = 0, tolerance: float = 1e-6
) -> None:
    """Check what a loss of learning from rewards promises, beside what `check_loss` checks.

    With ratios of 1 it is the plain policy gradient: dlogp = −weight · advantage / normalizer. At levels
    "token" and "sequence", with and without a KL penalty, `dlogp` is the derivative of `value`; a step cut
    anywhere, also within a sequence, gives the same sums; a token of weight 0 changes nothing. Without its
    objective or an array that it needs it raises `TrainingError` and names the array.

    `hold_ratio`: the loss takes the importance ratio as a constant (as CISPO does), so differences move the
    old policy and the sampler with the policy.
    """
    rng = np.random.default_rng(seed)
    levels: tuple[Literal["token", "sequence"], ...] = ("token", "sequence")
    for level in levels:
        for coefficient in (0.0, 0.2):
            batch = _policy_batch(rng, level, coefficient)
            _check(loss, batch, tolerance, hold_ratio=hold_ratio)
            _check_passes(loss, batch)
            _check_cut_sequences(loss, batch)
        _check_first_step(loss, _policy_batch(rng, level, 0.0))
    _check_masked(loss, _policy_batch(rng, "token", 0.2))
    _check_missing(loss, _policy_batch(rng, "token", 0.2))


def _check(loss: Loss, batch: LossBatch, tolerance: float, *, hold_ratio: bool) -> None:
    before = _copy(batch)
    result = loss(batch)
    assert np.isfinite(result.value)
    assert result.dlogp.shape == batch.logp.shape, f"dlogp has shape {result.dlogp.shape}"
    assert _equal(batch, before), "the loss changed its input"
    again = loss(batch)
    assert again.value == result.value, "the loss is not a pure function"
    assert np.array_equal(again.dlogp, result.dlogp), "the loss is not a pure function"
    _check_derivative(loss, batch, result.dlogp, tolerance, hold_ratio=hold_ratio)
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


def _policy_batch(
    rng: np.random.Generator, level: Literal["token", "sequence"], coefficient: float
) -> LossBatch:
    """Five sequences with ratios on both sides of the clip range, one advantage and weight a sequence."""
    plain = _random_batch(rng, None)
    sequence, n = plain.sequence, plain.logp.size
    drift = np.array([0.5, -0.5, 0.6, -0.6, 0.05])[sequence]
    jitter = rng.normal(0, 0.1, n)
    advantage = np.array([1.0, -0.5, -1.5, 0.75, 0.25])[sequence]
    # At level "sequence" a token's derivative is that of `value` only where its whole sequence is alike.
    gap = np.array([0.9, -0.4, 0.1, 0.3, -0.2])[sequence] if level == "sequence" else rng.normal(0, 0.5, n)
    return attrs.evolve(
        plain,
        weight=rng.uniform(0.25, 2.0, 5)[sequence],
        extra={
            "old_logp": plain.logp - drift - jitter,
            "ref_logp": plain.logp + rng.normal(0, 0.3, n),
            "sampled_logp": plain.logp - drift - jitter - gap,
            "advantage": advantage,
            "sequence_tokens": np.bincount(sequence)[sequence].astype(np.float64),
        },
        objective=PolicyObjective(clip_low=0.2, clip_high=0.28, level=level, kl_coefficient=coefficient),
    )


def _check_first_step(loss: Loss, batch: LossBatch) -> None:
    extra = dict(batch.extra) | {"old_logp": batch.logp.copy(), "sampled_logp": batch.logp.copy()}
    result = loss(attrs.evolve(batch, extra=extra))
    expected = -batch.weight * batch.extra["advantage"] / batch.normalizer
    assert np.allclose(result.dlogp, expected, rtol=1e-12), (
        "with ratios of 1 the derivative must be -weight * advantage / normalizer"
    )


def _check_cut_sequences(loss: Loss, batch: LossBatch) -> None:
    drift = batch.logp - batch.extra["old_logp"]
    mean = np.bincount(batch.sequence, weights=drift) / np.bincount(batch.sequence)
    extra = dict(batch.extra) | {"sequence_log_ratio": mean[batch.sequence]}
    del extra["sequence_tokens"]
    cut = attrs.evolve(batch, extra=extra)
    late = batch.position > 2
    _compare_passes(loss(batch), [loss(_select(cut, mask)) for mask in (late, ~late)], [late, ~late])


def _check_masked(loss: Loss, batch: LossBatch) -> None:
    masked = batch.position % 2 == 0
    result = loss(attrs.evolve(batch, weight=np.where(masked, 0.0, batch.weight)))
    assert not result.dlogp[masked].any(), "a token of weight 0 has a derivative"
    _compare_passes(result, [loss(_select(batch, ~masked))], [~masked])


def _check_missing(loss: Loss, batch: LossBatch) -> None:
    for name in ("old_logp", "advantage", "ref_logp"):
        extra = {key: array for key, array in batch.extra.items() if key != name}
        try:
            given = loss(attrs.evolve(batch, extra=extra))
        except TrainingError as error:
            message = str(error)
        else:
            unread = np.array_equal(given.dlogp, loss(batch).dlogp)
            message = name if unread else "no error"
        assert name in message, f"without {name!r} the loss must raise TrainingError and name it: {message}"
    try:
        loss(attrs.evolve(batch, objective=None))
    except TrainingError:
        return
    raise AssertionError("the loss must raise TrainingError without an objective")


def _check_derivative(
    loss: Loss, batch: LossBatch, dlogp: npt.NDArray[Any], tolerance: float, *, hold_ratio: bool
) -> None:
    step = 1e-6
    for i in range(batch.logp.size):
        values = []
        for sign in (1.0, -1.0):
            move = np.zeros_like(batch.logp)
            move[i] = sign * step
            extra = dict(batch.extra)
            for name in ("old_logp", "sampled_logp") if hold_ratio else ():
                extra[name] = extra[name] + move
            values.append(loss(attrs.evolve(batch, logp=batch.logp + move, extra=extra)).value)
        numeric = (values[0] - values[1]) / (2 * step)
        bound = tolerance * max(abs(numeric), abs(float(dlogp[i])), 1.0)
        assert abs(numeric - dlogp[i]) <= bound, f"dlogp[{i}] is {dlogp[i]}, differences give {numeric}"


def _check_passes(loss: Loss, batch: LossBatch) -> None:
    masks = [batch.sequence < 2, (batch.sequence >= 2) & (batch.sequence < 4), batch.sequence >= 4]
    _compare_passes(loss(batch), [loss(_select(batch, mask)) for mask in masks], masks)


def _compare_passes(whole: LossResult, parts: list[LossResult], masks: list[npt.NDArray[np.bool_]]) -> None:
    assert np.isclose(sum(part.value for part in parts), whole.value, rtol=1e-9), (
        "the value depends on how the step is cut into passes: divide by batch.normalizer, not by a count"
    )
    for part, mask in zip(parts, masks, strict=True):
        assert np.allclose(part.dlogp, whole.dlogp[mask], rtol=1e-9), (
            "a derivative depends on how the step is cut into passes"
        )
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
