"""Generation with a key/value cache, several sequences at a time.

Sequences lie in the slots of one cache; they join and leave between any two passes. Prompts are evaluated
in passes of their own, with the kernels of training; then a pass decodes one token of every sequence. A
token's logits do not depend on the others in its pass: with a cache in the compute dtype and without `fast`
they are those of the training forward bit for bit, and with `fast` they do not depend on what else is
decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from retrograd.nn.attention import KeyValueStore
from retrograd.nn.batch import Run, build_pass
from retrograd.nn.head import HeadPlan
from retrograd.nn.model import CausalLM
from retrograd_hookspecs import BatchSampler, RolloutError, Sampler, SamplingParams, TokenConstraint

from .masking import masked_rows, unmasked
from .slots import Slot, Slots

FinishReason = Literal["stop", "length"]
LEAST_CACHE_ROWS = 64
"""Kernels of fast decoding may not serve a cache of a few rows, and who decodes alone must not get other bits
by that."""
FEW_ROWS = 16
"""Tokens of a decoding pass with `fast`: up to so many `matmul_few` was measured to be the faster op."""

Sample = Callable[..., list[tuple[int, float]]]
"""`BatchSampler.sample_batch`."""
OnToken = Callable[[int, int, float], None]
"""Called for every new token with the sequence's number, the token and its log-probability."""


@attrs.frozen(eq=False, kw_only=True)
class GenerationRequest:
    """A sequence to continue. Its random numbers are a function of (params.seed, stream) alone.

    `constraint`: what the answer may be; one object serves one request.
    """

    prompt: Sequence[int] | npt.NDArray[np.int32]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    stream: int = 0
    constraint: TokenConstraint | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and the longest answer."""
        return len(self.prompt) + self.params.max_new_tokens


@attrs.frozen(eq=False, kw_only=True)
class Completion:
    """What was generated, a stop token included. `logp` float64 (n,): see `DecodingBatch`.

    `masked`: of the tokens that a constraint left no free choice of, the probability of all that was not
    allowed in their place.
    """

    tokens: npt.NDArray[np.int32]
    logp: npt.NDArray[np.float64]
    finish: FinishReason
    masked: tuple[float, ...] = ()


@attrs.define(kw_only=True)
class GenerationStats:
    """Counts of a decoding batch: prompt tokens evaluated, prompt tokens that were in the cache already,
    tokens drawn, decoding passes, and the rows of all of them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    decode_passes: int = 0
    decode_rows: int = 0


@attrs.define(eq=False)
class Active:
    """A request in a slot."""

    number: int
    request: GenerationRequest
    rng: np.random.Generator
    prompt: npt.NDArray[np.int32]
    tokens: list[int] = attrs.field(factory=list)
    logp: list[float] = attrs.field(factory=list)
    masked: list[float] = attrs.field(factory=list)


