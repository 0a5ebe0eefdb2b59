"""The driver with an algorithm of a few numbers: evaluations, patience, checkpoints, interruption."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.config import Document, RunConfig, read_shared
from retrograd.errors import CheckpointError, DataError, PluginError, TrainingError
from retrograd.metrics import JsonlMetrics, SinkSet, read_metrics
from retrograd.plugins import Catalogue, PluginSession
from retrograd.progress import SilentReporter
from retrograd.run import MAX_SKIPPED_IN_A_ROW, Run
from retrograd_hookspecs import (
    AuditFinding,
    EvaluationReport,
    Parameter,
    Schedule,
    StepReport,
    UpdateRule,
    UpdateStats,
    hookimpl,
)
from retrograd_plugins.schedules._warmup import WarmupSchedule


class OneWeight:
    """A trainable of one number, saved as text."""

    def __init__(self) -> None:
        zero = np.zeros(1, np.float32)
        self.parameters: Sequence[Parameter] = [
            Parameter(name="w", value=zero.copy(), grad=zero.copy(), weight=zero.copy())
        ]

    def attach(self, model: Any) -> None: ...

    def refresh(self) -> None:
        for parameter in self.parameters:
            parameter.weight[...] = parameter.value

    def save(self, path: Path) -> None:
        path.write_text(repr(float(self.parameters[0].value[0])))

    def load(self, path: Path) -> None:
        self.parameters[0].value[0] = float(path.read_text())

    def summary(self) -> str:
        return "one weight"


class Counting:
    """Adds the step's number to the weight; its held-out scores are given."""

    def __init__(
        self,
        weight: OneWeight,
        steps: int,
        scores: Sequence[float] = (),
        *,
        skip: Sequence[int] = (),
        kill_in_step: int = 0,
    ) -> None:
        self.kill_in_step = kill_in_step
        self.weight = weight
        self.steps = steps
        self.scores = list(scores)
        self.skip = skip
        self.done = 0
        self.findings: Sequence[AuditFinding] = ()

    def prepare(self) -> Sequence[AuditFinding]:
        return self.findings

    def total_steps(self) -> int | None:
        return self.steps

    def run(self, update: UpdateRule) -> Iterator[StepReport]:
        while self.done < self.steps:
            step = self.done + 1
            self.weight.parameters[0].grad[0] = step
            stats = update(step)
            if step == self.kill_in_step:
                os.kill(os.getpid(), signal.SIGINT)
            self.done = step
            yield StepReport(
                step=step,
                total_steps=self.steps,
                metrics={"train/loss": 1.0 / step},
                tokens=10,
                boundary=step % 2 == 0,
                skipped=stats.skipped or step in self.skip,
            )

    def longest(self) -> int:
        return 10

    def rehearse(self) -> None: ...

    def show(self, count: int) -> Sequence[str]:
        return []

    def close(self) -> None:
        pass

    def evaluate(self, limit: int | None = None, samples: int = 1) -> EvaluationReport | None:
        if not self.scores:
            return None
        return EvaluationReport(
            metrics={"eval/loss": self.scores[0]}, score=self.scores.pop(0), higher_is_better=False
        )

    def state(self) -> dict[str, Any]:
        return {"done": self.done}

    def load(self, state: Mapping[str, Any]) -> None:
        self.done = state["done"]

    def signature(self) -> dict[str, Any]:
        return {"steps": self.steps}


