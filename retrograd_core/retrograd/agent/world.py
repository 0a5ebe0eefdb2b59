"""One trajectory's environment and tools, guarded: whatever they raise costs that trajectory alone."""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
import attrs

from retrograd.tool_prompt import openai_tool
from retrograd_hookspecs import (
    Environment,
    Problem,
    RetrogradError,
    RolloutError,
    Scenario,
    Score,
    StepResult,
    ToolCall,
    ToolSpec,
)

from .arguments import check_schema, fitted, validate_arguments

CLOSE_SECONDS = 60.0
"""How long a world may take to close, also where the run was asked to stop."""

T = TypeVar("T")


class SharedTools(Protocol):
    """Tools that all trajectories share (MCP servers)."""

    def specs(self) -> Sequence[ToolSpec]:
        """In a fixed order."""

    def origin(self, name: str) -> str:
        """What offers a tool, for messages: `MCP server 'calc'`."""

    def signature(self) -> Mapping[str, Any]:
        """What must be equal for a checkpoint to be resumed: what the model sees of the tools."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Run a call. Raises `RolloutError` if the server is gone."""


class NoTools:
    """No shared tools."""

    def specs(self) -> Sequence[ToolSpec]:
        return ()

    def origin(self, name: str) -> str:
        raise RolloutError(f"there is no tool {name!r}")

    def signature(self) -> Mapping[str, Any]:
        return {}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        raise RolloutError(f"there is no tool {name!r}")


async def guarded(what: str, work: Awaitable[T], kind: type[T] | None = None) -> T:
    """Await what a plugin does. Raises `RolloutError` for whatever it raises, and for a result that is not of
    the kind that its contract says."""
    try:
        result = await work
    except RetrogradError as error:
        if isinstance(error, RolloutError):
            raise
        raise RolloutError(str(error)) from error
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RolloutError(
            f"{what} raised {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        ) from error
    if kind is not None and not isinstance(result, kind):
        raise RolloutError(f"{what} gave {type(result).__name__}, not {kind.__name__}")
    return result


class World:
    """An environment with its life from `reset` to `close`."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def reset(self, scenario: Scenario, seed: int) -> str:
        """The opening observation, "" for none."""
        what = "the environment's reset"
        return _text(what, await guarded(what, self._environment.reset(scenario, seed)) or "")

    async def tools(self) -> tuple[ToolSpec, ...]:
        """What it offers."""
        what = "the environment's tools"
        specs = tuple(await guarded(what, self._environment.tools(), Iterable))
        for spec in specs:
            if not isinstance(spec, ToolSpec):
                raise RolloutError(f"{what} gave {type(spec).__name__}, not ToolSpec")
        return specs

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Act."""
        what = f"the environment's step {name!r}"
        return checked(what, await guarded(what, self._environment.step(name, arguments), StepResult))

    async def grade(self) -> Score:
        """The final reward; of kind "error" if it is no finite number."""
        score = await guarded("the environment's grade", self._environment.grade(), Score)
        if score.kind == "value" and not _is_finite(score.value):
            return Score(kind="error", explanation=f"the reward is {score.value}, not a finite number")
        return score

    async def state(self) -> str | None:
        """The final state."""
        what = "the environment's state"
        text = await guarded(what, self._environment.state())
        return None if text is None else _text(what, text)

    async def close(self) -> str:
        """Close it, cancelled or not; "" or what went wrong."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS) as limit:
            try:
                await guarded("the environment's close", self._environment.close())
            except RolloutError as error:
                return str(error)
        return f"it did not close within {CLOSE_SECONDS:g} s" if limit.cancelled_caught else ""


class Belt:
    """The tools of one trajectory: the world's own, then the shared ones.

    Raises: `RolloutError` if two have one name, or an input schema is no JSON Schema.
    """

    def __init__(self, own: Sequence[ToolSpec], shared: SharedTools, world: World | None) -> None:
        self._specs: dict[str, ToolSpec] = {}
        self._own = {spec.name for spec in own}
        for number, spec in enumerate((*own, *shared.specs())):
            if spec.name in self._specs:
                origins = "twice by the environment"
                if number >= len(own):
                    origins = f"by the environment and by {shared.origin(spec.name)}"
                raise RolloutError(f"the tool {spec.name!r} is offered {origins}")
            check_schema(spec)
            self._specs[spec.name] = spec
        self._shared = shared
        self._world = world

    def catalogue(self) -> tuple[Mapping[str, Any], ...]:
        """In OpenAI's function shape."""
        return tuple(openai_tool(s.name, s.description, s.input_schema) for s in self._specs.values())

    def fitted(self, call: ToolCall) -> ToolCall:
        """The call with its arguments read as the tool's schema asks for."""
        spec = self._specs.get(call.name)
        return call if spec is None else attrs.evolve(call, arguments=fitted(spec, call))

    def problem(self, call: ToolCall) -> str | None:
        """Why a call cannot be run, for the model; None if it can."""
        spec = self._specs.get(call.name)
        if spec is None:
            known = ", ".join(sorted(self._specs)) or "none"
            return f"there is no tool {call.name!r}; tools: {known}"
        return validate_arguments(spec, call.arguments)

    async def call(self, call: ToolCall) -> StepResult:
        """Run a call that has no problem."""
        if call.name in self._own:
            assert self._world is not None
            return await self._world.step(call.name, call.arguments)
        what = f"the tool {call.name!r}"
        return checked(what, await guarded(what, self._shared.call(call.name, call.arguments), StepResult))


def clashes(own: Mapping[str, Iterable[str]], shared: SharedTools) -> list[Problem]:
    """Shared tools that have the name of one of the environment's. `own` has the names of each toolset."""
    toolsets: dict[str, str] = {}
    for toolset, names in own.items():
        for name in names:
            toolsets.setdefault(name, f"environment's toolset {toolset!r}" if toolset else "environment")
    return [
        Problem(
            where=shared.origin(spec.name),
            message=f"its tool {spec.name!r} is one of the {toolsets[spec.name]}, too",
            hint="add it to the server's denied_tools, or have the environment not offer it",
        )
        for spec in shared.specs()
        if spec.name in toolsets
    ]


def checked(what: str, result: StepResult) -> StepResult:
    """The result with a text that tokenizers can read. Raises: `RolloutError` if its text is none, or its
    reward is no finite number."""
    if result.reward is not None and not _is_finite(result.reward):
        raise RolloutError(f"{what} gave the reward {result.reward!r}, not a finite number")
    return attrs.evolve(result, observation=_text(what, result.observation))


def _text(what: str, text: Any) -> str:
    if not isinstance(text, str):
        raise RolloutError(f"{what} gave {type(text).__name__}, not a text")
    return clean(text)


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def clean(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which no tokenizer can read."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
