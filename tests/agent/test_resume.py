"""An agentic run that is stopped at any moment of an update and resumed ends as one that was not."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from retrograd.engine import TrainingEngine
from retrograd.engine.generation import DecodingBatch
from retrograd_plugins.algorithms.agent_grpo import AgenticGrpo
from tests.algorithms.test_resume import Counted, in_a_fork, interrupt, kill, nothing, trace

from . import support
from .support import EVERY, SMALL, Agents, call, right, sum_scenario

PHASES: Mapping[str, tuple[type, str]] = {
    "while turns are drawn": (DecodingBatch, "step"),
    "while a world starts": (support.SumsWorld, "reset"),
    "while a tool works": (support.SumsWorld, "step"),
    "while a world grades": (support.SumsWorld, "grade"),
    "in a pass": (TrainingEngine, "_train_pass"),
    "before an evaluation": (AgenticGrpo, "evaluate"),
}
"""A method that is called in each phase of a run."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Whole:
    return Whole(Agents(tmp_path_factory.mktemp("whole"), tiny_model(**SMALL)))


class Whole:
    """The undisturbed run, done once, and how often each phase comes in it."""

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        agents.scenarios([sum_scenario(n, grade="step", partial=0.25) for n in range(2)])
        agents.scenarios([sum_scenario(7)], "heldout.jsonl")
        agents.script({EVERY: [call("submit", answer="?")], 0: right(0), 3: right(1)[1:]})
        self.path = agents.agent(
            training={"lr": 0.02, "lr_scheduler": "linear", "warmup_steps": 1},
            agent={"updates": 2, "scenarios_per_update": 1, "group_size": 3, "epochs_per_update": 2},
            evaluation={"data": "heldout.jsonl", "every_iterations": 2},
            checkpoint={"directory": "checkpoints", "mode": "steps_and_best_eval", "every_steps": 1},
        )
        with pytest.MonkeyPatch.context() as patch:
            counted = {phase: Counted(*place, patch, nothing) for phase, place in PHASES.items()}
            agents.train(self.path)
        self.calls = {phase: one.calls for phase, one in counted.items()}
        self.adapter, self.trace = agents.adapter, trace(agents)  # type: ignore[arg-type]

    def clear(self) -> None:
        for name in ("out", "checkpoints"):
            if (self.agents / name).exists():
                shutil.rmtree(self.agents / name)

    def resumed(self) -> None:
        """Resume, and compare."""
        found = self.agents.train(self.path, "--resume")
        assert "resumed from" in found.err
        assert self.agents.adapter == self.adapter
        assert trace(self.agents) == self.trace  # type: ignore[arg-type]


def at(phase: str, calls: int) -> int:
    """The call of a phase that is cut short: in the second update, where there is one."""
    return calls if phase == "before an evaluation" else max(calls * 3 // 4, 1)


@pytest.mark.parametrize("phase", ["while turns are drawn", "while a tool works", "before an evaluation"])
def test_sigkill(whole: Whole, phase: str) -> None:
    whole.clear()

    def killed() -> None:
        with pytest.MonkeyPatch.context() as patch:
            Counted(*PHASES[phase], patch, kill, at(phase, whole.calls[phase]))
            whole.agents.train(whole.path, code=None)

    assert in_a_fork(killed) == -signal.SIGKILL
    assert whole.agents.states()
    whole.resumed()


@pytest.mark.parametrize("phase", ["while a world starts", "while a world grades", "in a pass"])
def test_ctrl_c(whole: Whole, phase: str) -> None:
    """Worlds are closed, each once."""
    whole.clear()
    with pytest.MonkeyPatch.context() as patch:
        Counted(*PHASES[phase], patch, interrupt, at(phase, whole.calls[phase]))
        opened = Counted(support.SumsProvider, "acquire", patch, nothing)
        closed = Counted(support.SumsWorld, "close", patch, nothing)
        found = whole.agents.train(whole.path, code=1)
    assert opened.calls == closed.calls > 0
    assert "interrupted after" in found.out
    assert "go on with: retrograd train" in found.err
    whole.resumed()


def test_what_has_changed_is_refused(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    whole.clear()
    with pytest.MonkeyPatch.context() as patch:
        Counted(*PHASES["in a pass"], patch, interrupt, at("in a pass", whole.calls["in a pass"]))
        whole.agents.train(whole.path, code=1)
    agents, scenarios = whole.agents, (whole.agents / "scenarios.jsonl").read_text()

    def refused(what: str) -> None:
        assert what in "\n".join(agents.train(whole.path, "--resume", code=None).errors)

    agents.scenarios([sum_scenario(5)])
    refused("scenarios")
    (agents / "scenarios.jsonl").write_text(scenarios)
    agents.scenarios([sum_scenario(9)], "heldout.jsonl")
    refused("held-out scenarios")
    agents.scenarios([sum_scenario(7)], "heldout.jsonl")
    fewer = [tool.name for tool in support.TOOLS[:-1]]
    monkeypatch.setattr(support.SumsProvider, "signature", lambda self: {"tools": fewer})
    refused("environment")
