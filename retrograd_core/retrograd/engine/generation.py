"""Generation with a key/value cache, several sequences at a time.

A pass holds one token of each sequence that decodes and, in what room is left, pieces of prompts: sequences
join and leave between any two passes. A token's logits do not depend on the others in its pass; with a cache
in the compute dtype they are those of the training forward bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from retrograd.nn.attention import KeyValueStore
from retrograd.nn.batch import PassBatch, Run, build_pass
from retrograd.nn.model import CausalLM
from retrograd_hookspecs import RolloutError, Sampler, SamplingParams

FinishReason = Literal["stop", "length"]
FEW_ROWS = 16
"""Tokens of a pass up to which `fast` decoding multiplies with `matmul_few`: where it was measured to be
the faster op."""

OnToken = Callable[[int, int, float], None]
"""Called for every new token with the sequence's number, the token and its log-probability."""


@attrs.frozen(eq=False, kw_only=True)
class GenerationRequest:
    """A sequence to continue. Its random numbers are a function of (params.seed, stream) alone."""

    prompt: Sequence[int] | npt.NDArray[np.int32]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    stream: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and the longest answer."""
        return len(self.prompt) + self.params.max_new_tokens


@attrs.frozen(eq=False, kw_only=True)
class Completion:
    """What was generated, a stop token included. `logp` float64 (n,) under the sampled distribution."""

    tokens: npt.NDArray[np.int32]
    logp: npt.NDArray[np.float64]
    finish: FinishReason


@attrs.define(eq=False)
class _Sequence:
    number: int
    request: GenerationRequest
    rng: np.random.Generator
    row: int
    pending: npt.NDArray[np.int32]
    """Tokens that are not in the cache yet: what is left of the prompt, then the newest token."""
    position: int = 0
    """Tokens in the cache."""
    tokens: list[int] = attrs.field(factory=list)
    logp: list[float] = attrs.field(factory=list)
    followers: list[_Sequence] = attrs.field(factory=list)
    """Sequences with the same prompt that wait for this one to evaluate it."""

    @property
    def leads(self) -> bool:
        """True while the prompt is being evaluated."""
        return not self.tokens and self.pending.size > 0


class DecodingBatch:
    """Sequences that decode together in the slots of one cache. A model serves one such batch at a time:
    its cache lies in the model's workspace, as do the arrays of training.

    Args:
        slots: sequences in flight at once; more wait for a free slot.
        slot_tokens: cache rows of a slot: the longest prompt with its answer.
        pass_tokens: most tokens of one pass, at least `slots`.
        kv_dtype: type of cached keys and values; None is the compute dtype.
        fast: passes of few tokens may round activations (`matmul_few`); log-probabilities are then close to
            those of training, not equal.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        *,
        slots: int,
        slot_tokens: int,
        pass_tokens: int = 512,
        kv_dtype: npt.DTypeLike | None = None,
        fast: bool = False,
    ) -> None:
        self._model = model
        self._fast = fast
        self._sampler = sampler
        self._slot_tokens = slot_tokens
        self._pass_tokens = max(pass_tokens, slots)
        self._cache = model.new_cache("generation_kv", kv_dtype)
        self._cache.reserve(slots * slot_tokens, 0)
        self._rows = model.workspace.scope("generation")
        self._free = [slot * slot_tokens for slot in reversed(range(slots))]
        self._waiting: deque[tuple[int, GenerationRequest]] = deque()
        self._active: list[_Sequence] = []

    def submit(self, number: int, request: GenerationRequest) -> None:
        """Add a sequence under a number of the caller's choice.

        Raises `RolloutError` for an empty prompt, or one that does not fit a slot with its answer.
        """
        if not len(request.prompt) or request.params.max_new_tokens < 1:
            raise RolloutError(
                f"sequence {number}: a prompt of {len(request.prompt)} tokens and max_new_tokens ="
                f" {request.params.max_new_tokens}; both must be at least 1"
            )
        if request.total_tokens > self._slot_tokens:
            raise RolloutError(
                f"sequence {number}: {len(request.prompt)} tokens of prompt and max_new_tokens ="
                f" {request.params.max_new_tokens} exceed the context of {self._slot_tokens} tokens;"
                " shorten the prompt, lower max_new_tokens or raise training.ctx"
            )
        self._waiting.append((number, request))

    @property
    def busy(self) -> bool:
        """True while a sequence is active or waits."""
        return bool(self._active or self._waiting)

    def step(self, on_token: OnToken | None = None) -> list[tuple[int, Completion]]:
        """Run one pass; returns the sequences that ended with it."""
        self._admit()
        fed = self._choose()
        runs = [Run(tokens=s.pending[:count], start=s.position, row=s.row) for s, count in fed]
        batch = build_pass(runs, self._model.backend, cache_rows=self._cache.rows)
        few = self._fast and batch.length <= FEW_ROWS
        with self._model.few_rows() if few else nullcontext():
            return self._evaluate(batch, fed, on_token)

    def _evaluate(
        self, batch: PassBatch, fed: list[tuple[_Sequence, int]], on_token: OnToken | None
    ) -> list[tuple[int, Completion]]:
        hidden = self._model.forward(batch, KeyValueStore(cache=self._cache))
        ready: list[_Sequence] = []
        last_rows: list[int] = []
        row = 0
        for sequence, count in fed:
            row += count
            sequence.position += count
            sequence.pending = sequence.pending[count:]
            if not sequence.pending.size:
                ready.append(sequence)
                last_rows.append(row - 1)
                self._release_followers(sequence)
        if not ready:
            return []
        logits = self._logits(hidden, last_rows)
        return [done for s, z in zip(ready, logits, strict=True) if (done := self._advance(s, z, on_token))]

    def _admit(self) -> None:
        """Give free slots to waiting sequences. Equal prompts are evaluated once."""
        leaders = {s.pending.tobytes(): s for s in self._active if s.leads and not s.position}
        while self._waiting and self._free:
            number, request = self._waiting.popleft()
            sequence = _Sequence(
                number=number,
                request=request,
                rng=np.random.default_rng([request.params.seed, request.stream]),
                row=self._free.pop(),
                pending=np.asarray(request.prompt, dtype=np.int32),
            )
            leader = leaders.setdefault(sequence.pending.tobytes(), sequence)
            if leader is not sequence:
                sequence.pending = sequence.pending[:0]
                leader.followers.append(sequence)
            self._active.append(sequence)

    def _release_followers(self, leader: _Sequence) -> None:
        """Copy the keys and values of the prompt to the sequences that share it. Each evaluates the last
        token of the prompt itself, and has its own logits from that."""
        prompt = np.asarray(leader.request.prompt, dtype=np.int32)
        for follower in leader.followers:
            self._cache.copy_rows(leader.row, follower.row, prompt.size - 1)
            follower.position = prompt.size - 1
            follower.pending = prompt[-1:]
        leader.followers = []

    def _choose(self) -> list[tuple[_Sequence, int]]:
        """The sequences of the next pass and how many tokens of each: decoding ones first."""
        room = self._pass_tokens
        chosen: list[tuple[_Sequence, int]] = []
        for sequence in sorted(self._active, key=lambda s: len(s.tokens) == 0):
            count = min(room, sequence.pending.size)
            if count:
                chosen.append((sequence, count))
                room -= count
        return chosen

    def _logits(self, hidden: Any, rows: list[int]) -> npt.NDArray[Any]:
        """Logits (n, V) of some rows of the pass, on the host."""
        spec = self._model.spec
        x = self._rows.get("x", (len(rows), spec.embedding_length))
        for index, row in enumerate(rows):
            x[index : index + 1] = hidden[row : row + 1]
        out = self._rows.get("logits", (len(rows), spec.vocabulary_size))
        self._model.head.logits(x, out)
        return self._model.backend.to_host(out)

    def _advance(
        self, sequence: _Sequence, logits: npt.NDArray[Any], on_token: OnToken | None
    ) -> tuple[int, Completion] | None:
        """Sample the next token; the finished sequence, or None if it goes on."""
        request = sequence.request
        token, logp = self._sampler.sample(logits, request.params, sequence.rng)
        sequence.tokens.append(token)
        sequence.logp.append(logp)
        if on_token is not None:
            on_token(sequence.number, token, logp)
        stopped = token in request.stop_ids
        if not stopped and len(sequence.tokens) < request.params.max_new_tokens:
            sequence.pending = np.array([token], dtype=np.int32)
            return None
        self._active.remove(sequence)
        self._free.append(sequence.row)
        return sequence.number, Completion(
            tokens=np.array(sequence.tokens, dtype=np.int32),
            logp=np.array(sequence.logp, dtype=np.float64),
            finish="stop" if stopped else "length",
        )


@attrs.frozen(eq=False, kw_only=True)
class Generator:
    """Answers requests with a model. `slots` sequences at a time, at most `ctx` tokens each."""

    model: CausalLM
    sampler: Sampler
    ctx: int
    slots: int = 1
    pass_tokens: int = 512
    kv_dtype: npt.DTypeLike | None = None
    fast: bool = False

    def generate(
        self, requests: Sequence[GenerationRequest], on_token: OnToken | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; `on_token` sees each token as it is drawn.

        Raises `RolloutError` for a request that does not fit `ctx`.
        """
        if not requests:
            return []
        longest = max(request.total_tokens for request in requests)
        batch = DecodingBatch(
            self.model,
            self.sampler,
            slots=min(self.slots, len(requests)),
            slot_tokens=min(longest, self.ctx),
            pass_tokens=self.pass_tokens,
            kv_dtype=self.kv_dtype,
            fast=self.fast,
        )
        for number, request in enumerate(requests):
            batch.submit(number, request)
        done: dict[int, Completion] = {}
        while batch.busy:
            done.update(batch.step(on_token))
        return [done[number] for number in range(len(requests))]
