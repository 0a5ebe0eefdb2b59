"""Shared prefixes change no bit of a log-probability, and gradients by no more than the order of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrograd.engine import PackingStats, TrainingEngine, TrainingSequence, plan_step
from retrograd.nn import CausalLM
from retrograd.testing.adapters import attach_factors, random_factors
from retrograd_hookspecs import LossBatch, LossResult, Parameter
from tests.model_support import build_backend, build_kernels, engine_for, load_model, mean_nll, relative_gap

VARIANTS: tuple[str, ...] = build_backend("cpu").variants  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=("llama", "gemma3"))
def exact(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> CausalLM:
    backend = build_backend("reference")
    return load_model(tiny_model(architecture=request.param), backend, build_kernels(backend))


@pytest.fixture(scope="module", params=[(v, a) for v in VARIANTS for a in ("llama", "gemma3")], ids=str)
def cpu(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> CausalLM:
    variant, architecture = request.param
    backend = build_backend("cpu", kernels=variant)
    return load_model(tiny_model(architecture=architecture, format="Q8_0"), backend, build_kernels(backend))


def families_of(
    model: CausalLM, sizes: Sequence[tuple[int, Sequence[int]]], seed: int = 0
) -> tuple[list[TrainingSequence], list[list[int]]]:
    """Families of (tokens of the prompt, tokens of each answer); some tokens of an answer are not trained."""
    rng = np.random.default_rng(seed)
    vocabulary = model.spec.vocabulary_size
    sequences: list[TrainingSequence] = []
    families: list[list[int]] = []
    for prompt, lengths in sizes:
        shared = rng.integers(0, vocabulary, prompt)
        families.append(list(range(len(sequences), len(sequences) + len(lengths))))
        for length in lengths:
            tokens = np.concatenate([shared, rng.integers(0, vocabulary, length)]).astype(np.int32)
            trained = np.arange(len(tokens)) >= prompt
            trained[prompt:] &= rng.random(length) < 0.8
            trained[prompt : prompt + 1] = True
            sequences.append(
                TrainingSequence(tokens=tokens, trained=trained, weight=rng.uniform(0.5, 2.0, len(tokens)))
            )
    return sequences, families


def gradients_of(
    model: CausalLM,
    parameters: Sequence[Parameter],
    sequences: Sequence[TrainingSequence],
    families: Sequence[Sequence[int]],
    loss: Callable[[LossBatch], LossResult] = mean_nll,
    **options: Any,
) -> tuple[float, dict[str, Any], PackingStats]:
    """Loss, gradients and packing of one step over all sequences."""
    engine = engine_for(model, **options)
    for parameter in parameters:
        parameter.grad[...] = 0
    step = engine.plan(sequences, families)
    stats = engine.train_step(step, sequences, loss, 10.0)
    packing = PackingStats.of(step, engine.settings.micro_batch)
    assert (stats.tokens, stats.trained_tokens) == (packing.tokens, sum(s.trained_tokens for s in sequences))
    return stats.loss, {p.name: np.array(model.backend.to_host(p.grad)) for p in parameters}, packing


def recorded(record: dict[tuple[int, int], float]) -> Callable[[LossBatch], LossResult]:
    """The loss, noting the log-probability of each token by (sequence, position)."""

    def loss(batch: LossBatch) -> LossResult:
        for sequence, position, logp in zip(batch.sequence, batch.position, batch.logp, strict=True):
            place = int(sequence), int(position)
            assert place not in record
            record[place] = float(logp)
        return mean_nll(batch)

    return loss


SIZES = [(9, [4, 1, 12, 7]), (1, [3, 5]), (2, [6, 1, 2]), (14, [5, 5, 19, 2, 8])]
"""Prompts of 1 and 2 tokens, answers of 1; longer than gemma's window of 8."""

LAYOUTS: list[dict[str, Any]] = [
    {"micro_batch": 4096, "shared_prefix_fanout": "max"},
    {"micro_batch": 40, "shared_prefix_fanout": "max"},
    {"micro_batch": 16, "shared_prefix_fanout": "max"},
    {"micro_batch": 5, "shared_prefix_fanout": "max"},
    {"micro_batch": 1, "shared_prefix_fanout": "max"},
    {"micro_batch": 16, "shared_prefix_fanout": 2},
    {"micro_batch": 16, "shared_prefix_fanout": "auto"},
    {"micro_batch": 5, "shared_prefix_fanout": 3},
    {
        "micro_batch": 10,
        "shared_prefix_fanout": "max",
        "gradient_checkpointing": True,
        "checkpoint_every_n_layers": 1,
    },
]


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_loss_and_gradients_are_those_without_sharing(exact: CausalLM, options: dict[str, Any]) -> None:
    parameters = attach_factors(exact, random_factors(exact, rank=3), scale=0.7)
    sequences, families = families_of(exact, SIZES)
    expected = gradients_of(exact, parameters, sequences, families, shared_prefix_fanout="off")
    assert expected[2].tokens_saved == 0
    loss, found, packing = gradients_of(exact, parameters, sequences, families, **options)
    assert packing.tokens_saved > 0
    assert packing.tokens + packing.tokens_saved == expected[2].tokens
    assert loss == pytest.approx(expected[0], rel=1e-12)
    assert relative_gap(found, expected[1]) < 1e-10


