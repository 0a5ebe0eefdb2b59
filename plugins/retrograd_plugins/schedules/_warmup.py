"""What the schedules share: linear warm-up, and the share of the decay that is done."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from retrograd_hookspecs import BuildContext, ConfigError, Problem, TrainingError


@attrs.frozen(kw_only=True)
class WarmupSchedule:
    """lr·t/W in the W warm-up steps, then lr·decay(progress).

    Steps count from 1. `progress` of step t in a run of T steps is (t − 1 − W) / (T − W): 0 in the first
    step after the warm-up, 1 at the end of the run, after the last step. So every step has a positive
    learning rate. `total_steps` None means that there is no decay.
    """

    peak: float
    warmup_steps: int
    total_steps: int | None
    decay: Callable[[float], float]

    def lr(self, step: int) -> float:
        """Learning rate of optimizer step `step` (from 1).

        Raises: `TrainingError` for a step outside the run.
        """
        total = self.total_steps
        if step < 1 or (total is not None and step > total):
            raise TrainingError(f"the schedule has no step {step}: the run has steps 1 to {total or 'any'}")
        if step <= self.warmup_steps:
            return self.peak * (step / self.warmup_steps)
        if total is None:
            return self.peak
        return self.peak * self.decay((step - 1 - self.warmup_steps) / (total - self.warmup_steps))


def decaying(name: str, context: BuildContext, decay: Callable[[float], float]) -> WarmupSchedule:
    """A schedule that falls over the whole run. Raises `ConfigError` if the run leaves no room for it."""
    training = context.config.training
    total: int | None = context.service("total_steps")
    if total is None:
        raise _refused(
            context,
            "training.lr_scheduler",
            f'"{name}" decays to zero by the end of the run, but the number of steps of this run is not'
            " known in advance",
            'use lr_scheduler = "constant"',
        )
    if training.warmup_steps >= total:
        raise _refused(
            context,
            "training.warmup_steps",
            f'{training.warmup_steps} warm-up steps leave no step for "{name}" to decay in: the run has'
            f" {total} steps",
            f"at most {total - 1}, or more epochs",
        )
    return WarmupSchedule(
        peak=training.lr, warmup_steps=training.warmup_steps, total_steps=total, decay=decay
    )


def constant(context: BuildContext) -> WarmupSchedule:
    """A schedule without decay. Raises `ConfigError` if the run ends inside the warm-up."""
    training = context.config.training
    total: int | None = context.service("total_steps")
    if total is not None and training.warmup_steps > total:
        raise _refused(
            context,
            "training.warmup_steps",
            f"{training.warmup_steps} warm-up steps, but the run has {total}: it would never reach"
            f" training.lr = {training.lr}",
            f"at most {total}, or more epochs",
        )
    return WarmupSchedule(
        peak=training.lr, warmup_steps=training.warmup_steps, total_steps=None, decay=lambda _: 1.0
    )


def _refused(context: BuildContext, key: str, message: str, hint: str) -> ConfigError:
    where = context.config.document.where(key)
    return ConfigError([Problem(where=where, key=key, message=message, hint=hint)])
