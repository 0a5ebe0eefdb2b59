"""The model as a sampler for many callers: what rollouts generate with.

::

    policy = Policy(generator, slot_tokens=1024)
    async with policy.serving():
        async with anyio.create_task_group() as group:
            for trajectory in trajectories:
                group.start_soon(play, policy, trajectory)   # each awaits policy.generate(...)

All calls that wait are decoded together by continuous batching in one worker thread. What a call draws does
not depend on which others are in flight.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import attrs
import numpy as np

from retrograd_hookspecs import RolloutError

from .generation import FEW_ROWS, Completion, DecodingBatch, GenerationRequest, GenerationStats, Generator

OnDone = Callable[[int, Completion], None]
"""Called for every finished answer with the request's number."""


@attrs.define(eq=False)
class _Call:
    request: GenerationRequest
    session: object
    done: anyio.Event = attrs.field(factory=anyio.Event)
    result: Completion | BaseException | None = None


class Policy:
    """Generates with one model, in slots that are kept from call to call until the weights change.

    Args:
        generator: the model, its sampler, and how it decodes.
        slot_tokens: most tokens of a sequence, its answers included.
    """

    def __init__(self, generator: Generator, *, slot_tokens: int) -> None:
        self.slots = generator.slots
        self.slot_tokens = min(slot_tokens, generator.ctx)
        self._generator = generator
        self._batch: DecodingBatch | None = None
        self._calls: dict[int, _Call] = {}
        self._new: list[int] = []
        self._cancelled: list[int] = []
        self._ended: list[object] = []
        self._next = 0
        self._wake = anyio.Event()
        self._serving = False
        self._seconds = 0.0

    def fit(self, sequences: int, tokens: int) -> None:
        """Take no more memory than `sequences` at once of at most `tokens` tokens need."""
        self.slots = min(self.slots, max(sequences, 1))
        self.slot_tokens = min(self.slot_tokens, tokens)
        self._batch = None

    def generate_all(
        self,
        requests: Sequence[GenerationRequest],
        on_done: OnDone | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """Answers in the order of the requests, without an event loop.

        `check` is called before every pass; what it raises gives all requests up.

        Raises: `RolloutError` for a request that does not fit `slot_tokens`.
        """
        batch = self._decoding_batch()
        for number, request in enumerate(requests):
            batch.submit(number, request)
        done: dict[int, Completion] = {}
        started = time.perf_counter()
        try:
            while batch.busy:
                if check is not None:
                    check()
                for number, completion in batch.step():
                    done[number] = completion
                    if on_done is not None:
                        on_done(number, completion)
        except BaseException:
            for number in range(len(requests)):
                batch.cancel(number)
            raise
        finally:
            self._seconds += time.perf_counter() - started
        return [done[number] for number in range(len(requests))]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Policy]:
        """Answer calls of `generate` while the block lasts; calls that are open at its end are cancelled."""
        if self._serving:
            raise RolloutError("the policy is serving already")
        self._serving = True
        failure: Exception | None = None
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._serve)
                try:
                    yield self
                except Exception as error:  # raised below, outside of the task group, which would wrap it
                    failure = error
                finally:
                    group.cancel_scope.cancel()
            if failure is not None:
                raise failure
        finally:
            self._serving = False
            batch = self._decoding_batch()
            for number in (*self._calls, *self._cancelled):
                batch.cancel(number)
            for session in self._ended:
                batch.end_session(session)
            self._calls.clear()
            self._new.clear()
            self._cancelled.clear()
            self._ended.clear()

    async def generate(self, request: GenerationRequest, session: object = None) -> Completion:
        """Continue a prompt. May be cancelled.

        `session`: any key; a later call with the same key whose prompt goes on where this one's answer ended
        evaluates only what is new. `end_session` gives the place back, which others may be waiting for.

        Raises: `RolloutError` if the request does not fit, or outside `serving()`.
        """
        if not self._serving:
            raise RolloutError("policy.generate was awaited outside `async with policy.serving()`")
        number, self._next = self._next, self._next + 1
        call = _Call(request, session)
        self._calls[number] = call
        self._new.append(number)
        self._wake.set()
        try:
            await call.done.wait()
        finally:
            if self._calls.pop(number, None) is not None and call.result is None:
                self._cancelled.append(number)
                self._wake.set()
        if isinstance(call.result, BaseException):
            raise call.result
        assert call.result is not None
        return call.result

    def end_session(self, session: object) -> None:
        """Give the place of a session back."""
        if self._serving:
            self._ended.append(session)
            self._wake.set()
        else:
            self._decoding_batch().end_session(session)

    def cache_bytes(self) -> int:
        """Memory of the cache and of the logits of a pass, whether they are made yet or not."""
        generator, spec = self._generator, self._generator.model.spec
        compute = generator.model.backend.compute_dtype
        item = np.dtype(generator.kv_dtype).itemsize if generator.kv_dtype is not None else compute.itemsize
        rows = self.slots * self.slot_tokens * spec.block_count
        logits = self.slots * spec.vocabulary_size * compute.itemsize
        return int(rows * 2 * spec.head_count_kv * spec.head_length * item + logits)

    def weights_changed(self) -> None:
        """Forget all cached keys and values. Call it after every change of the weights."""
        if self._batch is not None:
            self._batch.forget()

    def take_stats(self) -> dict[str, float]:
        """`generation/*` metrics since the last call."""
        batch = self._decoding_batch()
        stats, batch.stats = batch.stats, GenerationStats()
        seconds, self._seconds = self._seconds, 0.0
        prompt = stats.prompt_tokens + stats.cached_tokens
        return {
            "generation/tokens": float(stats.new_tokens),
            "generation/prompt_tokens": float(stats.prompt_tokens),
            "generation/cached_tokens": float(stats.cached_tokens),
            "generation/cached_fraction": stats.cached_tokens / max(prompt, 1),
            "generation/batch_mean": stats.decode_rows / max(stats.decode_passes, 1),
            "generation/tokens_per_second": stats.new_tokens / max(seconds, 1e-9),
            "timing/generation_seconds": seconds,
        }

    async def _serve(self) -> None:
        batch = self._decoding_batch()
        while True:
            self._hand_over(batch)
            if not batch.busy:
                await self._wake.wait()
                self._wake = anyio.Event()
                continue
            started = time.perf_counter()
            try:
                finished = await anyio.to_thread.run_sync(batch.step)
            except Exception as error:
                self._fail(batch, error)
                continue
            finally:
                self._seconds += time.perf_counter() - started
            for number, completion in finished:
                self._finish(number, completion)

    def _hand_over(self, batch: DecodingBatch) -> None:
        """What callers asked for since the last pass; the batch belongs to the thread while it runs."""
        for number in self._cancelled:
            batch.cancel(number)
        for session in self._ended:
            batch.end_session(session)
        self._cancelled.clear()
        self._ended.clear()
        new, self._new = self._new, []
        for number in new:
            call = self._calls.get(number)
            if call is None:
                continue
            try:
                batch.submit(number, call.request, call.session)
            except RolloutError as error:
                self._finish(number, error)

    def _finish(self, number: int, result: Completion | BaseException) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.result = result
            call.done.set()

    def _fail(self, batch: DecodingBatch, error: Exception) -> None:
        """A pass failed: everyone whose sequence was in flight hears of it."""
        for number in self._cancelled:  # given up while the pass ran
            batch.cancel(number)
        self._cancelled.clear()
        for number in set(self._calls).difference(self._new):
            batch.cancel(number)
            self._finish(number, error)
        batch.forget()

    def _decoding_batch(self) -> DecodingBatch:
        if self._batch is None:
            self._batch = self._generator.batch(slots=self.slots, slot_tokens=self.slot_tokens)
        return self._batch


def generation_slots(wanted: int | None) -> int:
    """Sequences decoded at once: `training.generation_concurrency`, else what a decoding pass takes."""
    return wanted or FEW_ROWS