class DecodingBatch:
    """Sequences that decode together in the slots of one cache. A model serves one such batch at a time:
    its cache lies in the model's workspace, as do the arrays of training.

    Args:
        slots: sequences in flight at once; more wait for a free slot.
        slot_tokens: cache rows of a slot: the longest prompt with its answer.
        pass_tokens: most tokens of one prompt pass.
        kv_dtype: type of cached keys and values; None is the compute dtype.
        fast: decoding may round activations (`matmul_few`); log-probabilities are then close to those of
            training, not equal.
        head_plan: how training cuts the head. With it, a token's log-probability is the model's own, computed
            as in training; without it, that of the distribution it was drawn from (temperature, top-p, …), a
            constraint's mask left out.
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
        head_plan: HeadPlan | None = None,
    ) -> None:
        self._model = model
        self._fast = fast
        self._sample = _sampling(sampler)
        self._slot_tokens = slot_tokens
        self._pass_tokens = max(pass_tokens, 1)
        self._head_plan = head_plan
        self._cache = model.new_cache("generation_kv", kv_dtype)
        self._cache.reserve(max(slots * slot_tokens, LEAST_CACHE_ROWS), 0)
        self._rows = model.workspace.scope("generation")
        self._slots: Slots[Active] = Slots(slots, slot_tokens, self._cache.copy_rows)
        self._waiting: list[tuple[Active, object]] = []
        self._shared: tuple[list[Active | None], list[tuple[int, int]]] = [], []
        self.stats = GenerationStats()

    def submit(self, number: int, request: GenerationRequest, session: object = None) -> None:
        """Add a sequence under a number of the caller's choice.

        `session`: a key under which the slot is kept when the sequence ends, for a request whose prompt goes
        on where this one ended; only what is new is evaluated then. `end_session` gives the slot back.

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
        sequence = Active(
            number=number,
            request=request,
            rng=np.random.default_rng([request.params.seed, request.stream]),
            prompt=np.asarray(request.prompt, dtype=np.int32),
        )
        self._waiting.append((sequence, session))

    @property
    def busy(self) -> bool:
        """True while a sequence is active or waits."""
        return bool(self._waiting) or self._slots.active()

    def cancel(self, number: int) -> None:
        """Give up a sequence; one that has ended already is no error."""
        self._waiting = [(s, key) for s, key in self._waiting if s.number != number]
        for slot in self._slots:
            if slot.occupant is not None and slot.occupant.number == number:
                self._slots.release(slot)

    def end_session(self, session: object) -> None:
        """Give the slot of a session back."""
        self._slots.end_session(session)

    def forget(self) -> None:
        """Drop all cached keys and values, because the weights have changed. Nothing may be in flight."""
        if self.busy:
            raise RolloutError("the weights changed while sequences were being generated")
        self._slots.forget()

    def step(self, on_token: OnToken | None = None) -> list[tuple[int, Completion]]:
        """Run one pass; returns the sequences that ended with it."""
        self._admit()
        prompts = self._slots.with_prompt()
        if prompts:
            return self._prompt_pass(prompts, on_token)
        decoding = self._slots.decoding()
        size = FEW_ROWS if self._fast else max(len(decoding), 1)
        done: list[tuple[int, Completion]] = []
        for first in range(0, len(decoding), size):
            done += self._decode_pass(decoding[first : first + size], on_token)
        return done

    def _admit(self) -> None:
        """Give slots to the sequences that wait, in their order."""
        still: list[tuple[Active, object]] = []
        for sequence, session in self._waiting:
            cached = self._slots.admit(sequence, sequence.prompt, session)
            if cached is None:
                still.append((sequence, session))
            else:
                self.stats.cached_tokens += cached
        self._waiting = still

    def _prompt_pass(
        self, slots: Sequence[Slot[Active]], on_token: OnToken | None
    ) -> list[tuple[int, Completion]]:
        room = self._pass_tokens
        runs: list[Run] = []
        ready: list[Slot[Active]] = []
        last_rows: list[int] = []
        for slot in slots:
            tokens = slot.pending[:room]
            if not tokens.size:
                break
            runs.append(Run(tokens=tokens, start=slot.length, row=slot.row))
            room -= tokens.size
            self.stats.prompt_tokens += tokens.size
            slot.extend(tokens, prompt=True)
            if not slot.pending.size:
                ready.append(slot)
                last_rows.append(self._pass_tokens - room - 1)
        hidden = self._forward(runs)
        for slot, row in list(zip(ready, last_rows, strict=True)):
            copied, same = self._slots.release_followers(slot)
            self.stats.cached_tokens += copied
            ready += same
            last_rows += [row] * len(same)
        return self._draw(ready, self._gathered(hidden, last_rows), on_token)

    def _decode_pass(
        self, slots: Sequence[Slot[Active]], on_token: OnToken | None
    ) -> list[tuple[int, Completion]]:
        runs = []
        for slot, shared in zip(slots, self._shared_by(slots), strict=True):
            assert slot.occupant is not None
            token = np.array(slot.occupant.tokens[-1:], dtype=np.int32)
            runs.append(Run(tokens=token, start=slot.length, row=slot.row, shared=shared))
            slot.extend(token, prompt=False)
        self.stats.decode_passes += 1
        self.stats.decode_rows += len(runs)
        with self._model.few_rows() if self._fast else nullcontext():
            return self._draw(slots, self._forward(runs), on_token)

    def _shared_by(self, slots: Sequence[Slot[Active]]) -> Sequence[tuple[int, int] | None]:
        """What `Slots.shared` says, found anew where other sequences decode than in the pass before."""
        if not self._fast:
            return [None] * len(slots)
        sequences = [slot.occupant for slot in slots]
        if sequences != self._shared[0]:
            self._shared = sequences, self._slots.shared(slots)
        return self._shared[1]

    def _forward(self, runs: list[Run]) -> Any:
        batch = build_pass(runs, self._model.backend, cache_rows=self._cache.rows)
        return self._model.forward(batch, KeyValueStore(cache=self._cache))

    def _gathered(self, hidden: Any, rows: list[int]) -> Any:
        x = self._rows.get("x", (len(rows), self._model.spec.embedding_length))
        for index, row in enumerate(rows):
            x[index : index + 1] = hidden[row : row + 1]
        return x

    def _draw(
        self, slots: Sequence[Slot[Active]], hidden: Any, on_token: OnToken | None
    ) -> list[tuple[int, Completion]]:
        """Draw the next token of each slot from its row of the residual stream; those that ended."""
        if not slots:
            return []
        head, backend = self._model.head, self._model.backend
        logits = self._rows.get("logits", (len(slots), self._model.spec.vocabulary_size))
        head.logits(hidden, logits, self._head_plan)
        sequences = [slot.occupant for slot in slots if slot.occupant is not None]
        drawn = _sampled(self._sample, backend.to_host(logits), sequences)
        if self._head_plan is not None:
            tokens = np.array([token for token, _ in drawn], dtype=np.int32)
            own = head.log_probabilities_of(logits, backend.from_host(tokens), self._head_plan)
            drawn = [(token, float(logp)) for (token, _), logp in zip(drawn, own, strict=True)]
        self.stats.new_tokens += len(slots)
        pairs = zip(slots, drawn, strict=True)
        return [done for slot, (t, logp) in pairs if (done := self._advance(slot, t, logp, on_token))]

    def _advance(
        self, slot: Slot[Active], token: int, logp: float, on_token: OnToken | None
    ) -> tuple[int, Completion] | None:
        """Note a drawn token; the finished sequence, or None if it goes on."""
        sequence = slot.occupant
        assert sequence is not None
        sequence.tokens.append(token)
        sequence.logp.append(logp)
        if sequence.request.constraint is not None:
            sequence.request.constraint.advance(token)
        if on_token is not None:
            on_token(sequence.number, token, logp)
        stopped = token in sequence.request.stop_ids
        if not stopped and len(sequence.tokens) < sequence.request.params.max_new_tokens:
            return None
        self._slots.release(slot)
        return sequence.number, Completion(
            tokens=np.array(sequence.tokens, dtype=np.int32),
            logp=np.array(sequence.logp, dtype=np.float64),
            finish="stop" if stopped else "length",
            masked=tuple(sequence.masked),
        )


