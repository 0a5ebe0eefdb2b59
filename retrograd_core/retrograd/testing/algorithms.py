"""Contract of an algorithm: `check_algorithm(make)` raises `AssertionError` where it is broken."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from retrograd_hookspecs import Algorithm, EvaluationReport, StepReport, Trainable, UpdateStats

Make = Callable[[], tuple[Algorithm, Trainable]]
_LEARNED = ("train/", "reward/", "policy/", "batch/")
_LEVELS = {"ok", "note", "warning", "error"}


def check_algorithm(make: Make, *, steps: int = 4, stop: int = 2, lr: float = 0.05) -> None:
    """Check what can be said of any algorithm.

    Args:
        make: a new one, not prepared yet, and what it trains, on a new model and the same small data: a run
            of at least `steps` optimizer steps.
        stop: the step at which a run is interrupted.

    After `prepare` it knows its length and its signature, which is JSON and the same each time; `show` and
    `rehearse` change nothing; reports count optimizer steps from 1 and come one an update; stopped after a
    report, saved, and loaded into a new instance, a run ends with the bytes of one that was not stopped;
    `evaluate` gives the same twice; `close` may be called twice.
    """
    algorithm, trainable = make()
    findings = algorithm.prepare()
    for finding in findings:
        assert finding.level in _LEVELS, f"prepare(): {finding.level!r} is no level of a finding"
        assert finding.level != "error", f"prepare() of good data finds an error: {finding.message}"
    total = algorithm.total_steps()
    assert total is None or total >= steps, f"total_steps() is {total}: the check needs {steps}"
    assert algorithm.longest() >= 1, "longest() is the length of a sequence"
    shown = algorithm.show(2)
    assert len(shown) <= 2, f"show(2) gives {len(shown)} texts"
    assert all(isinstance(text, str) for text in shown), "show() gives texts"
    signature = _plain(algorithm.signature(), "signature()")
    before = _weights(trainable)
    algorithm.rehearse()
    assert _weights(trainable) == before, "rehearse() changed what is trained"
    assert not any(np.asarray(p.grad).any() for p in trainable.parameters), "rehearse() leaves gradients"
    _check_evaluation(algorithm)
    algorithm.close()
    algorithm.close()

    algorithm, trainable = make()
    algorithm.prepare()
    reports = _run(algorithm, _Descent(trainable, lr), steps)
    assert _weights(trainable) != before, f"{steps} steps changed nothing"
    whole = _weights(trainable)
    algorithm.close()

    first, part = make()
    first.prepare()
    assert _plain(first.signature(), "signature()") == signature, "the same run has another signature"
    begun = _run(first, _Descent(part, lr), stop)
    state, values = first.state(), [p.value.copy() for p in part.parameters]
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    _plain({name: value for name, value in state.items() if name not in arrays}, "state()")
    first.close()

    second, rest = make()
    second.prepare()
    for parameter, value in zip(rest.parameters, values, strict=True):
        parameter.value[...] = value
    rest.refresh()
    second.load(state)
    begun += _run(second, _Descent(rest, lr), steps, first=stop + 1)
    second.close()
    assert _weights(rest) == whole, "a run that was stopped and resumed ends with other weights"
    for one, other in zip(reports, begun, strict=True):
        assert _told(one) == _told(other), (
            f"step {one.step}: a resumed run reports {_told(other)}, not {_told(one)}"
        )


class _Descent:
    """Plain gradient descent, which has no state of its own. Implements `UpdateRule`."""

    def __init__(self, trainable: Trainable, lr: float) -> None:
        self._trainable = trainable
        self._lr = lr
        self.steps: list[int] = []

    def __call__(self, step: int) -> UpdateStats:
        self.steps.append(step)
        square = 0.0
        for parameter in self._trainable.parameters:
            grad = np.asarray(parameter.grad, np.float32)
            square += float(np.sum(grad.astype(np.float64) ** 2))
            parameter.value -= np.float32(self._lr) * grad
            parameter.grad[...] = 0.0
        self._trainable.refresh()
        return UpdateStats(lr=self._lr, grad_norm=math.sqrt(square))


def _run(algorithm: Algorithm, update: _Descent, last: int, *, first: int = 1) -> list[StepReport]:
    """The reports of steps `first` to `last`."""
    reports: list[StepReport] = []
    for report in algorithm.run(update):
        if report.stalled:
            continue
        reports.append(report)
        expected = first + len(reports) - 1
        assert report.step == expected, f"report {expected} is called step {report.step}"
        assert update.steps == list(range(first, expected + 1)), (
            f"step {expected}: the updates {update.steps} were asked for"
        )
        assert report.metrics, f"step {expected} reports no metrics"
        for name, value in report.metrics.items():
            assert isinstance(value, float | int), f"step {expected}: {name} is no number: {value!r}"
        if report.step == last:
            return reports
    raise AssertionError(f"the run ended after {len(reports)} reports, before step {last}")


def _check_evaluation(algorithm: Algorithm) -> None:
    found = [algorithm.evaluate(limit=2) for _ in range(2)]
    one, other = found
    if one is None or other is None:
        assert one is other, "evaluate() gives a report only now and then"
        return
    assert isinstance(one, EvaluationReport)
    assert math.isfinite(one.score), f"evaluate(): the score is {one.score}"
    assert one.score == other.score, f"evaluate() gives {one.score}, then {other.score}"


def _told(report: StepReport) -> Mapping[str, float]:
    """What was learned, and from what: not how long it took, nor what a cache had."""
    return {name: value for name, value in report.metrics.items() if name.startswith(_LEARNED)}


def _plain(value: Any, what: str) -> Any:
    assert json.loads(json.dumps(value)) == value, f"{what} is not plain JSON"
    return value


def _weights(trainable: Trainable) -> Sequence[bytes]:
    return [parameter.value.tobytes() for parameter in trainable.parameters]