def test_gradients_against_finite_differences(exact: CausalLM) -> None:
    """With a prefix in the cache, a branch that is cut and one that is not."""
    parameters = attach_factors(exact, random_factors(exact, rank=3), scale=0.7)
    sequences, families = families_of(exact, [(9, [4, 11, 7])])
    options = {"micro_batch": 6, "shared_prefix_fanout": "max"}
    _, found, packing = gradients_of(exact, parameters, sequences, families, **options)
    assert packing.fanout_mean == 3.0
    engine = engine_for(exact, shared_prefix_fanout="off")

    def loss() -> float:
        scores = engine.log_probabilities(sequences)
        return -sum(
            float(s.weight[s.trained] @ logp)
            for s, logp in zip(sequences, scores, strict=True)
            if s.weight is not None
        )

    directions = [np.random.default_rng(3).standard_normal(p.weight.shape) for p in parameters]
    values = []
    for distance in (1e-5, -2e-5, 1e-5):
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.weight[...] += distance * direction
        values.append(loss())
    slope = sum(float((found[p.name] * d).sum()) for p, d in zip(parameters, directions, strict=True)) * 10.0
    assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


@pytest.mark.parametrize("options", [o for o in LAYOUTS if o["micro_batch"] > 1], ids=str)
def test_sharing_changes_no_bit_of_a_log_probability(cpu: CausalLM, options: dict[str, Any]) -> None:
    attach_factors(cpu, random_factors(cpu, rank=4), scale=0.5)
    sequences, families = families_of(cpu, [*SIZES, (90, [40, 3, 70])])
    expected = engine_for(cpu, shared_prefix_fanout="off").log_probabilities(sequences)
    engine = engine_for(cpu, **options)
    for shared, alone in zip(engine.log_probabilities(sequences, families), expected, strict=True):
        assert (shared == alone).all()
    seen: dict[tuple[int, int], float] = {}
    step = engine.plan(sequences, families)
    assert step.branches
    engine.train_step(step, sequences, recorded(seen), 1.0)
    for number, (sequence, alone) in enumerate(zip(sequences, expected, strict=True)):
        places = np.flatnonzero(sequence.trained).tolist()
        assert [seen.pop((number, position)) for position in places] == alone.tolist()
    assert not seen


def test_sharing_changes_no_bit_in_float64_where_nothing_is_cut(exact: CausalLM) -> None:
    sequences, families = families_of(exact, SIZES)
    expected = engine_for(exact, shared_prefix_fanout="off").log_probabilities(sequences)
    for size in (4096, 40):
        engine = engine_for(exact, micro_batch=size, shared_prefix_fanout="max")
        for shared, alone in zip(engine.log_probabilities(sequences, families), expected, strict=True):
            assert (shared == alone).all()


@pytest.mark.parametrize("size", [4096, 16, 5])
def test_float32_gradients_are_those_without_sharing(cpu: CausalLM, size: int) -> None:
    parameters = attach_factors(cpu, random_factors(cpu, rank=4), scale=0.5)
    sequences, families = families_of(cpu, SIZES)
    options = {"micro_batch": size, "shared_prefix_fanout": "max"}
    loss, found, _ = gradients_of(cpu, parameters, sequences, families, **options)
    again, second, _ = gradients_of(cpu, parameters, sequences, families, **options)
    assert again == loss
    assert all((second[name] == value).all() for name, value in found.items())
    expected = gradients_of(cpu, parameters, sequences, families, shared_prefix_fanout="off")
    bfloat16 = "amx" in {cpu.kernels.serving("matmul", "Q8_0").variant}
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert relative_gap(found, expected[1]) < (2e-2 if bfloat16 else 2e-5)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("f32", 1e-6), ("f16", 1e-2)])
def test_cached_prefixes_are_rounded_to_the_type_of_the_cache(
    exact: CausalLM, kv_dtype: str, tolerance: float
) -> None:
    parameters = attach_factors(exact, random_factors(exact, rank=3), scale=0.7)
    sequences, families = families_of(exact, SIZES)
    expected = gradients_of(exact, parameters, sequences, families, shared_prefix_fanout="off")
    options = {"kv_dtype": kv_dtype, "shared_prefix_fanout": "max"}
    whole = gradients_of(exact, parameters, sequences, families, micro_batch=100, **options)
    assert relative_gap(whole[1], expected[1]) < 1e-10
    for size in (16, 5):
        _, found, _ = gradients_of(exact, parameters, sequences, families, micro_batch=size, **options)
        assert 0 < relative_gap(found, expected[1]) < tolerance