class Memory:
    """An optimizer whose state is the sum of gradients so far, and which it adds to the weight."""

    def __init__(self) -> None:
        self.total = np.zeros(1, np.float32)

    def state(self) -> dict[str, Any]:
        return {"total": self.total.copy()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.total = np.array(state["total"])


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Run]:
    def build(
        steps: int = 6,
        scores: Sequence[float] = (),
        *,
        skip: Sequence[int] = (),
        kill_in_step: int = 0,
        hooks: object | None = None,
        signature: Mapping[str, Any] | None = None,
        **tables: Any,
    ) -> Run:
        values: dict[str, Any] = {
            "run": {"algorithm": "counting"},
            "model": {"path": "m.gguf"},
            "output": {"path": str(tmp_path / "out.txt")},
            **tables,
        }
        config: RunConfig = read_shared(Document.from_values(values)).config()
        session = PluginSession(Catalogue.of([]))
        if hooks is not None:
            session.register(hooks, "test")
        weight, memory = OneWeight(), Memory()
        algorithm = Counting(weight, steps, scores, skip=skip, kill_in_step=kill_in_step)

        def update(schedule: Schedule) -> UpdateRule:
            def apply(step: int) -> UpdateStats:
                memory.total += weight.parameters[0].grad
                weight.parameters[0].value += memory.total
                weight.refresh()
                return UpdateStats(lr=1.0, grad_norm=1.0)

            return apply

        metrics = JsonlMetrics(tmp_path / "out.metrics.jsonl")
        return Run(
            config=config,
            session=session,
            algorithm=algorithm,
            trainable=weight,
            schedule=lambda total: WarmupSchedule(
                peak=1.0, warmup_steps=0, total_steps=None, decay=lambda _: 1.0
            ),
            update=update,
            optimizer=memory,
            sinks=SinkSet({"metrics.jsonl": metrics}, lambda text: None),
            reporter=SilentReporter(),
            signature=signature or {"model": "m"},
            verify_output=lambda path: "",
        )

    return build


def test_a_run_writes_its_output_and_metrics(make: Callable[..., Run], tmp_path: Path) -> None:
    result = make().execute()
    assert (result.outcome, result.steps, result.tokens) == ("finished", 6, 60)
    assert float((tmp_path / "out.txt").read_text()) == sum(n * (n + 1) / 2 for n in range(1, 7))
    records = list(read_metrics(tmp_path / "out.metrics.jsonl"))
    assert [r["train/loss"] for r in records if "train/loss" in r] == [1 / n for n in range(1, 7)]


def test_evaluations_before_at_boundaries_and_at_the_end(make: Callable[..., Run]) -> None:
    run = make(6, [9.0, 3.0, 2.0, 1.0], evaluation={"data": "e"})
    result = run.execute()
    assert result.first_evaluation is not None
    assert result.last_evaluation is not None
    assert (result.first_evaluation.score, result.last_evaluation.score, result.best_step) == (9.0, 1.0, 6)


def test_patience_stops_and_keeps_the_best(make: Callable[..., Run], tmp_path: Path) -> None:
    run = make(
        20,
        [9.0, 3.0, 4.0, 5.0, 0.0],
        evaluation={"data": "e", "patience": 2},
        checkpoint={"directory": str(tmp_path / "c"), "mode": "best_eval"},
    )
    result = run.execute()
    assert (result.outcome, result.steps, result.best_step) == ("stopped early", 6, 2)
    assert (tmp_path / "c" / "best.state").is_dir()
    assert float((tmp_path / "c" / "best.gguf").read_text()) == 4.0


@pytest.mark.parametrize(
    ("checkpoint", "kept"),
    [
        ({"mode": "best_eval"}, "best.gguf"),
        ({"mode": "steps", "every_steps": 1}, "step-000002.gguf"),
        ({"mode": "steps", "every_steps": 3}, None),
        (None, None),
    ],
)
def test_the_summary_says_where_the_best_adapter_is(
    make: Callable[..., Run], tmp_path: Path, checkpoint: dict[str, Any] | None, kept: str | None
) -> None:
    tables = {} if checkpoint is None else {"checkpoint": {"directory": str(tmp_path / "c"), **checkpoint}}
    result = make(4, [9.0, 3.0, 4.0], evaluation={"data": "e"}, **tables).execute()
    [line] = [line for line in result.summary() if "best evaluation" in line]
    if kept is not None:
        assert line.endswith(f"at step 2, not at the end: its adapter is {tmp_path / 'c' / kept}")
        assert result.best_adapter is not None
        assert float(result.best_adapter.read_text()) == 4.0
    else:
        assert 'mode = "best_eval" would have kept its adapter' in line
        assert result.best_adapter is None


