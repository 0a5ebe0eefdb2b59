"""reasoning-gym as an environment, one task a trajectory.

::

    [agent.environment]
    type = "reasoning_gym"
    dataset = "chain_sum"
    size = 1000
    [agent.environment.options]
    min_terms = 2
    max_terms = 4

A scenario names its task, `"metadata": {"env": {"index": 7}}`, and may name a dataset of its own:
`{"dataset": "countdown", "options": {"max_numbers": 4}, "index": 0}`. The question follows the user's
message; `submit_answer` ends the episode, and the reward is the dataset's own score of the answer.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import anyio.to_thread
import attrs

from retrograd.agent import WorldProvider, mistake, observation
from retrograd_hookspecs import (
    BuildContext,
    Component,
    EnvironmentProvider,
    RolloutError,
    Scenario,
    Score,
    StepResult,
    ToolSpec,
    hookimpl,
    key,
)

from .tasks import Source, Task, TaskError, Tasks

_KEYS = ("dataset", "size", "seed", "options", "index")
SUBMIT = ToolSpec(
    name="submit_answer",
    description="Give the final answer to the task, and nothing else than the answer. This ends the task.",
    input_schema={
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The answer."}},
        "required": ["answer"],
        "additionalProperties": False,
    },
)


@attrs.frozen(kw_only=True)
class ReasoningGymConfig:
    """A task of reasoning-gym a trajectory."""

    dataset: str | None = key(None, doc="Dataset of scenarios that name none.", default_text="none")
    size: int = key(500, minimum=1, unit="tasks", doc="Tasks of a dataset.")
    seed: int = key(42, minimum=0, doc="Seed of a dataset.")
    options: Mapping[str, Any] = key(
        factory=dict, doc="Keys of the dataset's own configuration, such as its difficulty."
    )


class ReasoningGym:
    """One task. Implements `retrograd_hookspecs.Environment`."""

    def __init__(self, config: ReasoningGymConfig, tasks: Tasks) -> None:
        self._config = config
        self._tasks = tasks
        self._task: Task | None = None
        self._answer: str | None = None

    async def reset(self, scenario: Scenario, seed: int) -> str:
        """The question. A scenario without an index gets the task that the seed chooses."""
        source = source_of(self._config, scenario.env)
        index = int(scenario.env.get("index", seed % source.size))
        try:
            self._task = await anyio.to_thread.run_sync(self._tasks.task, source, index)
        except TaskError as error:
            raise RolloutError(str(error)) from error
        return self._task.question

    async def tools(self) -> Sequence[ToolSpec]:
        """`submit_answer`."""
        return (SUBMIT,)

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Take the answer."""
        answer = arguments["answer"].strip()
        if not answer:
            return mistake("the answer is empty")
        self._answer = answer
        return observation("The answer was submitted.", done=True)

    async def grade(self) -> Score:
        """The dataset's score; that of no answer if none was given."""
        assert self._task is not None
        try:
            score = await anyio.to_thread.run_sync(partial(self._tasks.score, self._task, self._answer))
        except Exception as error:  # a dataset may choke on an answer: that is no reward of 0
            return Score(kind="error", explanation=f"{type(error).__name__}: {error}")
        if not math.isfinite(score):
            return Score(kind="error", explanation=f"the dataset scored {score}")
        return Score(kind="value", value=score)

    async def state(self) -> str:
        """The answer."""
        return "no answer" if self._answer is None else self._answer

    async def close(self) -> None:
        """Nothing is open."""


def source_of(config: ReasoningGymConfig, env: Mapping[str, Any]) -> Source:
    """The dataset of a scenario. One with a dataset of its own has options of its own."""
    own = "dataset" in env
    return Source(
        dataset=str(env.get("dataset", config.dataset or "")),
        size=int(env.get("size", config.size)),
        seed=int(env.get("seed", config.seed)),
        options=dict(env.get("options", {} if own else config.options)),
    )


def _problems(config: ReasoningGymConfig, tasks: Tasks, scenario: Scenario) -> Iterator[str]:
    env = scenario.env
    unknown = sorted(set(env) - set(_KEYS))
    if unknown:
        yield f"unknown key {unknown[0]!r}; known: {', '.join(map(repr, _KEYS))}"
        return
    for name, kind in (("dataset", str), ("size", int), ("seed", int), ("options", dict), ("index", int)):
        if name in env and (not isinstance(env[name], kind) or isinstance(env[name], bool)):
            yield f"{name} must be of the kind {kind.__name__}, is {env[name]!r}"
            return
    if not env.get("dataset", config.dataset):
        yield "names no dataset, and [agent.environment].dataset is not given"
        return
    try:
        tasks.task(source_of(config, env), env.get("index", 0))
    except TaskError as error:
        yield str(error)


def _build(config: ReasoningGymConfig, context: BuildContext) -> EnvironmentProvider:
    tasks = Tasks()
    return WorldProvider(
        lambda scenario: ReasoningGym(config, tasks),
        check=lambda scenario: _problems(config, tasks, scenario),
        tools=(SUBMIT,),
        signature={
            "reasoning-gym": importlib.metadata.version("reasoning-gym"),
            "config": attrs.asdict(config),
        },
    )


@hookimpl
def retrograd_environments() -> list[Component[ReasoningGymConfig, EnvironmentProvider]]:
    """`reasoning_gym`."""
    return [
        Component(
            name="reasoning_gym",
            config=ReasoningGymConfig,
            build=_build,
            summary="A task of reasoning-gym a trajectory.",
            source="Stojanovski et al. 2025, REASONING GYM",
        )
    ]
