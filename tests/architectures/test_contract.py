"""The contract of architectures over every built-in one, and stock llama.cpp as the judge of logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrograd_plugins.architectures
from retrograd.engine import Generator
from retrograd.nn import CausalLM
from retrograd.testing.architectures import check_architecture
from retrograd.testing.models import ARCHITECTURES
from retrograd_plugins.trainables._lora_adapter import LoraAdapter, initial_factors
from tests.llamacpp.llamacpp import LlamaCpp
from tests.model_support import (
    architecture,
    build_backend,
    build_kernels,
    engine_for,
    load_model,
    plugin_modules,
)

BUILT_IN = [module.__name__.rsplit(".", 1)[1] for module in plugin_modules(retrograd_plugins.architectures)]

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_factors": True, "tied_head": False, "head_count_kv": 1}),
    ("llama", {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}}),
    ("qwen2", {}),
    ("qwen2", {"tied_head": True}),
    ("qwen3", {}),
    ("qwen3", {"metadata": {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 2.0}}),
    ("gemma3", {}),
    ("gemma3", {"metadata": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}}),
    ("gemma3", {"metadata": {"gemma3.final_logit_softcapping": 3.0}}),
]


def tiny(make: Callable[..., Path], name: str, **options: Any) -> tuple[Path, CausalLM]:
    path = make(architecture=name, **options)
    backend = build_backend("reference")
    return path, load_model(path, backend, build_kernels(backend))


def some_tokens(model: CausalLM, count: int = 40) -> Any:
    return np.random.default_rng(8).integers(0, model.spec.vocabulary_size, count).astype(np.int32)


def tolerance_of(name: str) -> float:
    """llama.cpp computes in float32, and takes GELU from a table of half-precision values."""
    return 2e-2 if name == "gemma3" else 1e-4


def test_every_architecture_with_a_tiny_model_is_offered() -> None:
    assert sorted(BUILT_IN) == sorted(ARCHITECTURES)


@pytest.mark.parametrize("name", BUILT_IN)
def test_contract(name: str, tiny_model: Callable[..., Path]) -> None:
    backend = build_backend("reference")
    check_architecture(
        architecture(name), tiny_model(architecture=name), kernels=build_kernels(backend), backend=backend
    )


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_logits_are_those_of_llamacpp(
    name: str, options: dict[str, Any], tiny_model: Callable[..., Path], llamacpp: LlamaCpp
) -> None:
    path, model = tiny(tiny_model, name, **options)
    tokens = some_tokens(model)
    expected = llamacpp.logits(path, tokens.tolist())
    found = engine_for(model).logits(tokens)
    np.testing.assert_allclose(found, expected, atol=tolerance_of(name), rtol=0)
    assert expected.std() > 1.0


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_adapter_does_there_what_it_does_here(
    name: str, tiny_model: Callable[..., Path], llamacpp: LlamaCpp, tmp_path: Path
) -> None:
    path, model = tiny(tiny_model, name)
    factors = initial_factors(model, list(model.projections), rank=4, seed=3)
    rng = np.random.default_rng(6)
    factors = {n: (a, rng.standard_normal(b.shape).astype(np.float32) * 0.1) for n, (a, b) in factors.items()}
    adapter = LoraAdapter(model, factors=factors, alpha=6.0, dtype="f32")
    adapter.save(tmp_path / "adapter.gguf")
    tokens = some_tokens(model)
    with_adapter = engine_for(model).logits(tokens)
    with model.without_adapter():
        base = engine_for(model).logits(tokens)
    assert np.abs(with_adapter - base).max() > 0.5
    expected = llamacpp.logits(path, tokens.tolist(), adapter=tmp_path / "adapter.gguf")
    np.testing.assert_allclose(with_adapter, expected, atol=tolerance_of(name), rtol=0)


def test_greedy_generation_is_that_of_llamacpp(tiny_model: Callable[..., Path], llamacpp: LlamaCpp) -> None:
    from retrograd.engine import GenerationRequest
    from retrograd_hookspecs import SamplingParams
    from retrograd_plugins.samplers.default import DefaultSampler

    path, model = tiny(tiny_model, "gemma3")
    tokens = some_tokens(model, 20)
    params = SamplingParams(temperature=0.0, max_new_tokens=16)
    [done] = Generator(model=model, sampler=DefaultSampler(), ctx=64).generate(
        [GenerationRequest(prompt=tokens, params=params)]
    )
    assert done.tokens.tolist() == llamacpp.greedy(path, tokens.tolist(), 16)
