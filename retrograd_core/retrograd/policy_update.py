"""An update of learning from rewards: rollouts as training sequences, and optimizer passes over them.

Old log-probabilities are the policy's own under the training path: the first pass of an update notes them as
it computes them, so that every ratio is exactly 1 in it, whatever the sampler rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import Loss, LossBatch, LossResult, PolicyObjective, Rollout, TrainingError

from .engine import PackingStats, Step, StepStats, TrainingEngine, TrainingSequence
from .reference import Reference

if TYPE_CHECKING:
    from retrograd_hookspecs.training import FloatArray

_ARRAYS = ("advantage", "sampled_logp", "ref_logp", "old_logp")
"""What a batch may know of each token, apart from its weight."""


@attrs.define(eq=False, kw_only=True)
class PolicyBatch:
    """The trained rollouts of one update.

    `sequences`: their tokens, with the arrays of `LossBatch.extra` at each token. `families`: numbers of
    sequences by prompt. `normalizer`: what the loss divides its sum by. `epochs` counts the optimizer passes
    that were made.
    """

    sequences: list[TrainingSequence]
    families: list[list[int]]
    normalizer: float
    epochs: int = 0

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[Rollout]],
        *,
        normalizer: float,
        weight: Callable[[Rollout], float] = lambda rollout: 1.0,
    ) -> PolicyBatch:
        """From rollouts by prompt, each with its `advantage`; `weight` is that of a rollout's tokens."""
        sequences: list[TrainingSequence] = []
        families: list[list[int]] = []
        for members in groups:
            families.append(list(range(len(sequences), len(sequences) + len(members))))
            for rollout in members:
                if rollout.advantage is None:
                    raise ValueError(f"rollout {rollout.id} has no advantage")
                sequences.append(
                    TrainingSequence(
                        tokens=rollout.tokens,
                        trained=rollout.trained,
                        weight=np.where(rollout.trained, weight(rollout), 0.0),
                        extra={"advantage": rollout.advantage, "sampled_logp": rollout.logp},
                    )
                )
        return cls(sequences=sequences, families=families, normalizer=normalizer)

    @property
    def trained_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(sequence.trained_tokens for sequence in self.sequences)

    def add(self, name: str, values: Sequence[FloatArray]) -> None:
        """Add an array of `LossBatch.extra`, given for the trained tokens of each sequence."""
        for index, (sequence, own) in enumerate(zip(self.sequences, values, strict=True)):
            whole = np.zeros(sequence.tokens.size)
            whole[sequence.trained] = own
            self.sequences[index] = attrs.evolve(sequence, extra={**sequence.extra, name: whole})

    def add_reference(self, reference: Reference) -> None:
        """Score the tokens with the reference of the KL penalty."""
        self.add("ref_logp", reference.log_probabilities(self.sequences, self.families))

    def state(self) -> dict[str, Any]:
        """Everything, as NumPy arrays and numbers, for a checkpoint between two epochs."""
        stacked = {
            name: np.concatenate([s.extra[name] for s in self.sequences])
            for name in _ARRAYS
            if name in self.sequences[0].extra
        }
        return {
            "lengths": np.array([s.tokens.size for s in self.sequences]),
            "families": np.array([len(family) for family in self.families]),
            "tokens": np.concatenate([s.tokens for s in self.sequences]),
            "trained": np.concatenate([s.trained for s in self.sequences]),
            "weight": np.concatenate([np.asarray(s.weight) for s in self.sequences]),
            **stacked,
            "normalizer": self.normalizer,
            "epochs": self.epochs,
        }

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> PolicyBatch:
        """Restore `state()`."""
        cuts = np.cumsum(state["lengths"])[:-1]
        split = {name: np.split(state[name], cuts) for name in ("tokens", "trained", "weight")}
        extra = {name: np.split(state[name], cuts) for name in _ARRAYS if name in state}
        sequences = [
            TrainingSequence(
                tokens=np.ascontiguousarray(split["tokens"][i], np.int32),
                trained=split["trained"][i].astype(np.bool_),
                weight=split["weight"][i],
                extra={name: arrays[i] for name, arrays in extra.items()},
            )
            for i in range(len(state["lengths"]))
        ]
        first = np.concatenate([[0], np.cumsum(state["families"])]).astype(int)
        families = [list(range(a, b)) for a, b in pairwise(first)]
        return cls(
            sequences=sequences,
            families=families,
            normalizer=float(state["normalizer"]),
            epochs=int(state["epochs"]),
        )


@attrs.frozen(kw_only=True)
class EpochStats:
    """One pass over a batch. `sampler_gap`: |log p in training − log p when drawn| of each trained token
    (n,), of the first pass only."""

    step: StepStats
    packing: PackingStats
    sampler_gap: npt.NDArray[np.float64] | None = None


class _Recorder:
    """A loss that gets its objective, and notes the log-probabilities it sees."""

    def __init__(self, loss: Loss, objective: PolicyObjective, sizes: Sequence[int], *, first: bool) -> None:
        self._loss = loss
        self._objective = objective
        self._first = first
        self.logp = [np.zeros(size) for size in sizes] if first else []

    def __call__(self, batch: LossBatch) -> LossResult:
        lost = int(np.count_nonzero(~np.isfinite(batch.logp)))
        if lost:
            raise TrainingError(
                f"{lost} of {batch.logp.size} log-probabilities of a pass are not finite: the weights ran"
                " away; lower training.lr, and go on from a checkpoint before this step"
            )
        extra = dict(batch.extra)
        if self._first:
            extra["old_logp"] = batch.logp
            for number in np.unique(batch.sequence):
                own = batch.sequence == number
                self.logp[number][batch.position[own]] = batch.logp[own]
        return self._loss(attrs.evolve(batch, objective=self._objective, extra=extra))


def train_epoch(
    engine: TrainingEngine, batch: PolicyBatch, loss: Loss, objective: PolicyObjective
) -> EpochStats:
    """Add the gradients of one pass over the whole batch: one optimizer step."""
    first = batch.epochs == 0
    sequences = batch.sequences
    step: Step = engine.plan(sequences, batch.families)
    if objective.level == "sequence":
        sequences = _with_sequence_ratios(engine, batch)
    recorder = _Recorder(loss, objective, [s.tokens.size for s in sequences], first=first)
    stats = engine.train_step(step, sequences, recorder, batch.normalizer)
    batch.epochs += 1
    gap = None
    if first:
        batch.add("old_logp", [logp[s.trained] for logp, s in zip(recorder.logp, sequences, strict=True)])
        gap = np.concatenate(
            [np.abs(s.extra["old_logp"] - s.extra["sampled_logp"])[s.trained] for s in batch.sequences]
        )
    packing = PackingStats.of(step, engine.settings.micro_batch)
    return EpochStats(step=stats, packing=packing, sampler_gap=gap)


def _with_sequence_ratios(engine: TrainingEngine, batch: PolicyBatch) -> list[TrainingSequence]:
    """The sequences with their mean log ratio at each token: a pass may hold only a part of one.

    Exactly 0 in the first epoch, where the policy is that of the rollouts.
    """
    if batch.epochs == 0:
        means = [0.0] * len(batch.sequences)
    else:
        current = engine.log_probabilities(batch.sequences, batch.families)
        old = [s.extra["old_logp"][s.trained] for s in batch.sequences]
        means = [float(np.mean(now - then)) for now, then in zip(current, old, strict=True)]
    return [
        attrs.evolve(s, extra={**s.extra, "sequence_log_ratio": np.full(s.tokens.size, mean)})
        for s, mean in zip(batch.sequences, means, strict=True)
    ]
