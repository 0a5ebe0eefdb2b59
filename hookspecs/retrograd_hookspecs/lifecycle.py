"""Lifecycle and selection hooks, for users' own modules (`[plugins] load`) and hook plugins.

All are called in the main thread. Lifecycle hooks are called at most a few times an optimizer step,
never per token; an exception ends the run after a checkpoint is written, and names the hook.
Selection hooks are `firstresult`: the first that returns something other than None decides; they
are called while a run is assembled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .kernels import KernelImpl
from .markers import hookspec
from .training import EvaluationReport, StepReport


class LifecycleHooks:
    """Specifications; `run` is the `retrograd.run.Run` in progress."""

    @hookspec
    def retrograd_configure(self, config: Any) -> None:
        """Once, after the configuration is structured and before anything is built. Raise `ConfigError`
        to refuse it."""

    @hookspec
    def retrograd_run_started(self, run: Any) -> None:
        """Once, after the audit and before the first step (also after a resume)."""

    @hookspec
    def retrograd_rollouts_ready(self, run: Any, groups: Sequence[Any]) -> None:
        """Once an update of a rollout algorithm, before advantages are taken; may reshape rewards."""

    @hookspec
    def retrograd_step_finished(self, run: Any, report: StepReport) -> None:
        """After every optimizer step."""

    @hookspec
    def retrograd_evaluated(self, run: Any, report: EvaluationReport) -> None:
        """After every evaluation."""

    @hookspec
    def retrograd_checkpoint_saved(self, run: Any, path: Path) -> None:
        """After a checkpoint has its final name."""

    @hookspec
    def retrograd_run_finished(self, run: Any, error: BaseException | None) -> None:
        """Once, on success (`error` None), failure or interruption; outputs are already written."""


class SelectionHooks:
    """Specifications of hooks that choose."""

    @hookspec(firstresult=True)
    def retrograd_select_backend(self, device: str, available: Sequence[str]) -> str | None:
        """Name of the backend for `model.device`."""

    @hookspec(firstresult=True)
    def retrograd_select_sampler(self, available: Sequence[str]) -> str | None:
        """Name of the sampler of all generation."""

    @hookspec(firstresult=True)
    def retrograd_select_kernel(
        self, op: str, format: str, candidates: Sequence[KernelImpl]
    ) -> KernelImpl | None:
        """The implementation of an op, once an op and format a run."""

    @hookspec(firstresult=True)
    def retrograd_select_tokenizer(self, metadata: Mapping[str, Any]) -> str | None:
        """Name of the tokenizer component for a model."""

    @hookspec(firstresult=True)
    def retrograd_select_chat_format(self, template: str) -> str | None:
        """Name of the chat format for a model."""
