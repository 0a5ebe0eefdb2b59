"""The training engine: from packed passes to gradients, log-probabilities and hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd.nn.attention import KeyValueStore
from retrograd.nn.batch import PassBatch
from retrograd.nn.model import CausalLM
from retrograd_hookspecs import Loss, LossBatch, Trainable

from .layout import StepLayout, Targets, batch_of, lay_out, targets_of
from .packing import Pass, Step
from .sequences import TrainingSequence, ranges, whole_sequence
from .settings import EngineSettings
from .shared_prefix import most_cache_rows, plan_step

if TYPE_CHECKING:
    from retrograd_hookspecs.training import FloatArray


@attrs.frozen(kw_only=True)
class StepStats:
    """What one step did. `loss` is the sum of the passes' shares; `metrics` are sums over the passes.

    `tokens` counts the inputs that gradients were computed for (context that is only looked at is not
    counted), `trained_tokens` the targets.
    """

    loss: float
    tokens: int
    trained_tokens: int
    metrics: Mapping[str, float] = attrs.field(factory=dict)


class TrainingEngine:
    """Evaluates a model on packed sequences and accumulates gradients in the trainable's parameters.

    The same inputs give the same bits on one machine and thread count. A token's log-probability does
    not depend on what else is in its pass. `trainable` is attached to the model; None evaluates the base.
    """

    def __init__(self, model: CausalLM, trainable: Trainable | None, settings: EngineSettings) -> None:
        self.model = model
        self.trainable = trainable
        self.settings = settings
        self._backend = model.backend
        self._head_plan = settings.head_plan()
        self._checkpointing = settings.checkpointing()
        workspace = model.workspace
        workspace.token_capacity = max(workspace.token_capacity, settings.micro_batch)
        self._rows = workspace.scope("trained_rows")
        self._cache = model.new_cache("kv", settings.kv_type(self._backend.compute_dtype))
        self._cache_gradients = model.new_cache_gradients("kv_gradients")
        if trainable is not None:
            trainable.attach(model)

    def train_step(
        self, step: Step, sequences: Sequence[TrainingSequence], loss: Loss, normalizer: float
    ) -> StepStats:
        """Add the gradients of a step to the parameters' `grad`.

        `normalizer` is what `loss` divides by, for the whole step: usually its number of trained tokens.
        """
        layout = lay_out(step, sequences)
        store = self._store(layout, gradients=True)
        for pieces in layout.context:
            self.model.forward(self._batch(pieces, sequences, layout), store)
        value, metrics, trained = 0.0, dict[str, float](), 0
        # Last pass first: the gradient by a token's key and value is complete when its pass comes.
        for index in reversed(range(len(layout.passes))):
            pieces = layout.passes[index]
            for sequence in layout.opened.get(index, ()):
                rows = layout.cached[sequence]
                self._cache_gradients.clear(rows.start, rows.stop)
            for earlier in layout.ahead.get(index, ()):
                self.model.forward(self._batch(earlier, sequences, layout), store)
            batch = self._batch(pieces, sequences, layout)
            targets = targets_of(pieces, sequences, self._backend.compute_dtype)
            share = self._train_pass(batch, targets, store, loss, normalizer, metrics)
            value += share
            trained += targets.count
            for source, copy, count in layout.copies(pieces):
                self._cache_gradients.add_rows(copy, source, count)
        return StepStats(
            loss=value,
            tokens=sum(piece.length for pieces in layout.passes for piece in pieces),
            trained_tokens=trained,
            metrics=metrics,
        )

    def plan(self, sequences: Sequence[TrainingSequence], families: Sequence[Sequence[int]] = ()) -> Step:
        """All sequences as one step, with the engine's pass size and `shared_prefix_fanout`; `families` are
        sequence numbers by prompt, see `plan_step`."""
        return plan_step(
            sequences,
            families,
            micro_batch=self.settings.micro_batch,
            fanout=self.settings.shared_prefix_fanout,
        )

    def log_probabilities(
        self, sequences: Sequence[TrainingSequence], families: Sequence[Sequence[int]] = ()
    ) -> list[FloatArray]:
        """log p of the trained tokens of each sequence, in order; forward only, packed, and with the
        prompts of `families` (see `plan_step`) shared."""
        out = [np.empty(sequence.trained_tokens, self._backend.compute_dtype) for sequence in sequences]
        filled = [0] * len(sequences)
        for pieces, hidden in self._evaluate(self._plan_forward(sequences, families), sequences):
            targets = targets_of(pieces, sequences, self._backend.compute_dtype)
            if not targets.count:
                continue
            x = self._select(hidden, targets.mask, "x")
            tokens = self._backend.from_host(targets.tokens)
            logp, _ = self.model.head.log_probabilities(x, tokens, self._head_plan)
            for piece in pieces:
                own = logp[targets.sequence == piece.sequence]
                first = filled[piece.sequence]
                out[piece.sequence][first : first + len(own)] = own
                filled[piece.sequence] += len(own)
        return out

    def hidden(
        self,
        sequences: Sequence[TrainingSequence],
        families: Sequence[Sequence[int]] = (),
        *,
        trained_only: bool = False,
    ) -> list[FloatArray]:
        """Final (normalised) hidden states of each sequence, packed as by `log_probabilities`.

        (inputs, E): one a position. With `trained_only` (trained tokens, E): those that predict a trained
        token, in order, as a critic reads them.
        """
        width = self.model.spec.embedding_length
        counts = [s.trained_tokens if trained_only else s.inputs for s in sequences]
        out = [np.empty((count, width), self._backend.compute_dtype) for count in counts]
        filled = [0] * len(sequences)
        step = self._plan_forward(sequences, families)
        if not trained_only:
            for branch in step.branches:
                filled[branch.sequence] = branch.length
        for pieces, hidden in self._evaluate(step, sequences):
            masks = [sequences[p.sequence].predicts[p.start : p.stop] for p in pieces]
            if trained_only:
                hidden = self._select(hidden, np.concatenate(masks), "x")
            states = self._backend.to_host(self.model.head.normed(hidden))
            row = 0
            for piece, mask in zip(pieces, masks, strict=True):
                count = int(np.count_nonzero(mask)) if trained_only else piece.length
                first = filled[piece.sequence]
                out[piece.sequence][first : first + count] = states[row : row + count]
                filled[piece.sequence] += count
                row += count
        if not trained_only:
            for branch in step.branches:
                out[branch.sequence][: branch.length] = out[branch.owner][: branch.length]
        return out

    def logits(self, tokens: npt.NDArray[np.int32]) -> FloatArray:
        """All logits (n, V) of one sequence. For checks: the full logits are large."""
        sequence = whole_sequence(np.append(tokens, np.int32(0)).astype(np.int32))
        out = np.empty((len(tokens), self.model.spec.vocabulary_size), self._backend.compute_dtype)
        for pieces, hidden in self._evaluate(self._plan_forward([sequence]), [sequence]):
            device = self._backend.empty((pieces[0].length, out.shape[1]), out.dtype)
            self.model.head.logits(hidden, device)
            out[pieces[0].start : pieces[0].stop] = self._backend.to_host(device)
        return out

    def reserve(self, longest: int, *, families: bool) -> None:
        """Make room in the cache for every step that `plan` makes of sequences with up to `longest` inputs,
        so that it need not grow later; `families` if some share a prompt."""
        families = families and self.settings.shared_prefix_fanout != "off"
        rows = most_cache_rows(longest, self.settings.micro_batch, families=families)
        if rows:
            self._cache.reserve(rows, self.settings.micro_batch)
            self._cache_gradients.reserve(self._cache.rows, self.settings.micro_batch)

    def zero_grad(self) -> None:
        """Clear the gradients of all parameters."""
        for parameter in self.trainable.parameters if self.trainable is not None else ():
            parameter.grad[...] = 0

    def _plan_forward(
        self, sequences: Sequence[TrainingSequence], families: Sequence[Sequence[int]] = ()
    ) -> Step:
        return plan_step(
            sequences,
            families,
            micro_batch=self.settings.micro_batch,
            fanout=self.settings.shared_prefix_fanout,
            gradients=False,
        )

    def _evaluate(self, step: Step, sequences: Sequence[TrainingSequence]) -> Iterator[tuple[Pass, Any]]:
        """Each pass, and the residual stream after it, valid until the next."""
        layout = lay_out(step, sequences)
        store = self._store(layout, gradients=False)
        for pieces in layout.passes:
            yield pieces, self.model.forward(self._batch(pieces, sequences, layout), store)

    def _train_pass(
        self,
        batch: PassBatch,
        targets: Targets,
        store: KeyValueStore | None,
        loss: Loss,
        normalizer: float,
        metrics: dict[str, float],
    ) -> float:
        hidden = self.model.forward_keeping(batch, store, self._checkpointing)
        grad = self._rows.rows("grad", *hidden.shape)
        grad[...] = 0
        value = 0.0
        if targets.count:
            x = self._select(hidden, targets.mask, "x")
            tokens = self._backend.from_host(targets.tokens)
            head = self.model.head
            logp, logsumexp = head.log_probabilities(x, tokens, self._head_plan, gradients=True)
            result = loss(
                LossBatch(
                    logp=logp,
                    weight=targets.weight,
                    sequence=targets.sequence,
                    position=targets.position,
                    normalizer=normalizer,
                    extra=targets.extra,
                )
            )
            value = result.value
            for name, number in result.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + number
            dlogp = self._backend.from_host(np.asarray(result.dlogp, dtype=logp.dtype))
            dx = self._rows.rows("dx", *x.shape)
            head.backward(x, tokens, logsumexp, dlogp, dx, self._head_plan)
            row = 0
            for first, stop in ranges(targets.mask):
                grad[first:stop] = dx[row : row + stop - first]
                row += stop - first
        self.model.backward(grad, batch, store, self._checkpointing)
        return value

    def _select(self, hidden: Any, mask: npt.NDArray[np.bool_], name: str) -> Any:
        """The rows of `hidden` where `mask` is True, gathered: only they go through the head."""
        out = self._rows.rows(name, int(np.count_nonzero(mask)), hidden.shape[1])
        row = 0
        for first, stop in ranges(mask):
            out[row : row + stop - first] = hidden[first:stop]
            row += stop - first
        return out

    def _store(self, layout: StepLayout, *, gradients: bool) -> KeyValueStore | None:
        if not layout.rows:
            return None
        self._cache.reserve(layout.rows, self.settings.micro_batch)
        if not gradients:
            return KeyValueStore(cache=self._cache)
        self._cache_gradients.reserve(self._cache.rows, self.settings.micro_batch)
        return KeyValueStore(cache=self._cache, gradients=self._cache_gradients)

    def _batch(self, pieces: Pass, sequences: Sequence[TrainingSequence], layout: StepLayout) -> PassBatch:
        """The pass, once the copies of prefixes are in place that its sequences begin with."""
        for source, target, count in layout.copies(pieces):
            self._cache.copy_rows(source, target, count)
        return batch_of(pieces, sequences, layout, self._backend, self._cache.rows)
