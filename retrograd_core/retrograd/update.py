"""One optimizer update: norm, clipping, schedule, optimizer, fresh weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from retrograd_hookspecs import KernelTable, Optimizer, Parameter, Schedule, Trainable, UpdateStats

from .parameter_runs import ParameterRuns


class Updater:
    """The `UpdateRule` of a run.

    Clips by the global norm of all gradients (Pascanu et al. 2013): g ← g · min(1, max_grad_norm / ‖g‖).
    A gradient that is not finite changes nothing: the step is reported as skipped.
    """

    def __init__(
        self,
        *,
        trainable: Trainable,
        optimizer: Optimizer,
        schedule: Schedule,
        kernels: KernelTable,
        max_grad_norm: float,
    ) -> None:
        self._trainable = trainable
        self._optimizer = optimizer
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._sum_squares = kernels.get("sum_squares")
        self._scale = kernels.get("scale")
        self._runs = ParameterRuns()

    def __call__(self, step: int) -> UpdateStats:
        """Apply and clear the accumulated gradients as update `step` (from 1)."""
        parameters: Sequence[Parameter] = self._trainable.parameters
        lr = self._schedule.lr(step)
        runs = self._runs.of(parameters)
        norm = math.sqrt(sum(float(self._sum_squares(run.grad)) for run in runs))
        if not math.isfinite(norm):
            self._clear()
            return UpdateStats(lr=lr, grad_norm=norm, skipped=True)
        clipped = norm > self._max_grad_norm > 0
        if clipped:
            factor = self._max_grad_norm / norm
            for run in runs:
                self._scale(factor, run.grad)
        self._optimizer.step(parameters, lr, step)
        self._clear()
        self._trainable.refresh()
        return UpdateStats(lr=lr, grad_norm=norm, clipped=clipped)

    def _clear(self) -> None:
        for run in self._runs.of(self._trainable.parameters):
            run.grad[...] = 0
