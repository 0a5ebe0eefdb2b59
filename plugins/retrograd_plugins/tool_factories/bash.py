"""`bash`: a command in a shell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd.agent.tools import FunctionToolFactory
from retrograd_hookspecs import Component, NoConfig, Sandbox, StepResult, hookimpl

from ._programs import ProgramParams, argument, run_program


async def _run(sandbox: Sandbox, arguments: Mapping[str, Any], params: ProgramParams) -> StepResult:
    command = argument(arguments["command"], "command")
    return await run_program(sandbox, ("bash", "-c", command), params)


FACTORY = FunctionToolFactory(
    description="Run a command with bash in the working directory. Shows its exit code, stdout and stderr."
    " Each call starts a new shell: changes of directory and variables are not kept.",
    properties={"command": {"type": "string", "description": "The command, of one or more lines."}},
    required=("command",),
    params=ProgramParams,
    function=_run,
)


@hookimpl
def retrograd_tool_factories() -> list[Component[NoConfig, Any]]:
    """`bash`."""
    return [
        Component(
            name="bash",
            config=NoConfig,
            build=lambda config, context: FACTORY,
            summary="Run a command in a shell.",
        )
    ]
