"""Schedules at values worked out by hand."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from retrograd.config import Document
from retrograd_hookspecs import BuildContext, ConfigError, NoConfig, Schedule, TrainingError
from retrograd_plugins.schedules import constant, cosine, linear

MODULES = {"constant": constant, "linear": linear, "cosine": cosine}


def schedule(name: str, *, warmup: int = 0, total: int | None = 10, lr: float = 1.0) -> Schedule:
    (component,) = MODULES[name].retrograd_schedules()
    assert component.name == name
    assert component.needs == ("total_steps",)
    training = SimpleNamespace(lr=lr, warmup_steps=warmup)
    context = BuildContext(
        config=SimpleNamespace(training=training, document=Document.from_values({})),
        base_dir=Path(),
        services={"total_steps": total},
    )
    return component.build(NoConfig(), context)


def rates(chosen: Schedule, steps: int) -> list[float]:
    return [chosen.lr(step) for step in range(1, steps + 1)]


def test_constant() -> None:
    assert rates(schedule("constant", lr=0.5), 10) == [0.5] * 10
    assert rates(schedule("constant", warmup=4, total=None), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert schedule("constant", total=None).lr(10**9) == 1.0


def test_linear() -> None:
    assert rates(schedule("linear", total=4), 4) == [1.0, 0.75, 0.5, 0.25]
    assert rates(schedule("linear", warmup=2, total=6, lr=2.0), 6) == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    assert rates(schedule("linear", warmup=3, total=4), 4) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


def test_cosine() -> None:
    half = math.sqrt(0.5)
    expected = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert rates(schedule("cosine", total=4), 4) == pytest.approx(expected, rel=1e-12)
    assert rates(schedule("cosine", warmup=1, total=5), 5) == pytest.approx([1.0, *expected], rel=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_decay_falls_to_zero_right_after_the_last_step(name: str, warmup: int) -> None:
    total = 400
    values = rates(schedule(name, warmup=warmup, total=total), total)
    after = values[warmup:]
    assert after[0] == 1.0
    assert all(a > b > 0 for a, b in itertools.pairwise(after))
    assert after[-1] < 1 / 390
    # The end of the run is one step of the same size further.
    assert after[-1] - (after[-2] - after[-1]) <= 1e-12


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_run_of_unknown_length_cannot_decay(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"training.lr_scheduler.*{name}.*not known in advance.*constant"):
        schedule(name, total=None)


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [10, 11])
def test_warmup_must_leave_room(name: str, warmup: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"training.warmup_steps: {warmup} .*the run has 10 steps.*at most 9"
    ):
        schedule(name, warmup=warmup, total=10)


def test_constant_must_reach_its_rate() -> None:
    assert rates(schedule("constant", warmup=2, total=2), 2) == [0.5, 1.0]
    with pytest.raises(ConfigError, match="would never reach"):
        schedule("constant", warmup=3, total=2)


def test_steps_outside_the_run_are_refused() -> None:
    for step in (0, -1, 11):
        with pytest.raises(TrainingError, match=f"no step {step}"):
            schedule("linear").lr(step)