def _sampling(sampler: Sampler) -> Sample:
    """`sample_batch` of a sampler, or `sample` row by row. Asked once: the check of a protocol is slow."""
    if isinstance(sampler, BatchSampler):
        return sampler.sample_batch
    return lambda *rows: [sampler.sample(*one) for one in zip(*rows, strict=True)]


def _sampled(
    sample: Sample, logits: npt.NDArray[Any], sequences: Sequence[Active]
) -> list[tuple[int, float]]:
    """Token and log-probability for each row of logits."""
    params, rngs = [s.request.params for s in sequences], [s.rng for s in sequences]
    masks: dict[int, npt.NDArray[np.bool_]] = {}
    for row, s in enumerate(sequences):
        if s.request.constraint is not None and (mask := s.request.constraint.allowed()) is not None:
            masks[row] = mask
    rows = masked_rows(logits, masks)
    drawn = sample(rows, params, rngs)
    for row, mask in masks.items():
        token = drawn[row][0]
        logp, masked = unmasked(logits[row], mask, token, params[row].temperature)
        drawn[row] = token, logp
        sequences[row].masked.append(masked)
    return drawn


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
    head_plan: HeadPlan | None = None

    def batch(self, *, slots: int | None = None, slot_tokens: int | None = None) -> DecodingBatch:
        """An empty decoding batch with these settings."""
        return DecodingBatch(
            self.model,
            self.sampler,
            slots=slots or self.slots,
            slot_tokens=slot_tokens or self.ctx,
            pass_tokens=self.pass_tokens,
            kv_dtype=self.kv_dtype,
            fast=self.fast,
            head_plan=self.head_plan,
        )

    def generate(
        self, requests: Sequence[GenerationRequest], on_token: OnToken | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; `on_token` sees each token as it is drawn.

        Raises `RolloutError` for a request that does not fit `ctx`.
        """
        if not requests:
            return []
        longest = max(request.total_tokens for request in requests)
        batch = self.batch(slots=min(self.slots, len(requests)), slot_tokens=min(longest, self.ctx))
        for number, request in enumerate(requests):
            batch.submit(number, request)
        done: dict[int, Completion] = {}
        while batch.busy:
            done.update(batch.step(on_token))
        return [done[number] for number in range(len(requests))]