def test_min_delta_counts_small_gains_as_none(make: Callable[..., Run]) -> None:
    run = make(20, [9.0, 3.0, 2.95, 2.9], evaluation={"data": "e", "patience": 2, "min_delta": 0.5})
    assert run.execute().best_step == 2


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_resume_equals_no_interruption(make: Callable[..., Run], tmp_path: Path, stop: int) -> None:
    class KillError(Exception):
        pass

    class Stop:
        @hookimpl
        def retrograd_step_finished(self, run: Run, report: StepReport) -> None:
            if report.step == stop + 1:
                raise KillError

    settings = {"checkpoint": {"directory": str(tmp_path / "c"), "mode": "steps", "every_steps": stop}}
    first = make().execute()
    whole = (tmp_path / "out.txt").read_text()
    with pytest.raises(PluginError, match="KillError"):
        make(hooks=Stop(), **settings).execute()
    resumed = make(**settings).execute(tmp_path / "c" / f"step-{stop:06d}.state")
    assert (tmp_path / "out.txt").read_text() == whole
    assert (resumed.steps, resumed.tokens) == (6, first.tokens * (6 - stop) // 6)
    steps = [r["step"] for r in read_metrics(tmp_path / "out.metrics.jsonl") if "train/loss" in r]
    assert steps[-6:] == [1, 2, 3, 4, 5, 6]


def test_ctrl_c_finishes_the_step_and_saves(make: Callable[..., Run], tmp_path: Path) -> None:
    class Interrupt:
        @hookimpl
        def retrograd_step_finished(self, run: Run, report: StepReport) -> None:
            if report.step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    result = make(hooks=Interrupt()).execute()
    assert (result.outcome, result.steps) == ("interrupted", 3)
    assert result.checkpoint == tmp_path / "out.checkpoints" / "step-000003.state"
    assert (tmp_path / "out.txt").exists()
    finished = make().execute(result.checkpoint)
    assert (finished.outcome, finished.steps) == ("finished", 6)


@pytest.mark.parametrize("scores", [[9.0, 3.0, 2.0, 1.0], [9.0, 3.0, 4.0, 5.0, 6.0]])
def test_ctrl_c_at_a_boundary_saves_first_and_evaluates_after_the_resume(
    make: Callable[..., Run], scores: list[float]
) -> None:
    tables: dict[str, Any] = {"evaluation": {"data": "e", "patience": 2}}
    whole = make(6, list(scores), **tables).execute()
    interrupted = make(6, list(scores), kill_in_step=2, **tables).execute()
    assert (interrupted.outcome, interrupted.steps) == ("interrupted", 2)
    assert interrupted.last_evaluation is None
    resumed = make(6, scores[1:], **tables).execute(interrupted.checkpoint)
    assert (resumed.outcome, resumed.steps, resumed.best_step) == (
        whole.outcome,
        whole.steps,
        whole.best_step,
    )


def test_ctrl_c_twice_stops_at_once(make: Callable[..., Run]) -> None:
    class Twice:
        @hookimpl
        def retrograd_step_finished(self, run: Run, report: StepReport) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make(hooks=Twice()).execute()


def test_an_output_that_cannot_be_written_leaves_a_checkpoint(
    make: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "out.txt").mkdir()
    with pytest.raises(OSError, match="directory"):
        make().execute()
    (tmp_path / "out.txt").rmdir()
    assert make().execute(tmp_path / "out.checkpoints" / "step-000006.state").steps == 6
    assert (tmp_path / "out.txt").is_file()


def test_a_checkpoint_of_another_run_is_refused_with_the_fields(
    make: Callable[..., Run], tmp_path: Path
) -> None:
    settings = {"checkpoint": {"directory": str(tmp_path / "c"), "mode": "steps", "every_steps": 2}}
    make(**settings).execute()
    with pytest.raises(CheckpointError) as caught:
        make(signature={"model": "other"}, **settings).execute(tmp_path / "c" / "step-000002.state")
    assert "model" in str(caught.value)
    assert "other" in str(caught.value)


def test_skipped_steps_are_counted_and_too_many_stop_the_run(make: Callable[..., Run]) -> None:
    assert make(skip=[2, 4]).execute().skipped_steps == 2
    with pytest.raises(TrainingError, match="not finite"):
        make(20, skip=range(3, 3 + MAX_SKIPPED_IN_A_ROW)).execute()


def test_an_audit_error_stops_before_the_first_step(make: Callable[..., Run]) -> None:
    run = make()
    run.algorithm.findings = [AuditFinding(level="error", check="stop token", message="not in the mask")]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="stop token: not in the mask"):
        run.execute()


