"""What the engine hands to losses and gives back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.engine import EngineSettings, Piece, Step, TrainingSequence, plan_epoch, whole_sequence
from retrograd.nn import CausalLM, HeadPlan
from retrograd.testing.adapters import attach_factors, random_factors
from retrograd_hookspecs import LossBatch, LossResult, TokenExample
from tests.model_support import build_backend, build_kernels, engine_for, load_model, mean_nll


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> CausalLM:
    backend = build_backend("reference")
    return load_model(tiny_model(architecture="llama"), backend, build_kernels(backend))


def sequence(length: int, first: int, targets: list[int]) -> TrainingSequence:
    """Tokens first, first + 1, …; every per-token array holds 100 times the token."""
    tokens = np.arange(first, first + length, dtype=np.int32)
    trained = np.zeros(length, dtype=bool)
    trained[targets] = True
    return TrainingSequence(
        tokens=tokens, trained=trained, weight=tokens * 10.0, extra={"old": tokens * 100.0}
    )


SEQUENCES = [sequence(12, 20, [2, 5, 6, 10]), sequence(5, 50, [1, 4])]


@pytest.mark.parametrize(("micro_batch", "passes"), [(20, 1), (4, 4)])
def test_a_loss_sees_each_target_with_its_own_numbers(model: CausalLM, micro_batch: int, passes: int) -> None:
    seen: dict[tuple[int, float], float] = {}

    def loss(batch: LossBatch) -> LossResult:
        assert batch.normalizer == 6.0
        np.testing.assert_array_equal(batch.extra["old"], batch.weight * 10.0)
        for number, position, token in zip(batch.sequence, batch.position, batch.weight / 10, strict=True):
            assert SEQUENCES[number].tokens[position] == token
        for number, weight, logp in zip(batch.sequence, batch.weight, batch.logp, strict=True):
            seen[int(number), float(weight)] = float(logp)
        return LossResult(value=1.0, dlogp=np.zeros_like(batch.logp), metrics={"n": float(batch.logp.size)})

    engine = engine_for(model, micro_batch=micro_batch)
    [step] = plan_epoch(
        [s.predicts for s in SEQUENCES], [0, 1], micro_batch=micro_batch, gradient_accumulation=passes
    )
    stats = engine.train_step(step, SEQUENCES, loss, 6.0)
    assert stats.metrics == {"n": 6.0}
    assert (stats.tokens, stats.trained_tokens) == (10 + 4, 6)
    expected = {
        (number, float(s.weight[i])): float(logp)
        for number, s in enumerate(SEQUENCES)
        for i, logp in zip(
            np.flatnonzero(s.trained), engine.log_probabilities(SEQUENCES)[number], strict=True
        )
        if s.weight is not None
    }
    assert seen == expected


def test_log_probabilities_are_those_of_the_logits(model: CausalLM) -> None:
    engine = engine_for(model)
    for s, found in zip(SEQUENCES, engine.log_probabilities(SEQUENCES), strict=True):
        logits = engine.logits(s.tokens)
        logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        where = np.flatnonzero(s.trained)
        np.testing.assert_allclose(found, logp[where - 1, s.tokens[where]], rtol=1e-12)


@pytest.mark.parametrize("micro_batch", [20, 4])
def test_hidden_states_give_the_logits(model: CausalLM, micro_batch: int) -> None:
    engine = engine_for(model, micro_batch=micro_batch)
    matrix = model.head.weight
    weight = matrix.data.view(np.float32).reshape(matrix.shape)
    for s, states in zip(SEQUENCES, engine.hidden(SEQUENCES), strict=True):
        assert states.shape == (s.inputs, model.spec.embedding_length)
        np.testing.assert_allclose(
            states @ weight.T, engine.logits(s.tokens)[: s.inputs], rtol=1e-9, atol=1e-9
        )


def test_logits_do_not_depend_on_the_size_of_passes(model: CausalLM) -> None:
    tokens = np.arange(30, dtype=np.int32)
    whole = engine_for(model).logits(tokens)
    np.testing.assert_allclose(engine_for(model, micro_batch=7).logits(tokens), whole, rtol=1e-10, atol=1e-10)
    assert (engine_for(model).logits(tokens) == whole).all()


def test_gradients_add_up_until_they_are_cleared(model: CausalLM) -> None:
    parameters = attach_factors(model, random_factors(model, rank=2), scale=1.0)
    engine = engine_for(model)
    step = Step(passes=((Piece(0, 0, 10), Piece(1, 0, 4)),))
    engine.train_step(step, SEQUENCES, mean_nll, 6.0)
    once = [np.array(p.grad) for p in parameters]
    engine.train_step(step, SEQUENCES, mean_nll, 6.0)
    for parameter, gradient in zip(parameters, once, strict=True):
        np.testing.assert_array_equal(parameter.grad, 2 * gradient)
        assert gradient.any()


def test_a_loss_with_a_zero_derivative_changes_nothing(model: CausalLM) -> None:
    parameters = attach_factors(model, random_factors(model, rank=2), scale=1.0)
    step = Step(passes=((Piece(0, 0, 10),),))
    engine_for(model).train_step(
        step, SEQUENCES, lambda batch: LossResult(value=0.0, dlogp=np.zeros_like(batch.logp)), 1.0
    )
    assert not any(p.grad.any() for p in parameters)


def test_a_loss_that_is_not_finite_reaches_the_gradient(model: CausalLM) -> None:
    """The update rule sees it there, skips the step and counts it."""
    parameters = attach_factors(model, random_factors(model, rank=2), scale=1.0)
    step = Step(passes=((Piece(0, 0, 10),),))
    stats = engine_for(model).train_step(
        step, SEQUENCES, lambda batch: LossResult(value=float("nan"), dlogp=batch.logp * np.nan), 1.0
    )
    assert np.isnan(stats.loss)
    assert all(np.isnan(p.grad).any() for p in parameters)


def test_sequences() -> None:
    assert (SEQUENCES[0].inputs, SEQUENCES[0].trained_tokens) == (10, 4)
    assert SEQUENCES[0].predicts.tolist() == [i + 1 in (2, 5, 6, 10) for i in range(10)]
    nothing = sequence(4, 0, [])
    assert (nothing.inputs, nothing.predicts.size) == (0, 0)
    whole = whole_sequence(np.arange(4, dtype=np.int32))
    assert whole.trained.tolist() == [False, True, True, True]
    example = TokenExample(tokens=whole.tokens, trained=whole.trained, origin="a:1")
    assert TrainingSequence.of(example).inputs == 3


def test_settings_are_read_from_the_configuration() -> None:
    from retrograd.config import TrainingConfig

    settings = EngineSettings.from_training(
        TrainingConfig(micro_batch=64, kv_dtype="f32", chunked_ce_tiles=3, chunked_ce_seq_chunk=0)
    )
    assert settings.micro_batch == 64
    assert settings.kv_type(np.dtype(np.float64)) == np.float32
    assert settings.head_plan() == HeadPlan(tiles=3, rows=0)
    assert settings.checkpointing() is None
    off = EngineSettings(micro_batch=1, chunked_cross_entropy=False, gradient_checkpointing=True)
    assert off.head_plan() == HeadPlan(tiles=1, rows=0)
    checkpointing: Any = off.checkpointing()
    assert (checkpointing.stride, checkpointing.dtype) == (4, "f32")
