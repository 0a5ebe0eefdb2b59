"""Generation: the same bits as the training forward, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.engine import Completion, GenerationRequest, Generator
from retrograd.engine.slots import Slots
from retrograd.nn import CausalLM
from retrograd_hookspecs import RolloutError, SamplingParams
from retrograd_plugins.samplers.default import DefaultSampler
from tests.model_support import build_backend, build_kernels, engine_for, load_model


class RecordingSampler(DefaultSampler):
    """Keeps the logits it saw, by the newest token's place in the answer."""

    def __init__(self) -> None:
        self.logits: list[Any] = []

    def sample(self, logits: Any, params: SamplingParams, rng: np.random.Generator) -> tuple[int, float]:
        self.logits.append(np.array(logits))
        return super().sample(logits, params, rng)


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> CausalLM:
    backend = build_backend("reference")
    return load_model(tiny_model(architecture=request.param), backend, build_kernels(backend))


def prompts(model: CausalLM, *lengths: int) -> list[Any]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, model.spec.vocabulary_size, n).astype(np.int32) for n in lengths]


def request_for(prompt: Any, count: int = 8, stream: int = 0, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt, params=SamplingParams(max_new_tokens=count, seed=9, **params), stream=stream
    )


def generate(model: CausalLM, requests: list[GenerationRequest], **options: Any) -> list[Completion]:
    keys: dict[str, Any] = {"ctx": 64, "sampler": DefaultSampler(), **options}
    return Generator(model=model, **keys).generate(requests)


@pytest.mark.parametrize("pass_tokens", [64, 3])
def test_logits_of_decoding_are_those_of_the_training_forward(model: CausalLM, pass_tokens: int) -> None:
    sampler = RecordingSampler()
    [prompt] = prompts(model, 11)
    [done] = generate(model, [request_for(prompt, 12)], sampler=sampler, pass_tokens=pass_tokens)
    logits = engine_for(model).logits(np.concatenate([prompt, done.tokens[:-1]]))
    for index, seen in enumerate(sampler.logits):
        assert (seen == logits[len(prompt) - 1 + index]).all()


def test_log_probabilities_are_those_of_the_neutral_distribution(model: CausalLM) -> None:
    [prompt] = prompts(model, 5)
    [done] = generate(model, [request_for(prompt)])
    logits = engine_for(model).logits(np.concatenate([prompt, done.tokens[:-1]]))[4:]
    logits -= logits.max(axis=1, keepdims=True)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(done.logp, expected[np.arange(8), done.tokens], rtol=1e-12)


def test_answers_do_not_depend_on_what_else_is_generated(model: CausalLM) -> None:
    requests = [request_for(p, count=4 + i, stream=i) for i, p in enumerate(prompts(model, 9, 1, 14, 5))]
    together = generate(model, requests, slots=4, pass_tokens=64)
    narrow = generate(model, requests, slots=2, pass_tokens=5)
    alone = [generate(model, [request])[0] for request in requests]
    for first, second, third in zip(together, narrow, alone, strict=True):
        assert first.tokens.tolist() == second.tokens.tolist() == third.tokens.tolist()
        assert (first.logp == third.logp).all()
        assert (second.logp == third.logp).all()


@pytest.mark.parametrize("pass_tokens", [64, 5])
def test_equal_prompts_are_evaluated_once_with_the_same_bits(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, pass_tokens: int
) -> None:
    [prompt, other] = prompts(model, 20, 6)
    requests = [request_for(prompt, stream=i) for i in range(4)] + [request_for(other, stream=9)]
    alone = [generate(model, [request])[0] for request in requests]
    evaluated = 0
    forward = model.forward

    def counted(batch: Any, store: Any = None) -> Any:
        nonlocal evaluated
        evaluated += batch.length
        return forward(batch, store)

    monkeypatch.setattr(model, "forward", counted)
    together = generate(model, requests, slots=5, pass_tokens=pass_tokens)
    for first, second in zip(together, alone, strict=True):
        assert first.tokens.tolist() == second.tokens.tolist()
        assert (first.logp == second.logp).all()
    answers = sum(done.tokens.size for done in together)
    # Each prompt once, whoever shares it; all but the last token of an answer.
    assert evaluated == 20 + 6 + answers - len(requests)