def test_hooks_are_called_within_the_budget(make: Callable[..., Run], tmp_path: Path) -> None:
    calls: list[str] = []

    class Count:
        @hookimpl
        def retrograd_run_started(self, run: Run) -> None:
            calls.append("started")

        @hookimpl
        def retrograd_step_finished(self, run: Run, report: StepReport) -> None:
            calls.append("step")

        @hookimpl
        def retrograd_evaluated(self, run: Run, report: EvaluationReport) -> None:
            calls.append("evaluated")

        @hookimpl
        def retrograd_checkpoint_saved(self, run: Run, path: Path) -> None:
            calls.append("checkpoint")

        @hookimpl
        def retrograd_run_finished(self, run: Run, error: BaseException | None) -> None:
            calls.append(f"finished {error}")

    run = make(
        6,
        [9.0, 3.0, 2.0, 1.0],
        hooks=Count(),
        evaluation={"data": "e"},
        checkpoint={"directory": str(tmp_path / "c"), "mode": "steps_and_best_eval", "every_steps": 1},
    )
    run.execute()
    assert calls[0] == "started"
    assert calls[-1] == "finished None"
    assert calls.count("step") == 6
    assert len(calls) - 2 <= 10 * 6


def test_a_hook_that_raises_is_named(make: Callable[..., Run]) -> None:
    class Bad:
        @hookimpl
        def retrograd_step_finished(self, run: Run, report: StepReport) -> None:
            raise ValueError("no")

    with pytest.raises(PluginError, match="retrograd_step_finished: a hook raised ValueError: no"):
        make(hooks=Bad()).execute()


def test_a_hook_that_raises_at_the_end_does_not_hide_the_failure(make: Callable[..., Run]) -> None:
    class Bad:
        @hookimpl
        def retrograd_run_finished(self, run: Run, error: BaseException | None) -> None:
            raise ValueError("no")

    with pytest.raises(PluginError, match="retrograd_run_finished: a hook raised ValueError: no"):
        make(hooks=Bad()).execute()
    with pytest.raises(TrainingError, match="not finite"):
        make(hooks=Bad(), skip=range(1, 1 + MAX_SKIPPED_IN_A_ROW)).execute()


def test_an_evaluation_that_is_not_finite_is_never_the_best(make: Callable[..., Run], tmp_path: Path) -> None:
    nan = float("nan")
    run = make(
        8,
        [9.0, nan, 5.0, nan, 6.0],
        evaluation={"data": "e"},
        checkpoint={"directory": str(tmp_path / "c"), "mode": "steps_and_best_eval", "every_steps": 1},
    )
    assert run.execute().best_step == 4


def test_a_failed_run_leaves_a_checkpoint(make: Callable[..., Run], tmp_path: Path) -> None:
    class Bad:
        @hookimpl
        def retrograd_step_finished(self, run: Run, report: StepReport) -> None:
            if report.step == 4:
                raise ValueError("no")

    with pytest.raises(PluginError):
        make(hooks=Bad()).execute()
    saved = tmp_path / "out.checkpoints" / "step-000004.state"
    assert make().execute(saved).steps == 6
