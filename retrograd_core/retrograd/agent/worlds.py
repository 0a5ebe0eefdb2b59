"""For environments that share nothing between trajectories: a provider out of a function that makes a world.

::

    def _build(config: WordleConfig, context: BuildContext) -> EnvironmentProvider:
        return WorldProvider(lambda scenario: Wordle(config), check=task_problems, tools=TOOLS)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from retrograd_hookspecs import (
    AuditFinding,
    DataError,
    Environment,
    Problem,
    Scenario,
    StepResult,
    ToolSpec,
)

Check = Callable[[Scenario], Iterable[str]]
"""What is wrong with a scenario, a message each."""


class WorldProvider:
    """Implements `retrograd_hookspecs.EnvironmentProvider`.

    Args:
        make: a new world for a scenario; called once a trajectory.
        check: finds what is wrong with a scenario, before the first rollout.
        tools: what worlds offer, for `tools list` and the run's signature.
        signature: what else must be equal for a checkpoint to be resumed, JSON-compatible.
        scenario_keys: what `env` of a scenario may hold; see `EnvironmentProvider`.
    """

    def __init__(
        self,
        make: Callable[[Scenario], Environment],
        *,
        check: Check | None = None,
        tools: Sequence[ToolSpec] = (),
        signature: Mapping[str, Any] | None = None,
        scenario_keys: str = "",
    ) -> None:
        self.scenario_keys = scenario_keys
        self._make = make
        self._check = check
        self._tools = tuple(tools)
        self._signature = dict(signature or {})

    async def prepare(self, scenarios: Sequence[Scenario]) -> Sequence[AuditFinding]:
        """Check all scenarios. Raises: `DataError` with every message."""
        if self._check is None:
            return ()
        problems = [
            Problem(where=scenario.origin or scenario.id, key="metadata.env", message=message)
            for scenario in scenarios
            for message in self._check(scenario)
        ]
        if problems:
            raise DataError(problems)
        return ()

    async def acquire(self, scenario: Scenario) -> Environment:
        """A new world."""
        return self._make(scenario)

    def catalogue(self) -> Mapping[str, Sequence[ToolSpec]]:
        """The tools, under the name of no toolset."""
        return {"": self._tools} if self._tools else {}

    def signature(self) -> Mapping[str, Any]:
        """The tools and what was given."""
        tools = [[tool.name, tool.description, dict(tool.input_schema)] for tool in self._tools]
        return {**self._signature, "tools": tools}

    async def warm_up(self, count: int) -> None:
        """Nothing to warm."""

    def metrics(self) -> Mapping[str, float]:
        """None."""
        return {}

    async def close(self) -> None:
        """Nothing is shared."""


def observation(text: str, *, reward: float | None = None, done: bool = False) -> StepResult:
    """What an action gave."""
    return StepResult(observation=text, reward=reward, done=done)


def mistake(text: str) -> StepResult:
    """An action that the model got wrong: an observation with `ERROR: ` before it; the episode goes on."""
    return StepResult(observation=text, is_error=True)
