"""Built-in tools as functions: what factories of plugins are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import attrs

from retrograd.config import Document, structure
from retrograd_hookspecs import ConfigError, Sandbox, StepResult, ToolDefinition, ToolSpec

P = TypeVar("P")


class ToolFault(Exception):  # noqa: N818 - it is an observation, not an error of the program
    """What the model has to be told: raised by the function of a tool, shown with `is_error`."""


@attrs.frozen(kw_only=True)
class NoParams:
    """A factory without parameters."""


@attrs.frozen(kw_only=True)
class FunctionToolFactory(Generic[P]):
    """Makes tools that are one async function: `function(sandbox, arguments, params)`.

    Args:
        description: what the model reads, unless a definition has another text.
        properties: JSON Schema of each argument; those named in `required` must be given.
        params: attrs class of `builtin.params`, its fields declared with `retrograd_hookspecs.key`.
        function: gives an observation, or a `StepResult`; raises `ToolFault` for what the model did wrong.
    """

    description: str | Callable[[P], str]
    properties: Mapping[str, Mapping[str, Any]]
    required: tuple[str, ...] = ()
    params: type[P]
    function: Callable[[Sandbox, Mapping[str, Any], P], Awaitable[StepResult]]

    def make(self, definition: ToolDefinition) -> FunctionTool[P]:
        """The tool. Raises `ConfigError` with the name of each wrong parameter."""
        given = (definition.builtin or {}).get("params") or {}
        params, problems = structure(self.params, Document.from_values(given).table(""))
        if params is None:
            raise ConfigError(problems)
        own = self.description if isinstance(self.description, str) else self.description(params)
        return FunctionTool(
            spec=ToolSpec(
                name=definition.name or definition.id,
                description=definition.description or own,
                input_schema={
                    "type": "object",
                    "properties": {name: dict(schema) for name, schema in self.properties.items()},
                    "required": list(self.required),
                    "additionalProperties": False,
                },
                version=definition.version,
            ),
            params=params,
            function=self.function,
        )


@attrs.frozen(kw_only=True)
class FunctionTool(Generic[P]):
    """A tool with its parameters."""

    spec: ToolSpec
    params: P
    function: Callable[[Sandbox, Mapping[str, Any], P], Awaitable[StepResult]]

    async def call(self, sandbox: Sandbox, arguments: Mapping[str, Any]) -> StepResult:
        """Call the function; a `ToolFault` is its observation."""
        try:
            return await self.function(sandbox, arguments, self.params)
        except ToolFault as fault:
            return StepResult(observation=str(fault), is_error=True)
