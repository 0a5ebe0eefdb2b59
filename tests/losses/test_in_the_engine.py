"""Losses of rewards in the engine: a cut sequence gives the gradient of the whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import pytest

from retrograd.engine import TrainingSequence, plan_epoch
from retrograd.nn import CausalLM
from retrograd.testing.adapters import attach_factors, random_factors
from retrograd_hookspecs import LossBatch, LossResult, PolicyObjective
from retrograd_plugins.losses.grpo import grpo
from tests.model_support import build_backend, build_kernels, engine_for, load_model, relative_gap


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> CausalLM:
    backend = build_backend("reference")
    return load_model(tiny_model(architecture="llama"), backend, build_kernels(backend))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_cut_sequences(model: CausalLM, level: Literal["token", "sequence"]) -> None:
    objective = PolicyObjective(clip_low=0.05, clip_high=0.05, level=level, kl_coefficient=0.1)
    rng = np.random.default_rng(3)
    sequences = []
    for length in (21, 6, 13):
        tokens = rng.integers(0, model.spec.vocabulary_size, length).astype(np.int32)
        trained = np.arange(length) > 3
        trained[length // 2] = False  # an observation
        sequences.append(TrainingSequence(tokens=tokens, trained=trained))
    parameters = attach_factors(model, random_factors(model, rank=3), scale=0.7)

    def with_extra(drifts: list[Any], *, given_mean: bool) -> list[TrainingSequence]:
        """What an algorithm puts into `extra`; arrays as long as the tokens."""
        out = []
        for number, (sequence, drift) in enumerate(zip(sequences, drifts, strict=True)):
            arrays = {name: np.zeros(sequence.tokens.size) for name in ("old_logp", "ref_logp", "advantage")}
            arrays["old_logp"][sequence.trained] = logps[number] - drift
            arrays["ref_logp"][sequence.trained] = logps[number] + 0.3
            arrays["advantage"][sequence.trained] = np.random.default_rng(number).normal(0, 1, drift.size)
            name, value = (
                ("sequence_log_ratio", drift.mean()) if given_mean else ("sequence_tokens", drift.size)
            )
            arrays[name] = np.full(sequence.tokens.size, float(value))
            out.append(attrs.evolve(sequence, extra=arrays))
        return out

    def gradient(prepared: list[TrainingSequence], **settings: int) -> tuple[float, Any, dict[str, float]]:
        for parameter in parameters:
            parameter.grad[...] = 0
        [step] = plan_epoch([s.predicts for s in prepared], range(len(prepared)), **settings)
        stats = engine_for(model, **settings).train_step(step, prepared, bound, 48.0)
        found = {p.name: np.array(model.backend.to_host(p.grad)) for p in parameters}
        return stats.loss, found, dict(stats.metrics)

    def bound(batch: LossBatch) -> LossResult:
        return grpo(attrs.evolve(batch, objective=objective))

    logps = engine_for(model).log_probabilities(sequences)
    drifts = [rng.normal(mean, 0.05, logp.size) for mean, logp in zip((0.1, 0.0, -0.1), logps, strict=True)]
    whole = gradient(with_extra(drifts, given_mean=False), micro_batch=64, gradient_accumulation=1)
    assert whole[2]["clipped_low"] > 0
    assert whole[2]["clipped_high"] > 0
    cut = gradient(with_extra(drifts, given_mean=True), micro_batch=5, gradient_accumulation=12)
    assert cut[0] == pytest.approx(whole[0], rel=1e-10)
    assert relative_gap(cut[1], whole[1]) < 1e-9
    assert cut[2] == pytest.approx(whole[2], rel=1e-9)
