"""Gradients under everything that must not change them: packing, cutting, tiles, checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.engine import TrainingSequence, plan_epoch, whole_sequence
from retrograd.nn import CausalLM, KeyValueStore, Run, build_pass
from retrograd.testing.adapters import attach_factors, random_factors
from retrograd.testing.architectures import check_gradients
from retrograd_hookspecs import Parameter, TrainingError
from tests.model_support import (
    build_backend,
    build_kernels,
    engine_for,
    gradients,
    load_model,
    mean_nll,
    relative_gap,
)

ARCHITECTURES = ("llama", "gemma3", "qwen2", "qwen3")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> CausalLM:
    backend = build_backend("reference")
    options: dict[str, Any] = {"rope_factors": True} if request.param == "llama" else {}
    if request.param == "gemma3":
        options["metadata"] = {"gemma3.final_logit_softcapping": 5.0, "gemma3.attn_logit_softcapping": 2.0}
    return load_model(tiny_model(architecture=request.param, **options), backend, build_kernels(backend))


@pytest.fixture
def parameters(model: CausalLM) -> Sequence[Parameter]:
    return attach_factors(model, random_factors(model, rank=3), scale=0.7)


@pytest.fixture(scope="module")
def sequences(model: CausalLM) -> list[TrainingSequence]:
    """Lengths from 3 to 21: longer than gemma's window of 8 and than most passes below."""
    rng = np.random.default_rng(1)
    out = []
    for length in (21, 6, 13, 3):
        tokens = rng.integers(0, model.spec.vocabulary_size, length).astype(np.int32)
        trained = rng.random(length) < 0.6
        trained[0], trained[-1] = False, True
        out.append(TrainingSequence(tokens=tokens, trained=trained, weight=rng.random(length)))
    return out


@pytest.fixture(scope="module")
def expected(model: CausalLM, sequences: list[TrainingSequence]) -> tuple[float, dict[str, Any]]:
    return gradients(model, attach_factors(model, random_factors(model, rank=3), scale=0.7), sequences)


def test_against_finite_differences_with_cut_sequences(model: CausalLM) -> None:
    tokens = np.random.default_rng(2).integers(0, model.spec.vocabulary_size, 23).astype(np.int32)
    check_gradients(model, tokens, micro_batch=6)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch": 24, "gradient_accumulation": 1},
        {"micro_batch": 5, "gradient_accumulation": 5},
        {"micro_batch": 1, "gradient_accumulation": 21},
        {"chunked_ce_tiles": 1},
        {"chunked_ce_tiles": 3, "chunked_ce_seq_chunk": 4},
        {"chunked_cross_entropy": False},
        {
            "gradient_checkpointing": True,
            "checkpoint_every_n_layers": 1,
            "micro_batch": 5,
            "gradient_accumulation": 5,
        },
    ],
    ids=str,
)
def test_cutting_does_not_change_loss_or_gradients(
    model: CausalLM,
    parameters: Sequence[Parameter],
    sequences: list[TrainingSequence],
    expected: tuple[float, dict[str, Any]],
    settings: dict[str, Any],
) -> None:
    loss, found = gradients(model, parameters, sequences, **settings)
    assert loss == pytest.approx(expected[0], rel=1e-12)
    assert relative_gap(found, expected[1]) < 1e-11


@pytest.mark.parametrize("stride", [1, 2, 3, 100])
def test_checkpointing_changes_no_bit(
    model: CausalLM,
    parameters: Sequence[Parameter],
    sequences: list[TrainingSequence],
    expected: tuple[float, dict[str, Any]],
    stride: int,
) -> None:
    loss, found = gradients(
        model, parameters, sequences, gradient_checkpointing=True, checkpoint_every_n_layers=stride
    )
    assert loss == expected[0]
    assert all((found[name] == value).all() for name, value in expected[1].items())


@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 2e-3), ("bf16", 2e-2)])
def test_rounded_checkpoints_change_gradients_little_and_the_loss_not(
    model: CausalLM,
    parameters: Sequence[Parameter],
    sequences: list[TrainingSequence],
    expected: tuple[float, dict[str, Any]],
    dtype: str,
    tolerance: float,
) -> None:
    loss, found = gradients(
        model,
        parameters,
        sequences,
        gradient_checkpointing=True,
        checkpoint_every_n_layers=1,
        checkpoint_dtype=dtype,
    )
    assert loss == expected[0]
    assert 0 < relative_gap(found, expected[1]) < tolerance


def test_f16_checkpoints_that_overflow_are_refused(
    model: CausalLM, parameters: Sequence[Parameter], sequences: list[TrainingSequence]
) -> None:
    scale, model.embedding.scale = model.embedding.scale, 1e6
    try:
        with pytest.raises(TrainingError, match=r"before block 0 exceed the range of f16.*bf16"):
            gradients(
                model,
                parameters,
                sequences,
                gradient_checkpointing=True,
                checkpoint_dtype="f16",
                checkpoint_every_n_layers=1,
            )
    finally:
        model.embedding.scale = scale


def test_f16_keys_and_values_round_cut_sequences_alone(
    model: CausalLM,
    parameters: Sequence[Parameter],
    sequences: list[TrainingSequence],
    expected: tuple[float, dict[str, Any]],
) -> None:
    whole = gradients(model, parameters, sequences, kv_dtype="f16", micro_batch=24)
    assert whole[0] == pytest.approx(expected[0], rel=1e-12)
    loss, found = gradients(
        model, parameters, sequences, kv_dtype="f16", micro_batch=5, gradient_accumulation=5
    )
    assert loss != expected[0]
    assert loss == pytest.approx(expected[0], rel=1e-3)
    assert 0 < relative_gap(found, expected[1]) < 1e-2