def test_fast_decoding_is_close_and_exact_decoding_is_what_it_was(tiny_model: Callable[..., Path]) -> None:
    backend = build_backend("cpu")
    model = load_model(tiny_model(format="Q8_0"), backend, build_kernels(backend))
    requests = [request_for(prompt, temperature=0.0) for prompt in prompts(model, 9, 5)]
    logits: dict[bool, list[Any]] = {}
    for fast in (False, True):
        sampler = RecordingSampler()
        generate(model, requests, slots=2, sampler=sampler, fast=fast)
        logits[fast] = sampler.logits
    # The first two are of the prompts, which are evaluated as in training in any case.
    assert all((logits[False][i] == logits[True][i]).all() for i in range(2))
    exact, rounded = logits[False][2], logits[True][2]
    assert 0 < np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()
    after = RecordingSampler()
    generate(model, requests, slots=2, sampler=after)
    assert all((a == b).all() for a, b in zip(after.logits, logits[False], strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_fast_answers_do_not_depend_on_who_shares_their_prompt(
    name: str, tiny_model: Callable[..., Path]
) -> None:
    """Two groups that begin alike, and one on its own; answers of several lengths, so that readers of a
    beginning leave one after another, the one whose place it is among the first."""
    backend = build_backend("cpu")
    model = load_model(tiny_model(architecture=name, format="Q8_0"), backend, build_kernels(backend))
    first, second, other = prompts(model, 30, 21, 5)
    longer = np.concatenate([first[:25], second[:9]])
    texts = [first, second, longer, first, other, second, first]
    requests = [request_for(text, count=3 + i, stream=i) for i, text in enumerate(texts)]
    options = {"fast": True, "kv_dtype": np.float16}
    alone = [generate(model, [request], **options)[0] for request in requests]
    for slots in (7, 3):
        together = generate(model, requests, slots=slots, **options)
        for found, expected in zip(together, alone, strict=True):
            assert found.tokens.tolist() == expected.tokens.tolist()
            assert (found.logp == expected.logp).all()


def test_slots_find_who_shares_a_beginning() -> None:
    slots: Slots[int] = Slots(6, 64, lambda source, target, count: None)
    beginning = np.arange(40, dtype=np.int32)
    texts = [beginning, beginning + 1, beginning[:30], beginning + 1, beginning[:17], np.arange(35, 60)]
    for number, (slot, text) in enumerate(zip(slots, texts, strict=True)):
        slot.occupant = number
        slot.extend(text.astype(np.int32), prompt=True)
        slot.extend(np.array([7], np.int32), prompt=False)
    # 17 tokens are less than half of the first prompt; drawn tokens are shared by nobody.
    assert slots.shared(list(slots)) == [(0, 30), (64, 40), (0, 30), (64, 40), (256, 0), (320, 0)]
    assert slots.shared(list(slots)[2:]) == [(128, 17), (192, 0), (128, 17), (320, 0)]


def test_streams_differ_and_seeds_repeat(model: CausalLM) -> None:
    [prompt] = prompts(model, 6)
    first, second = generate(model, [request_for(prompt, stream=i) for i in range(2)], slots=2)
    again = generate(model, [request_for(prompt, stream=1)])[0]
    assert first.tokens.tolist() != second.tokens.tolist()
    assert second.tokens.tolist() == again.tokens.tolist()


def test_stop_tokens_end_an_answer_and_are_kept(model: CausalLM) -> None:
    [prompt] = prompts(model, 6)
    [whole] = generate(model, [request_for(prompt, 8, temperature=0.0)])
    stop = int(whole.tokens[3])
    first = whole.tokens.tolist().index(stop)
    request = GenerationRequest(
        prompt=prompt, params=SamplingParams(temperature=0.0, max_new_tokens=8), stop_ids=frozenset([stop])
    )
    [cut] = generate(model, [request])
    assert cut.tokens.tolist() == whole.tokens[: first + 1].tolist()
    assert (cut.finish, whole.finish) == ("stop", "length")


def test_tokens_are_streamed_as_they_are_drawn(model: CausalLM) -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}
    requests = [request_for(p, stream=i) for i, p in enumerate(prompts(model, 4, 7))]
    done = Generator(model=model, sampler=DefaultSampler(), ctx=64, slots=2).generate(
        requests, on_token=lambda number, token, logp: seen[number].append(token)
    )
    assert [seen[i] for i in range(2)] == [d.tokens.tolist() for d in done]


def test_an_f16_cache_changes_logits_a_little(model: CausalLM) -> None:
    exact, rounded = RecordingSampler(), RecordingSampler()
    [prompt] = prompts(model, 11)
    generate(model, [request_for(prompt, 1)], sampler=exact)
    generate(model, [request_for(prompt, 1)], sampler=rounded, kv_dtype=np.float16)
    assert 0 < np.abs(exact.logits[0] - rounded.logits[0]).max() < 1e-2


def test_what_does_not_fit_is_refused(model: CausalLM) -> None:
    [prompt] = prompts(model, 60)
    with pytest.raises(RolloutError, match=r"60 tokens of prompt and max_new_tokens = 8 exceed .* 64 tokens"):
        generate(model, [request_for(prompt)])
    with pytest.raises(RolloutError, match="a prompt of 0 tokens"):
        generate(model, [request_for(prompt[:0])])
    assert generate(model, []) == []
