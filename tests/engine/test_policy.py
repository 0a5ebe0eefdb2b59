"""The policy: many callers, kept caches, and the same tokens whatever else is in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from retrograd.engine import EngineSettings, GenerationRequest, Generator, TrainingEngine, TrainingSequence
from retrograd.engine.policy import Policy, generation_slots
from retrograd.nn import CausalLM
from retrograd_hookspecs import RolloutError, SamplingParams
from retrograd_plugins.samplers.default import DefaultSampler
from tests.model_support import build_backend, build_kernels, load_model

ARCHITECTURES = ["llama", "gemma3", "qwen2", "qwen3"]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> CausalLM:
    backend = build_backend("cpu")
    return load_model(tiny_model(architecture=request.param, format="Q8_0"), backend, build_kernels(backend))


def settings(micro_batch: int = 64) -> EngineSettings:
    return EngineSettings(micro_batch=micro_batch, gradient_accumulation=4, kv_dtype="compute")


def policy_of(model: CausalLM, **options: Any) -> Policy:
    keys: dict[str, Any] = {"ctx": 96, "slots": 4, "head_plan": settings().head_plan(), **options}
    slot_tokens = keys.pop("slot_tokens", 96)
    return Policy(Generator(model=model, sampler=DefaultSampler(), **keys), slot_tokens=slot_tokens)


def prompts(model: CausalLM, *lengths: int, seed: int = 4) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.spec.vocabulary_size, n).astype(np.int32) for n in lengths]


def request_for(prompt: Any, count: int = 8, stream: int = 0, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt, params=SamplingParams(max_new_tokens=count, seed=9, **params), stream=stream
    )


@pytest.mark.parametrize("seed", range(3))
def test_log_probabilities_are_those_of_the_training_forward_bit_for_bit(model: CausalLM, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shared = prompts(model, int(rng.integers(1, 20)), seed=seed)[0]
    requests = []
    for number in range(6):
        own = prompts(model, int(rng.integers(1, 12)), seed=100 * seed + number)[0]
        prompt = np.concatenate([shared, own]) if rng.random() < 0.7 else own
        requests.append(request_for(prompt, int(rng.integers(1, 24)), number, temperature=0.8, top_p=0.9))
    policy = policy_of(model, slots=int(rng.integers(1, 7)), pass_tokens=int(rng.integers(1, 40)))
    order = rng.permutation(len(requests))
    done = policy.generate_all([requests[i] for i in order])
    micro_batch = int(rng.integers(2, 40))
    engine = TrainingEngine(model, None, settings(micro_batch))
    sequences = []
    for index, answer in zip(order, done, strict=True):
        prompt = np.asarray(requests[index].prompt)
        tokens = np.concatenate([prompt, answer.tokens])
        sequences.append(TrainingSequence(tokens=tokens, trained=np.arange(tokens.size) >= prompt.size))
    scored = engine.log_probabilities(sequences)
    for answer, logp in zip(done, scored, strict=True):
        assert (answer.logp == logp.astype(np.float64)).all()


@pytest.mark.parametrize("fast", [False, True])
def test_tokens_do_not_depend_on_concurrency(model: CausalLM, fast: bool) -> None:
    lengths = (5, 17, 5, 9, 1, 30, 12, 3, 22, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8)
    requests = [request_for(p, 10, i) for i, p in enumerate(prompts(model, *lengths))]
    expected = policy_of(model, slots=1, fast=fast).generate_all(requests)
    for slots, pass_tokens in ((3, 512), (20, 7)):
        done = policy_of(model, slots=slots, fast=fast, pass_tokens=pass_tokens).generate_all(requests)
        for first, second in zip(expected, done, strict=True):
            assert first.tokens.tolist() == second.tokens.tolist()
            assert (first.logp == second.logp).all()


def evaluated_tokens(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    lengths: list[int] = []
    forward = model.forward

    def counted(batch: Any, store: Any = None) -> Any:
        lengths.append(batch.length)
        return forward(batch, store)

    monkeypatch.setattr(model, "forward", counted)
    return lengths


def test_a_session_evaluates_only_what_is_new(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(model)
    [first, framing] = prompts(model, 20, 5)

    async def turns(session: object) -> tuple[Any, Any, list[int]]:
        async with policy.serving():
            one = await policy.generate(request_for(first, 6, 1), session)
            again = np.concatenate([first, one.tokens, framing])
            lengths = evaluated_tokens(model, monkeypatch)
            two = await policy.generate(request_for(again, 6, 2), session)
        return one, two, lengths

    one, two, lengths = anyio.run(turns, "a")
    # The last drawn token was never evaluated; five of framing, and the answer's tokens but the last.
    assert sum(lengths) == 1 + 5 + 5
    policy.end_session("a")
    policy.weights_changed()
    monkeypatch.undo()
    again = np.concatenate([first, one.tokens, framing])
    [anew] = policy_of(model).generate_all([request_for(again, 6, 2)])
    assert two.tokens.tolist() == anew.tokens.tolist()
    assert (two.logp == anew.logp).all()


def test_changed_weights_empty_the_caches(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(model)
    [prompt] = prompts(model, 20)
    policy.generate_all([request_for(prompt, 2)])
    lengths = evaluated_tokens(model, monkeypatch)
    policy.generate_all([request_for(prompt, 2)])
    assert sum(lengths) == 2  # the last token of the prompt, and one drawn token
    policy.weights_changed()
    lengths.clear()
    policy.generate_all([request_for(prompt, 2)])
    assert sum(lengths) == 21


def test_many_callers_share_passes(model: CausalLM) -> None:
    policy = policy_of(model, slots=8)
    requests = [request_for(p, 12, i) for i, p in enumerate(prompts(model, *range(3, 15)))]
    expected = policy.generate_all(requests)
    policy.take_stats()
    found: dict[int, Any] = {}

    async def call(number: int) -> None:
        found[number] = await policy.generate(requests[number])

    async def all_of_them() -> None:
        async with policy.serving(), anyio.create_task_group() as group:
            for number in reversed(range(len(requests))):
                group.start_soon(call, number)

    anyio.run(all_of_them)
    for number, answer in enumerate(expected):
        assert found[number].tokens.tolist() == answer.tokens.tolist()
    stats = policy.take_stats()
    assert stats["generation/tokens"] == 12 * 12
    assert stats["generation/batch_mean"] > 4


def test_a_cancelled_call_gives_its_place_to_others(model: CausalLM) -> None:
    policy = policy_of(model, slots=1)
    long, short = prompts(model, 4, 4)
    finished: list[str] = []

    async def endless() -> None:
        with anyio.move_on_after(0.02):
            await policy.generate(request_for(long, 92), "held")
        policy.end_session("held")
        finished.append("cancelled")

    async def both() -> None:
        async with policy.serving(), anyio.create_task_group() as group:
            group.start_soon(endless)
            await anyio.sleep(0)
            await policy.generate(request_for(short, 3))
            finished.append("short")

    anyio.run(both)
    assert sorted(finished) == ["cancelled", "short"]
    assert [d.tokens.size for d in policy.generate_all([request_for(short, 3)])] == [3]


def test_sessions_that_wait_keep_their_place(model: CausalLM) -> None:
    """More sessions than slots: a second turn goes first, newcomers wait until a place is given back."""
    policy = policy_of(model, slots=2)
    order: list[str] = []

    async def play(name: str, prompt: Any) -> None:
        tokens = prompt
        for turn in range(3):
            answer = await policy.generate(request_for(tokens, 4, turn), name)
            tokens = np.concatenate([tokens, answer.tokens])
            await anyio.sleep(0.001)
        order.append(name)
        policy.end_session(name)

    async def game() -> None:
        async with policy.serving(), anyio.create_task_group() as group:
            for name, prompt in zip("abcdef", prompts(model, 5, 6, 7, 8, 9, 10), strict=True):
                group.start_soon(play, name, prompt)

    anyio.run(game)
    assert sorted(order) == list("abcdef")


def test_what_cannot_be_is_refused(model: CausalLM) -> None:
    policy = policy_of(model, slot_tokens=16)
    [prompt] = prompts(model, 10)
    with pytest.raises(RolloutError, match="exceed the context of 16 tokens"):
        policy.generate_all([request_for(prompt, 7)])

    async def outside() -> None:
        await policy.generate(request_for(prompt, 2))

    async def too_long() -> None:
        async with policy.serving():
            await policy.generate(request_for(prompt, 7))

    with pytest.raises(RolloutError, match="outside"):
        anyio.run(outside)
    with pytest.raises(RolloutError, match="exceed the context"):
        anyio.run(too_long)
    assert policy.generate_all([request_for(prompt, 6)])[0].tokens.size == 6


def test_a_pass_that_fails_is_heard_by_everyone_in_flight(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(model)
    errors: list[str] = []
    forward = model.forward

    def broken(batch: Any, store: Any = None) -> Any:
        raise RolloutError("no")

    async def call(prompt: Any) -> None:
        try:
            await policy.generate(request_for(prompt, 4))
        except RolloutError as error:
            errors.append(str(error))

    async def all_of_them() -> None:
        async with policy.serving():
            async with anyio.create_task_group() as group:
                for prompt in prompts(model, 4, 5):
                    group.start_soon(call, prompt)
            monkeypatch.setattr(model, "forward", forward)
            await policy.generate(request_for(prompts(model, 4)[0], 4))

    monkeypatch.setattr(model, "forward", broken)
    anyio.run(all_of_them)
    assert errors == ["no", "no"]


@pytest.mark.parametrize("pass_fails", [False, True])
def test_a_call_given_up_during_the_last_pass_leaves_nothing_behind(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, pass_fails: bool
) -> None:
    """The pass ends when nobody listens any more; the weights may change then."""
    policy = policy_of(model, slots=2)
    inside, go_on = threading.Event(), threading.Event()
    forward = model.forward

    def slow(batch: Any, store: Any = None) -> Any:
        inside.set()
        assert go_on.wait(20)
        if pass_fails:
            raise RolloutError("no")
        return forward(batch, store)

    async def call(scope: anyio.CancelScope, prompt: Any) -> None:
        with scope:
            await policy.generate(request_for(prompt, 40), "session")
        policy.end_session("session")

    async def given_up() -> None:
        scope = anyio.CancelScope()
        async with policy.serving():
            async with anyio.create_task_group() as group:
                group.start_soon(call, scope, prompts(model, 4)[0])
                await anyio.to_thread.run_sync(inside.wait)
                scope.cancel()
            go_on.set()
            if pass_fails:
                await anyio.sleep(0.05)
                monkeypatch.setattr(model, "forward", forward)
                await policy.generate(request_for(prompts(model, 5)[0], 2))

    monkeypatch.setattr(model, "forward", slow)
    anyio.run(given_up)
    monkeypatch.setattr(model, "forward", forward)
    policy.weights_changed()
    assert policy.generate_all([request_for(prompts(model, 4)[0], 3)])[0].tokens.size == 3


def test_a_failed_pass_spares_calls_that_were_not_in_it(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(model)
    inside, go_on = threading.Event(), threading.Event()
    forward = model.forward
    ends: dict[str, str] = {}

    def broken(batch: Any, store: Any = None) -> Any:
        inside.set()
        assert go_on.wait(20)
        monkeypatch.setattr(model, "forward", forward)
        raise RolloutError("no")

    async def call(name: str, prompt: Any) -> None:
        try:
            ends[name] = str((await policy.generate(request_for(prompt, 4))).tokens.size)
        except RolloutError as error:
            ends[name] = str(error)

    async def both() -> None:
        first, second = prompts(model, 4, 5)
        async with policy.serving(), anyio.create_task_group() as group:
            group.start_soon(call, "in flight", first)
            await anyio.to_thread.run_sync(inside.wait)
            group.start_soon(call, "new", second)
            await anyio.sleep(0.01)
            go_on.set()

    monkeypatch.setattr(model, "forward", broken)
    anyio.run(both)
    assert ends == {"in flight": "no", "new": "4"}


def test_generation_slots() -> None:
    assert generation_slots(None) == 16
    assert generation_slots(3) == 3