def test_where_a_sequence_is_cut_changes_nothing_even_in_f16(
    model: CausalLM, sequences: list[TrainingSequence]
) -> None:
    five, seven = (
        engine_for(model, kv_dtype="f16", micro_batch=size).log_probabilities(sequences[:1])[0]
        for size in (5, 7)
    )
    np.testing.assert_allclose(five, seven, rtol=1e-12)


def test_training_and_scoring_agree_bit_for_bit(model: CausalLM, sequences: list[TrainingSequence]) -> None:
    for settings in ({"micro_batch": 24}, {"micro_batch": 5, "gradient_accumulation": 5, "kv_dtype": "f16"}):
        engine = engine_for(model, **settings)
        scored = engine.log_probabilities(sequences)
        seen: dict[int, list[Any]] = {index: [] for index in range(len(sequences))}

        def record(batch: Any, seen: dict[int, list[Any]] = seen) -> Any:
            for sequence in np.unique(batch.sequence):
                seen[int(sequence)].insert(0, batch.logp[batch.sequence == sequence])
            return mean_nll(batch)

        steps = plan_epoch(
            [s.predicts for s in sequences],
            range(len(sequences)),
            micro_batch=engine.settings.micro_batch,
            gradient_accumulation=engine.settings.gradient_accumulation,
        )
        for step in steps:
            engine.train_step(step, sequences, record, 1.0)
        for index, scores in enumerate(scored):
            assert (np.concatenate(seen[index]) == scores).all()


def test_across_steps_earlier_keys_and_values_are_constants(
    model: CausalLM, parameters: Sequence[Parameter], sequences: list[TrainingSequence]
) -> None:
    """The gradient of a step with context is that of the loss with the context's cache held fixed."""
    sequence = whole_sequence(sequences[0].tokens)
    engine = engine_for(model, micro_batch=5, gradient_accumulation=2)
    steps = plan_epoch([sequence.predicts], [0], micro_batch=5, gradient_accumulation=2)
    assert [len(step.context) for step in steps] == [0, 2]
    for parameter in parameters:
        parameter.grad[...] = 0
    stats = engine.train_step(steps[1], [sequence], mean_nll, 1.0)
    assert stats.tokens == stats.trained_tokens == 10

    cache = model.new_cache("test_kv")
    cache.reserve(20, 0)
    store = KeyValueStore(cache=cache)

    def forward(start: int, stop: int) -> Any:
        run = Run(tokens=sequence.tokens[start:stop], start=start, row=0)
        return model.forward(build_pass([run], model.backend, cache_rows=20), store)

    forward(0, 10)

    def loss() -> float:
        hidden = forward(10, 20)
        logp, _ = model.head.log_probabilities(hidden, sequence.tokens[11:21], engine.settings.head_plan())
        return -float(logp.sum())

    assert loss() == pytest.approx(stats.loss, rel=1e-12)
    directions = [np.random.default_rng(3).standard_normal(p.weight.shape) for p in parameters]
    values = []
    for distance in (1e-5, -2e-5, 1e-5):
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.weight[...] += distance * direction
        values.append(loss())
    slope = sum(float((p.grad * d).sum()) for p, d in zip(parameters, directions, strict=True))
    assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


def test_passes_that_no_trained_token_depends_on_are_left_out(
    model: CausalLM, sequences: list[TrainingSequence]
) -> None:
    trained = np.zeros(20, dtype=bool)
    trained[[3, 18]] = True
    sequence = TrainingSequence(tokens=sequences[0].tokens[:20], trained=trained)
    steps = plan_epoch([sequence.predicts], [0], micro_batch=4, gradient_accumulation=2)
    stats = [engine_for(model, micro_batch=4).train_step(step, [sequence], mean_nll, 1.0) for step in steps]
    assert [(s.tokens, s.trained_tokens) for s in stats] == [(4, 1), (2, 1)]


def test_backward_ends_at_the_first_trained_block(model: CausalLM, sequences: list[TrainingSequence]) -> None:
    factors = random_factors(model, rank=3)
    last = f"blk.{model.spec.block_count - 1}.attn_k.weight"
    alone = attach_factors(model, {last: factors[last]}, scale=0.7)
    _, few = gradients(model, alone, sequences)
    zeros = {
        name: pair if name == last else (np.zeros_like(pair[0]), np.zeros_like(pair[1]))
        for name, pair in factors.items()
    }
    everywhere = attach_factors(model, zeros, scale=0.7)
    _, all_of_them = gradients(model, everywhere, sequences)
    assert relative_gap(few, {name: all_of_them[name] for name in few}) < 1e-12


def test_nothing_is_allocated_in_the_steady_state(
    model: CausalLM, parameters: Sequence[Parameter], sequences: list[TrainingSequence]
) -> None:
    settings = {"micro_batch": 7, "gradient_accumulation": 3, "kv_dtype": "f16"}
    gradients(model, parameters, sequences, **settings)
    before = model.workspace.allocations
    gradients(model, parameters, sequences[::-1], **settings)
    assert model.workspace.allocations == before
