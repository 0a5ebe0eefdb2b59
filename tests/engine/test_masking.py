"""Constraints: masks before the sampler's filters, log-probabilities of the policy, nothing for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from retrograd.engine import Completion, GenerationRequest, Generator
from retrograd.nn import CausalLM
from retrograd_hookspecs import SamplingParams
from retrograd_plugins.samplers.default import DefaultSampler
from tests.model_support import build_backend, build_kernels, engine_for, load_model

COUNT = 10
NEUTRAL: dict[str, Any] = {}
PARAMS = [
    NEUTRAL,
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 2},
    {"top_p": 0.3},
    {"min_p": 0.5, "temperature": 2.0},
]


@attrs.define
class Residues:
    """Token n of an answer leaves the remainder `start + n` when it is divided by 5; every fourth is free."""

    vocabulary: int
    start: int = 0
    problem: str = ""
    tokens: list[int] = attrs.field(factory=list)

    def allowed(self) -> Any:
        place = len(self.tokens)
        return None if place % 4 == 3 else np.arange(self.vocabulary) % 5 == (self.start + place) % 5

    def advance(self, token: int) -> None:
        self.tokens.append(token)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> CausalLM:
    backend = build_backend(request.param)
    return load_model(tiny_model(), backend, build_kernels(backend))


def requests(model: CausalLM, constrained: str, **params: Any) -> list[GenerationRequest]:
    """One for each character; an "x" has a constraint."""
    size = model.spec.vocabulary_size
    rng = np.random.default_rng(3)
    return [
        GenerationRequest(
            prompt=rng.integers(0, size, 4 + number).astype(np.int32),
            params=SamplingParams(max_new_tokens=COUNT, seed=9, **params),
            stream=number,
            constraint=Residues(size, number) if kind == "x" else None,
        )
        for number, kind in enumerate(constrained)
    ]


def generate(
    model: CausalLM, given: list[GenerationRequest], slots: int = 4, **keys: Any
) -> list[Completion]:
    return Generator(model=model, sampler=DefaultSampler(), ctx=64, slots=slots, **keys).generate(given)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_only_what_is_allowed_is_drawn(model: CausalLM, params: dict[str, Any]) -> None:
    """Whatever the filters would have left; the others in the batch see nothing of it."""
    given = requests(model, "x.x.", **params)
    done = generate(model, given)
    for number in (0, 2):
        tokens = done[number].tokens
        bound = [place for place in range(COUNT) if place % 4 != 3]
        assert [int(tokens[place]) % 5 for place in bound] == [(number + place) % 5 for place in bound]
        assert len(done[number].masked) == len(bound)
        assert tokens.tolist() == given[number].constraint.tokens  # type: ignore[union-attr]
    free = generate(model, requests(model, "....", **params))
    for number in (1, 3):
        assert done[number].tokens.tolist() == free[number].tokens.tolist()
        assert (done[number].logp == free[number].logp).all()
        assert done[number].masked == ()


def test_log_probabilities_are_those_of_the_policy(model: CausalLM) -> None:
    [request] = requests(model, "x")
    [done] = generate(model, [request])
    exact = engine_for(model).settings.head_plan()
    [planned] = generate(model, requests(model, "x"), head_plan=exact)
    assert planned.tokens.tolist() == done.tokens.tolist()
    sequence = np.concatenate([np.asarray(request.prompt), done.tokens[:-1]])
    logits = np.asarray(engine_for(model).logits(sequence), np.float64)[len(request.prompt) - 1 :]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    expected = np.log(p[np.arange(COUNT), done.tokens])
    np.testing.assert_allclose(done.logp, expected, rtol=1e-4)
    np.testing.assert_allclose(planned.logp, expected, rtol=1e-4)
    fits = [p[n][np.arange(p.shape[1]) % 5 == n % 5].sum() for n in range(COUNT) if n % 4 != 3]
    np.testing.assert_allclose(done.masked, 1 - np.array(fits), rtol=1e-4)


def test_tokens_do_not_depend_on_the_batch(model: CausalLM) -> None:
    together = generate(model, requests(model, "xx.x"))
    for slots in (1, 3):
        narrow = generate(model, requests(model, "xx.x"), slots=slots)
        for one, other in zip(together, narrow, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert (one.logp == other.logp).all()
            assert one.masked == other.masked


def test_a_constraint_that_allows_everything_changes_nothing(model: CausalLM) -> None:
    class Anything(Residues):
        def allowed(self) -> None:
            return None

    free = generate(model, requests(model, ".."))
    given = [attrs.evolve(request, constraint=Anything(0)) for request in requests(model, "..")]
    for one, other in zip(generate(model, given), free, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.logp == other.logp).all()