@pytest.mark.parametrize("size", [4096, 16, 5])
def test_hidden_states_with_shared_prompts(exact: CausalLM, size: int) -> None:
    sequences, families = families_of(exact, SIZES)
    expected = engine_for(exact).hidden(sequences)
    engine = engine_for(exact, micro_batch=size, shared_prefix_fanout="max")
    for sequence, all_of_them, some, states in zip(
        sequences,
        engine.hidden(sequences, families),
        engine.hidden(sequences, families, trained_only=True),
        expected,
        strict=True,
    ):
        np.testing.assert_allclose(all_of_them, states, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(some, states[sequence.predicts], rtol=1e-10, atol=1e-12)
        assert some.shape[0] == sequence.trained_tokens


def test_a_family_in_which_some_have_no_target(exact: CausalLM) -> None:
    sequences, families = families_of(exact, [(6, [3, 0, 4])])
    assert sequences[1].trained_tokens == 0
    engine = engine_for(exact, micro_batch=6, shared_prefix_fanout="max")
    assert [len(logp) for logp in engine.log_probabilities(sequences, families)] == [
        s.trained_tokens for s in sequences
    ]
    assert engine.hidden(sequences, families, trained_only=True)[1].shape[0] == 0


@pytest.fixture(scope="module")
def small(tiny_model: Callable[..., Path]) -> Callable[[str], CausalLM]:
    models: dict[str, CausalLM] = {}

    def build(architecture: str) -> CausalLM:
        if architecture not in models:
            backend = build_backend("reference")
            path = tiny_model(architecture=architecture)
            models[architecture] = load_model(path, backend, build_kernels(backend))
        return models[architecture]

    return build


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    architecture=st.sampled_from(("llama", "gemma3")),
    sizes=st.lists(
        st.tuples(st.integers(1, 14), st.lists(st.integers(1, 12), min_size=1, max_size=4)),
        min_size=1,
        max_size=3,
    ),
    micro_batch=st.integers(1, 30),
    fanout=st.one_of(st.sampled_from(("auto", "max")), st.integers(2, 4)),
    checkpointing=st.booleans(),
    seed=st.integers(0, 100),
)
def test_random_families(
    small: Callable[[str], CausalLM],
    architecture: str,
    sizes: list[tuple[int, list[int]]],
    micro_batch: int,
    fanout: Any,
    checkpointing: bool,
    seed: int,
) -> None:
    model = small(architecture)
    parameters = attach_factors(model, random_factors(model, rank=2), scale=0.7)
    sequences, families = families_of(model, sizes, seed)
    seen: tuple[dict[tuple[int, int], float], ...] = ({}, {})
    expected = gradients_of(
        model, parameters, sequences, families, recorded(seen[0]), shared_prefix_fanout="off"
    )
    loss, found, _ = gradients_of(
        model,
        parameters,
        sequences,
        families,
        recorded(seen[1]),
        micro_batch=micro_batch,
        shared_prefix_fanout=fanout,
        gradient_checkpointing=checkpointing,
        checkpoint_every_n_layers=1,
    )
    assert seen[1].keys() == seen[0].keys()
    assert loss == pytest.approx(expected[0], rel=1e-12)
    # Of one token alone the gradients by queries and keys are zero.
    whole = {"all": np.concatenate([array.ravel() for array in expected[1].values()])}
    assert relative_gap({"all": np.concatenate([found[name].ravel() for name in expected[1]])}, whole) < 1e-10


def test_nothing_is_allocated_in_the_steady_state(exact: CausalLM) -> None:
    parameters = attach_factors(exact, random_factors(exact, rank=3), scale=0.7)
    sequences, families = families_of(exact, SIZES)
    options = {"micro_batch": 7, "kv_dtype": "f16", "shared_prefix_fanout": "max"}
    gradients_of(exact, parameters, sequences, families, **options)
    before = exact.workspace.allocations
    gradients_of(exact, parameters, sequences[::-1], [], **options)
    gradients_of(exact, parameters, sequences, families, **options)
    assert exact.workspace.allocations == before


def test_a_sweep_that_meets_rows_of_an_earlier_step_gives_the_same(exact: CausalLM) -> None:
    """Rows of the cache and of its gradients are used by one sequence after another."""
    parameters = attach_factors(exact, random_factors(exact, rank=3), scale=0.7)
    sequences, families = families_of(exact, [(5, [9, 9, 9, 9, 9, 9]), (7, [6, 6])])
    engine: TrainingEngine = engine_for(exact, micro_batch=4, shared_prefix_fanout="max")
    step = plan_step(sequences, families, micro_batch=4, fanout="max")
    results = []
    for _ in range(2):
        for parameter in parameters:
            parameter.grad[...] = 0
        engine.train_step(step, sequences, mean_nll, 1.0)
        results.append([np.array(p.grad) for p in parameters])
    assert all((first == second).all() for first, second in zip(*results, strict=True))
