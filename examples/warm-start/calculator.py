"""The environment `calculator`: a word problem a trajectory, worked out with one tool, answered with another.

A local hook file; a run names it in `[plugins] load`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retrograd.agent import WorldProvider, observation
from retrograd_hookspecs import Component, NoConfig, Scenario, Score, StepResult, ToolSpec, hookimpl

OPERATIONS = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__}


def _tool(name: str, description: str, **properties: Mapping[str, Any]) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return ToolSpec(name=name, description=description, input_schema=schema | {"additionalProperties": False})


INTEGER = {"type": "integer"}
TOOLS = (
    _tool(
        "calculate",
        "Calculate with two numbers.",
        operation={"type": "string", "enum": list(OPERATIONS)},
        a=INTEGER,
        b=INTEGER,
    ),
    _tool("answer", "Give the answer; it ends the task.", value=INTEGER),
)


class Calculator:
    """A trajectory. The reward is 1 if `answer` was called with `metadata.env.answer`, else 0."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._given: int | None = None

    async def reset(self, scenario: Scenario, seed: int) -> str | None:
        """Nothing is shown before the first turn."""
        return None

    async def tools(self) -> Sequence[ToolSpec]:
        """Both."""
        return TOOLS

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Run a call; its arguments fit the tool's schema."""
        if name == "answer":
            self._given = int(arguments["value"])
            return observation("", done=True)
        calculate = OPERATIONS[arguments["operation"]]
        return observation(str(calculate(int(arguments["a"]), int(arguments["b"]))))

    async def grade(self) -> Score:
        """Was the answer right?"""
        return Score(kind="value", value=float(self._given == self._wanted))

    async def state(self) -> str | None:
        """What was answered."""
        return f"answered {self._given}, right is {self._wanted}"

    async def close(self) -> None:
        """Nothing is held."""


def problems(scenario: Scenario) -> Iterator[str]:
    """What is wrong with a scenario."""
    if type(scenario.env.get("answer")) is not int:
        yield 'needs the right answer, an integer: {"answer": 82}'


@hookimpl
def retrograd_environments() -> list[Component[NoConfig, WorldProvider]]:
    """`calculator`."""
    return [
        Component(
            name="calculator",
            config=NoConfig,
            build=lambda config, context: WorldProvider(
                lambda scenario: Calculator(scenario.env["answer"]), check=problems, tools=TOOLS
            ),
            summary="Word problems with a calculator.",
        )
    ]
