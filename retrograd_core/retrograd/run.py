"""The driver of a run: steps, evaluations, checkpoints, output.

An algorithm yields one report a step; everything that is the same for all algorithms happens here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil

from retrograd_hookspecs import (
    Algorithm,
    AuditFinding,
    CheckpointError,
    DataError,
    EvaluationReport,
    Problem,
    RetrogradError,
    Schedule,
    StepReport,
    Trainable,
    TrainingError,
    UpdateRule,
    UpdateStats,
)

from .checkpoint import CheckpointStore
from .config import RunConfig
from .interrupts import Interrupt, StopRequestedError, catch_interrupts
from .metrics import SinkSet
from .observe import NullObserver, Recorder
from .plugins import PluginSession
from .progress import Pace, Reporter, duration, metrics_text
from .run_lock import sole_run
from .run_state import Progress, RunState

MAX_SKIPPED_IN_A_ROW = 5
"""Steps with a gradient that is not finite before the run stops."""
KEEP_BEST = '[checkpoint] with mode = "best_eval" would have kept its adapter'


@attrs.frozen(kw_only=True)
class RunResult:
    """What a run ended with. `outcome` is "finished", "stopped early" or "interrupted".

    `seconds` and `tokens` are those of this process; `steps` and `skipped_steps` of the whole run.
    """

    outcome: str
    steps: int
    output: Path
    first_evaluation: EvaluationReport | None
    last_evaluation: EvaluationReport | None
    best_step: int
    seconds: float
    tokens: int
    skipped_steps: int
    checkpoint: Path | None = None
    best_adapter: Path | None = None
    """Of the best evaluation, where a checkpoint kept it."""

    def summary(self) -> list[str]:
        """Lines that close a run: what was reached, and where the result is."""
        speed = self.tokens / max(self.seconds, 1e-9)
        lines = [
            f"{self.outcome} after {self.steps} steps in {duration(self.seconds)}"
            f" ({self.tokens:,} tokens, {speed:,.0f} a second all in all)"
        ]
        if self.first_evaluation is not None:
            lines.append(f"held-out before: {metrics_text(self.first_evaluation.metrics)}")
        if self.last_evaluation is not None:
            lines.append(f"held-out after:  {metrics_text(self.last_evaluation.metrics)}")
        if self.skipped_steps:
            lines.append(f"{self.skipped_steps} steps were skipped: their gradient was not finite")
        if self.best_step and self.best_step != self.steps:
            kept = f"its adapter is {self.best_adapter}" if self.best_adapter is not None else KEEP_BEST
            lines.append(f"the best evaluation was at step {self.best_step}, not at the end: {kept}")
        return [*lines, f"result: {self.output}"]


class Run:
    """One assembled run. Lifecycle hooks receive it; its public attributes are for reading."""

    def __init__(
        self,
        *,
        config: RunConfig,
        session: PluginSession,
        algorithm: Algorithm,
        trainable: Trainable,
        schedule: Callable[[int | None], Schedule],
        update: Callable[[Schedule], UpdateRule],
        optimizer: Any,
        sinks: SinkSet,
        reporter: Reporter,
        signature: Mapping[str, Any],
        may_grow: Collection[str] = (),
        verify_output: Callable[[Path], str],
        observer: Recorder | None = None,
        settings: Callable[[], Mapping[str, Any]] = dict,
        interrupt: Interrupt | None = None,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.trainable = trainable
        self.progress = Progress()
        self.findings: Sequence[AuditFinding] = ()
        self.output = Path(config.output.path)
        self._session = session
        self._make_schedule = schedule
        self._make_update = update
        self._sinks = sinks
        self._reporter = reporter
        self._base_signature = signature
        self._verify_output = verify_output
        self._observer = observer or NullObserver()
        self._settings = settings
        self._interrupt = interrupt or Interrupt()
        self._first_evaluation: EvaluationReport | None = None
        self._last_evaluation: EvaluationReport | None = None
        self._process = psutil.Process()
        self._updating = False
        self._stalled = ""
        self._state = RunState(
            store=CheckpointStore(self._checkpoint_directory()),
            algorithm=algorithm,
            trainable=trainable,
            optimizer=optimizer,
            signature=self.signature,
            may_grow=may_grow,
            schedule=schedule,
        )

    @property
    def hook(self) -> Any:
        """Caller of lifecycle hooks."""
        return self._session.hook

    def prepare(self) -> Sequence[AuditFinding]:
        """Read and audit the data. Raises `DataError` on any finding of level "error"."""
        if not self.findings:
            self.findings = tuple(self.algorithm.prepare())
        errors = [finding for finding in self.findings if finding.level == "error"]
        if errors:
            raise DataError(Problem(where=f.check, message=f.message) for f in errors)
        return self.findings

    def execute(self, resume: Path | None = None) -> RunResult:
        """Train to the end. Resumes from the `.state` directory `resume` if given."""
        started = time.monotonic()
        error: BaseException | None = None
        self.prepare()
        with catch_interrupts(self._interrupt, self._reporter.message):
            try:
                checkpoints = self.config.checkpoint
                with sole_run(self.output, checkpoints.directory if checkpoints is not None else None):
                    return self._execute(resume, started)
            except BaseException as caught:
                error = caught
                raise
            finally:
                self._finish(error)

    def signature(self) -> dict[str, Any]:
        """What a checkpoint must share with this run to be resumed."""
        return {**self._base_signature, **self.algorithm.signature()}

    def _finish(self, error: BaseException | None) -> None:
        try:
            self._session.call("retrograd_run_finished", run=self, error=error)
        except RetrogradError as failure:
            if error is None:
                raise
            self._reporter.message(str(failure))  # must not hide why the run failed
        finally:
            self.algorithm.close()
            self._observer.close()
            self._sinks.close()
            self._reporter.close()

    def _execute(self, resume: Path | None, started: float) -> RunResult:
        total = self.progress.total_steps = self.algorithm.total_steps()
        if resume is not None:
            self._load(resume)
            self.progress.total_steps = total
        update = self._guarded(self._make_update(self._make_schedule(total)))
        self._observer.run(settings=self._settings(), resumed=resume is not None)
        self._session.call("retrograd_run_started", run=self)
        tokens_before = self.progress.tokens
        try:
            outcome, checkpoint = self._train(update)
            self.trainable.save(self.output)
            self._reporter.message(self._verify_output(self.output))
        except CheckpointError:
            raise  # trying again would fail again
        except Exception:
            self._save_after_failure()
            raise
        return RunResult(
            outcome=outcome,
            steps=self.progress.step,
            output=self.output,
            first_evaluation=self._first_evaluation,
            last_evaluation=self._last_evaluation,
            best_step=self.progress.best_step,
            seconds=time.monotonic() - started,
            tokens=self.progress.tokens - tokens_before,
            skipped_steps=self.progress.skipped_steps,
            checkpoint=checkpoint,
            best_adapter=self._best_adapter(),
        )

    def _train(self, update: UpdateRule) -> tuple[str, Path | None]:
        """Steps and evaluations; the outcome, and the checkpoint that an interrupted run goes on from."""
        try:
            if self.progress.records == 0:
                self._first_evaluation = self._announce(self._evaluate("before training"))
            outcome, checkpoint = self._steps(update)
            if checkpoint is None:
                if self.progress.step == 0:
                    why = self._stalled or "there is nothing to train on"
                    raise TrainingError(f"the run took no optimizer step: {why}")
                self._last_evaluation = self._final_evaluation()
        except StopRequestedError:  # what was given up is done again after the resume
            return "interrupted", self._save(_step_name(self.progress.step))
        return outcome, checkpoint

    def _steps(self, update: UpdateRule) -> tuple[str, Path | None]:
        clock = _Clock(self.progress.tokens)
        if self._pass_boundary() if self.progress.boundary_pending else self._out_of_patience():
            return "stopped early", None
        for report in self.algorithm.run(update):
            self._after_step(report, clock)
            stop = False
            if self._interrupt.requested:  # save first: an evaluation may take longer than a person waits
                self.progress.boundary_pending = report.boundary
            elif report.boundary:
                stop = self._pass_boundary()
            self._session.call("retrograd_step_finished", run=self, report=report)
            saved = self._checkpoint_if_due(report)
            if self._interrupt.requested:
                return "interrupted", saved or self._save(_step_name(report.step))
            if report.stop:
                self._reporter.message(f"stopping: {report.stop}")
            if stop or report.stop:
                return "stopped early", None
        return "finished", None

    def _guarded(self, update: UpdateRule) -> UpdateRule:
        """The rule, remembering whether it ended: weights in the middle of an update are not saved."""

        def apply(step: int) -> UpdateStats:
            self._updating = True
            stats = update(step)
            self._updating = False
            return stats

        return apply

    def _after_step(self, report: StepReport, clock: _Clock) -> None:
        progress = self.progress
        progress.step = report.step
        progress.tokens += report.tokens
        if report.stalled:
            self._stalled = report.stalled
            self._write(report.metrics)
            self._reporter.message(f"no optimizer step: {report.stalled}")
            return
        pace = clock.tick(report, progress.tokens, self._process.memory_info().rss)
        metrics = dict(report.metrics)
        metrics["system/memory_rss_bytes"] = float(pace.memory_bytes)
        metrics["timing/tokens_per_second"] = pace.tokens_per_second
        if report.skipped:
            progress.skipped_steps += 1
            progress.skipped_in_a_row += 1
        else:
            progress.skipped_in_a_row = 0
        metrics["optimizer/skipped_steps"] = float(progress.skipped_steps)
        self._write(metrics)
        self._reporter.step(report, pace)
        if progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            cause = "lower training.lr, or check the data"
            if progress.skipped_steps == report.step:
                cause = (
                    "no step was applied: the model file is damaged, or the data is far from what it knows"
                )
            raise TrainingError(
                f"the gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row (up to step"
                f" {report.step}); the weights are those before them; {cause}"
            )

    def _pass_boundary(self) -> bool:
        """Evaluate if it is time to; True if patience has run out."""
        settings = self.config.evaluation
        step, boundaries = self.progress.step, self.progress.boundaries + 1
        evaluation = None
        if settings is not None and boundaries % settings.every_iterations == 0:
            self.progress.boundary_pending = True  # until it is done: it may fail, or be given up
            evaluation = self._evaluate(f"step {step}")
        self.progress.boundaries, self.progress.boundary_pending = boundaries, False
        if settings is None or evaluation is None:
            return False
        self._last_evaluation = evaluation
        if self._improved(evaluation, settings.min_delta):
            self.progress.best_score = evaluation.score
            self.progress.best_step = step
            self.progress.evaluations_without_improvement = 0
            checkpoint = self.config.checkpoint
            if checkpoint is not None and checkpoint.mode != "steps":
                self._save("best")
        else:
            self.progress.evaluations_without_improvement += 1
        self._announce(evaluation)  # after the bookkeeping: a hook that fails must not undo it
        return self._out_of_patience()

    def _out_of_patience(self) -> bool:
        patience = self.config.evaluation.patience if self.config.evaluation is not None else None
        if patience is None or self.progress.evaluations_without_improvement < patience:
            return False
        self._reporter.message(
            f"stopping: no improvement in {patience} evaluations; the best was at step"
            f" {self.progress.best_step}"
        )
        return True

    def _improved(self, evaluation: EvaluationReport, min_delta: float) -> bool:
        best = self.progress.best_score
        if not math.isfinite(evaluation.score):
            return False
        if best is None:
            return True
        gain = evaluation.score - best if evaluation.higher_is_better else best - evaluation.score
        return gain > min_delta

    def _evaluate(self, label: str) -> EvaluationReport | None:
        started = time.monotonic()
        evaluation = self.algorithm.evaluate()
        if evaluation is not None:
            metrics = {**evaluation.metrics, "timing/evaluation_seconds": time.monotonic() - started}
            self._write(metrics)
            self._reporter.evaluated(evaluation, label)
        return evaluation

    def _write(self, metrics: Mapping[str, float]) -> None:
        self._sinks.write(self.progress.step, metrics)
        self.progress.records += 1

    def _announce(self, evaluation: EvaluationReport | None) -> EvaluationReport | None:
        if evaluation is not None:
            self._session.call("retrograd_evaluated", run=self, report=evaluation)
        return evaluation

    def _final_evaluation(self) -> EvaluationReport | None:
        if self.config.evaluation is None:
            return None
        if self._last_evaluation is not None and self._evaluated_at_end():
            return self._last_evaluation
        return self._announce(self._evaluate("after training"))

    def _evaluated_at_end(self) -> bool:
        settings = self.config.evaluation
        return settings is not None and self.progress.boundaries % settings.every_iterations == 0

    def _checkpoint_if_due(self, report: StepReport) -> Path | None:
        settings = self.config.checkpoint
        if settings is None or settings.mode == "best_eval" or not settings.every_steps or report.stalled:
            return None
        if report.step % settings.every_steps:
            return None
        return self._save(_step_name(report.step))

    def _save_after_failure(self) -> None:
        """Keep what was trained; a checkpoint that fails too must not hide the first error."""
        step = self.progress.step
        if step == 0 or self._updating or self._state.exists(_step_name(step)):
            return
        try:
            path = self._save(_step_name(step))
        except RetrogradError as error:
            self._reporter.message(f"the run failed, and so did the checkpoint: {error}")
        else:
            self._reporter.message(f"the run failed; go on from step {step} with --resume {path}")

    def _best_adapter(self) -> Path | None:
        """What this run kept of its best evaluation; a file of that name may be an earlier run's."""
        settings, step = self.config.checkpoint, self.progress.best_step
        if settings is None or not step:
            return None
        if settings.mode != "steps":
            return self._checkpoint_directory() / "best.gguf"
        if not settings.every_steps or step % settings.every_steps:
            return None
        return self._checkpoint_directory() / f"{_step_name(step)}.gguf"

    def _checkpoint_directory(self) -> Path:
        settings = self.config.checkpoint
        if settings is not None:
            return Path(settings.directory)
        return self.output.with_name(self.output.stem + ".checkpoints")

    def _save(self, name: str) -> Path:
        path = self._state.save(name, self.progress)
        self._session.call("retrograd_checkpoint_saved", run=self, path=path)
        return path

    def _load(self, path: Path) -> None:
        self.progress = self._state.load(path, self.progress.total_steps)
        self._sinks.resume(self.progress.step, self.progress.records)
        self._reporter.message(f"resumed from {path} after step {self.progress.step}")


def _step_name(step: int) -> str:
    return f"step-{step:06d}"


class _Clock:
    """Tokens a second and time left, smoothed over the last steps."""

    def __init__(self, tokens: int) -> None:
        self._times = [(time.monotonic(), tokens, 0)]

    def tick(self, report: StepReport, tokens: int, memory_bytes: int) -> Pace:
        self._times.append((time.monotonic(), tokens, report.step))
        del self._times[:-50]
        (t0, n0, s0), (t1, n1, s1) = self._times[0], self._times[-1]
        elapsed = max(t1 - t0, 1e-9)
        steps = s1 - (s0 or report.step - len(self._times) + 1)
        left = None
        if report.total_steps is not None and steps > 0:
            left = (report.total_steps - s1) * elapsed / steps
        return Pace(tokens_per_second=(n1 - n0) / elapsed, seconds_left=left, memory_bytes=memory_bytes)
