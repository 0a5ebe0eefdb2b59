"""The `cpu` backend under the same modules: references within tolerance, and the bits that must be equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.engine import GenerationRequest, Generator, plan_epoch, whole_sequence
from retrograd.nn import CausalLM
from retrograd.testing.adapters import attach_factors, random_factors
from retrograd_hookspecs import SamplingParams
from retrograd_plugins.kernels.cpu._simd_features import TILE_VARIANTS
from tests.engine.test_generation import RecordingSampler
from tests.engine.test_references import Case, check_logits, check_lora_gradients, load_case, logsumexp
from tests.kernels.cpu_weights import all_variants
from tests.model_support import (
    build_backend,
    build_kernels,
    engine_for,
    gradients,
    load_model,
    mean_nll,
    reference_factors,
    relative_gap,
)

VARIANTS = all_variants()
"""Instruction sets that this machine can run."""
FLOAT32 = next(variant for variant in VARIANTS if variant not in TILE_VARIANTS)
BFLOAT16 = [variant for variant in VARIANTS if variant in TILE_VARIANTS]
CLOSENESS = {"amx": (1e-4, 1e-2, 2e-2), "amx-bf16": (0.1, 3e-2, 8e-2)}
"""Of the divergence of llama.cpp at most so much; median and worst gap of a gradient, relative in norm."""


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_case(request: pytest.FixtureRequest, name: str, variant: str) -> Case:
    backend = build_backend("cpu", kernels=variant)
    path, references = request.getfixturevalue(f"{name}_path"), request.getfixturevalue("shared_ref")
    return load_case(name, path, references, backend, build_kernels(backend))


@pytest.fixture(scope="module")
def float32(request: pytest.FixtureRequest, name: str) -> Case:
    return make_case(request, name, FLOAT32)


def test_float32_logits(float32: Case) -> None:
    check_logits(float32, tolerance=1e-3, margin=3e-3)


def test_float32_gradients(float32: Case) -> None:
    check_lora_gradients(float32, tolerance=1e-3, loss_tolerance=1e-4)


@pytest.mark.parametrize("variant", BFLOAT16)
def test_bfloat16_is_closer_than_llamacpp(
    request: pytest.FixtureRequest, float32: Case, name: str, variant: str
) -> None:
    case = make_case(request, name, variant)
    ids = case.logits["p32.ids"].astype(np.int32)
    exact, rounded = (_base_log_softmax(c.model, ids) for c in (float32, case))
    divergence = float((np.exp(exact) * (exact - rounded)).sum(axis=1).mean())
    share, median, worst = CLOSENESS[variant]
    assert divergence < share * float(case.logits["p32.llamacpp_mean_kl"])

    references = case.gradients
    parameters = attach_factors(case.model, reference_factors(case.model), scale=2.0)
    sequence = whole_sequence(references["ids"].astype(np.int32))
    [step] = plan_epoch([sequence.predicts], [0], micro_batch=64, gradient_accumulation=1)
    stats = engine_for(case.model).train_step(step, [sequence], mean_nll, 64.0)
    assert stats.loss == pytest.approx(float(references["loss"]), abs=1e-3 if variant == "amx" else 1e-2)
    found = {p.name: np.asarray(p.grad, dtype=np.float64) for p in parameters}
    gaps = [
        relative_gap(found, {key.replace(".grad_", ".weight."): references[key]})
        for key in references.files
        if ".grad_" in key
    ]
    assert np.median(gaps) < median
    assert max(gaps) < worst


def _base_log_softmax(model: CausalLM, ids: Any) -> Any:
    with model.without_adapter():
        logits = engine_for(model).logits(ids).astype(np.float64)
    return logits - logsumexp(logits)[:, None]


@pytest.fixture(scope="module", params=[(v, a) for v in VARIANTS for a in ("llama", "gemma3")], ids=str)
def tiny(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> CausalLM:
    variant, architecture = request.param
    backend = build_backend("cpu", kernels=variant)
    return load_model(tiny_model(architecture=architecture, format="Q8_0"), backend, build_kernels(backend))


def some_sequences(model: CausalLM) -> list[Any]:
    rng = np.random.default_rng(3)
    return [
        whole_sequence(rng.integers(0, model.spec.vocabulary_size, n).astype(np.int32))
        for n in (37, 5, 50, 18)
    ]


def test_packing_changes_no_bit_of_a_log_probability(tiny: CausalLM) -> None:
    sequences = some_sequences(tiny)
    packed = engine_for(tiny, micro_batch=128).log_probabilities(sequences)
    for sequence, together in zip(sequences, packed, strict=True):
        [alone] = engine_for(tiny, micro_batch=64).log_probabilities([sequence])
        assert (alone == together).all()


def test_cutting_changes_no_bit_of_a_log_probability(tiny: CausalLM) -> None:
    sequences = some_sequences(tiny)
    whole = engine_for(tiny, micro_batch=64).log_probabilities(sequences)
    cut = engine_for(tiny, micro_batch=16).log_probabilities(sequences)
    for one, other in zip(whole, cut, strict=True):
        assert (one == other).all()


def test_decoding_repeats_the_training_forward_bit_for_bit(tiny: CausalLM) -> None:
    prompts = [sequence.tokens for sequence in some_sequences(tiny)[:2]]
    for slots, pass_tokens in ((1, 64), (2, 9)):
        sampler = RecordingSampler()
        requests = [
            GenerationRequest(prompt=p, params=SamplingParams(max_new_tokens=6), stream=i)
            for i, p in enumerate(prompts)
        ]
        done = Generator(model=tiny, sampler=sampler, ctx=64, slots=slots, pass_tokens=pass_tokens).generate(
            requests
        )
        seen = {row.tobytes() for row in sampler.logits}
        for prompt, completion in zip(prompts, done, strict=True):
            logits = engine_for(tiny).logits(np.concatenate([prompt, completion.tokens[:-1]]))
            for row in logits[len(prompt) - 1 :]:
                assert row.tobytes() in seen


def test_gradients_repeat_and_checkpointing_changes_no_bit(tiny: CausalLM) -> None:
    parameters = attach_factors(tiny, random_factors(tiny, rank=4), scale=0.5)
    sequences = some_sequences(tiny)
    settings: dict[str, Any] = {"micro_batch": 40, "gradient_accumulation": 2}
    loss, first = gradients(tiny, parameters, sequences, **settings)
    for extra in ({}, {"gradient_checkpointing": True, "checkpoint_every_n_layers": 1}):
        again, second = gradients(tiny, parameters, sequences, **settings, **extra)
        assert again == loss
        assert all((second[key] == value).all() for key, value in first.items())


def test_float64_gives_the_same_gradients(tiny: CausalLM) -> None:
    backend = build_backend("reference")
    exact = load_model(tiny.file.path, backend, build_kernels(backend))
    sequences = some_sequences(tiny)
    settings: dict[str, Any] = {"micro_batch": 20, "gradient_accumulation": 3}
    results = []
    for model in (tiny, exact):
        parameters = attach_factors(model, random_factors(model, rank=4), scale=0.5)
        results.append(gradients(model, parameters, sequences, **settings))
    loss, gradient = {"amx": (1e-4, 2e-2), "amx-bf16": (1e-2, 8e-2)}.get(
        tiny.kernels.serving("matmul", "Q8_0").variant, (1e-5, 1e-3)
    )
    assert results[0][0] == pytest.approx(results[1][0], rel=loss)
    assert relative_gap(results[0][1], results[1][1]) < gradient


def test_nothing_is_allocated_in_the_steady_state(tiny: CausalLM) -> None:
    parameters = attach_factors(tiny, random_factors(tiny, rank=4), scale=0.5)
    settings: dict[str, Any] = {"micro_batch": 40, "gradient_accumulation": 2, "kv_dtype": "f16"}
    gradients(tiny, parameters, some_sequences(tiny), **settings)
    before = tiny.workspace.allocations
    gradients(tiny, parameters, some_sequences(tiny)[::-1], **settings)
    assert tiny.workspace.allocations == before
