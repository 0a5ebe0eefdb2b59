"""`write_file`: create or replace a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd.agent.tools import FunctionToolFactory, NoParams
from retrograd_hookspecs import Component, NoConfig, Sandbox, StepResult, hookimpl

from ._files import checked_path, write_text


async def _write(sandbox: Sandbox, arguments: Mapping[str, Any], params: NoParams) -> StepResult:
    path = checked_path(arguments["path"])
    size = await write_text(sandbox, path, arguments["content"])
    return StepResult(observation=f"wrote {size} bytes to {path}")


FACTORY = FunctionToolFactory(
    description="Create a file or replace it, with the directories that it is in.",
    properties={
        "path": {"type": "string", "description": "Path of the file."},
        "content": {"type": "string", "description": "The whole text of the file."},
    },
    required=("path", "content"),
    params=NoParams,
    function=_write,
)


@hookimpl
def retrograd_tool_factories() -> list[Component[NoConfig, Any]]:
    """`write_file`."""
    return [
        Component(
            name="write_file",
            config=NoConfig,
            build=lambda config, context: FACTORY,
            summary="Create or replace a file.",
        )
    ]
