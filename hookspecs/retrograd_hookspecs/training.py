"""Training contracts: parameters, losses, optimizers, schedules, trainables, algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.floating[Any]]


@attrs.define(eq=False, kw_only=True)
class Parameter:
    """A trained array.

    `value` is the float32 master that the optimizer updates; `weight` what the forward pass reads: the
    master rounded to the storage `dtype` ("f32", "f16", "bf16") and widened again, so that what is saved
    is exactly what was trained, and small updates are not lost to rounding. `grad` accumulates.
    """

    name: str
    value: npt.NDArray[np.float32]
    grad: Any
    weight: Any
    dtype: str = "f32"


@attrs.frozen(kw_only=True)
class PolicyObjective:
    """What an algorithm of rewards says about its objective, for the loss to obey.

    `clip_low` and `clip_high` are the distances of the clip range [1 − low, 1 + high]. `level` "token" takes
    a ratio a token; "sequence" the geometric mean of a sequence's ratios (Zheng et al. 2025, GSPO, equation
    7). `kl_coefficient` is that of this update.
    """

    clip_low: float
    clip_high: float
    level: Literal["token", "sequence"] = "token"
    kl_coefficient: float = 0.0


@attrs.frozen(eq=False, kw_only=True)
class LossBatch:
    """What a loss sees: one entry per trained token of a pass.

    All arrays are float (n,) in the order of the tokens; `sequence` int (n,) numbers the sequence each
    belongs to, and `position` int (n,) is the index of the token within that sequence: entry i is token
    `sequences[sequence[i]].tokens[position[i]]`. The tokens of a sequence come in order, but a sequence that
    is cut has them in several passes, the last first. `weight` is 1 for plain tokens. `normalizer` is what
    the algorithm divides sums by, fixed for the whole optimizer step (for SFT the count of trained tokens in
    the step), so that the result does not depend on how the step is cut into passes.

    Algorithms of rewards set `objective` and these arrays of `extra`: `old_logp` (the policy's own, under the
    training path, before the first step of the update), `advantage`, and where there is one `ref_logp` (of
    the reference) and `sampled_logp` (what the sampler drew the token with). At level "sequence" also one of:
    `sequence_tokens`, the number of trained tokens of the sequence, the same at each of them, where every
    pass holds whole sequences; or `sequence_log_ratio`, the mean of logp − old_logp over the trained tokens
    of the sequence under the weights of this step, the same at each of them, where a sequence may be cut.
    No more is needed of a cut sequence: a token's derivative is its sequence's ratio times its own advantage
    (GSPO-token), so passes that hold parts add up to the gradient of the whole.
    """

    logp: FloatArray
    weight: FloatArray
    sequence: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    normalizer: float
    extra: Mapping[str, FloatArray] = attrs.field(factory=dict)
    objective: PolicyObjective | None = None


@attrs.frozen(eq=False, kw_only=True)
class LossResult:
    """`value` is this pass's share of the step's loss; `dlogp` (n,) its derivative by each logp.

    `metrics` are sums over the pass that the algorithm adds up over passes.
    """

    value: float
    dlogp: FloatArray
    metrics: Mapping[str, float] = attrs.field(factory=dict)


class Loss(Protocol):
    """A pure function of log-probabilities of the trained tokens."""

    def __call__(self, batch: LossBatch) -> LossResult:
        """Value and derivative."""


class Optimizer(Protocol):
    """Updates parameters from their gradients. One instance a run."""

    def step(self, parameters: Sequence[Parameter], lr: float, step: int) -> None:
        """Apply update number `step` (from 1). Does not clear gradients."""

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything needed to go on bit for bit, as arrays by name."""

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore `state()`."""

    def bytes_per_parameter(self) -> float:
        """Memory for the memory estimate."""


@attrs.frozen(kw_only=True)
class UpdateStats:
    """What one optimizer update did. `grad_norm` is the global norm before clipping.

    `skipped`: the gradient was not finite and nothing was changed.
    """

    lr: float
    grad_norm: float
    clipped: bool = False
    skipped: bool = False


class UpdateRule(Protocol):
    """Schedule, clipping and optimizer in one: what an algorithm calls once a step."""

    def __call__(self, step: int) -> UpdateStats:
        """Apply accumulated gradients as update `step` (from 1), clear them, refresh the weights."""


class Schedule(Protocol):
    """Learning rate over the run; pure, so it has no state."""

    def lr(self, step: int) -> float:
        """Learning rate of optimizer step `step` (from 1)."""


class Trainable(Protocol):
    """What is trained (LoRA adapter, whole weights) and how it is saved."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """All trained arrays, in a fixed order."""

    def attach(self, model: Any) -> None:
        """Put the parameters into the model's modules."""

    def refresh(self) -> None:
        """Recompute every `weight` from its `value`; called after each optimizer step and load."""

    def save(self, path: Path) -> None:
        """Write the result file atomically (`output.kind` decides which)."""

    def load(self, path: Path) -> None:
        """Read a file that `save` wrote; `ModelError` if it belongs to another base model."""

    def summary(self) -> str:
        """One line for the start of the run: what is trained, how many values, what was left out."""

    def signature(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be resumed, JSON-compatible: shape, scale, storage. It
        stands for the component's own table, which may describe the same thing in other words."""


@attrs.frozen(kw_only=True)
class StepReport:
    """One optimizer step. `metrics` use the documented prefixes (`train/loss`, `timing/step_seconds`).

    `boundary` is true where `[evaluation].every_iterations` counts: the end of an epoch (SFT) or of an
    update (rollout algorithms).
    """

    step: int
    total_steps: int | None
    metrics: Mapping[str, float]
    tokens: int = 0
    boundary: bool = False
    skipped: bool = False
    """The update was not applied (non-finite gradient); counted, never silent."""
    stalled: str = ""
    """Why an update of a rollout algorithm took no optimizer step ("all rewards are equal"): `step` is then
    that of the last one. "" for a report of a step."""
    stop: str = ""
    """Why the run should end now, though not all steps are done; "" to go on."""


@attrs.frozen(kw_only=True)
class EvaluationReport:
    """Held-out result. `score` is compared by `patience` and `best_eval`; lower or higher is better."""

    metrics: Mapping[str, float]
    score: float
    higher_is_better: bool


@attrs.frozen(kw_only=True)
class AuditFinding:
    """One line of the audit before the first step. `level` is "ok", "note", "warning" or "error"."""

    level: str
    check: str
    message: str


class Algorithm(Protocol):
    """A training algorithm. The core's driver owns checkpoints, evaluation times, sinks and signals."""

    def prepare(self) -> Sequence[AuditFinding]:
        """Read and validate all data; called before memory is committed. Raises `DataError`."""

    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, once prepared; None if not known in advance."""

    def run(self, update: UpdateRule) -> Iterator[StepReport]:
        """One report an optimizer step, from the start or from the loaded state.

        `state()` taken right after a report continues with the next step."""

    def longest(self) -> int:
        """Tokens of the longest sequence that is evaluated, once prepared: sizes the memory estimate."""

    def rehearse(self) -> None:
        """Compute the gradient of the first step and discard it: how long a step takes (`check`)."""

    def show(self, count: int) -> Sequence[str]:
        """The first `count` examples as text, what is trained in them marked (`check`)."""

    def evaluate(self, limit: int | None = None, samples: int = 1) -> EvaluationReport | None:
        """Evaluate on the held-out data, at most `limit` examples; None without `[evaluation]`.

        `samples`: answers drawn for each prompt, for algorithms that draw any; others ignore it."""

    def state(self) -> dict[str, Any]:
        """Position, taken between two reports: JSON-compatible values, and NumPy arrays at the top level."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`."""

    def close(self) -> None:
        """Release what was opened (reward programs, judges); may be called more than once."""

    def signature(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be resumed: data hashes and settings."""
