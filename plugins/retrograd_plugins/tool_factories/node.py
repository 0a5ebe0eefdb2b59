"""`node`: run a JavaScript program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd.agent.tools import FunctionToolFactory
from retrograd_hookspecs import Component, NoConfig, Sandbox, StepResult, hookimpl

from ._programs import ProgramParams, run_program

_ARGV = ("env", "NO_COLOR=1", "node", "-")


async def _run(sandbox: Sandbox, arguments: Mapping[str, Any], params: ProgramParams) -> StepResult:
    return await run_program(sandbox, _ARGV, params, stdin=arguments["code"].encode())


FACTORY = FunctionToolFactory(
    description="Run a JavaScript program in the working directory. Shows its exit code, stdout and stderr:"
    " use console.log for what you want to see. Each call starts anew: variables are not kept.",
    properties={"code": {"type": "string", "description": "The program."}},
    required=("code",),
    params=ProgramParams,
    function=_run,
)


@hookimpl
def retrograd_tool_factories() -> list[Component[NoConfig, Any]]:
    """`node`."""
    return [
        Component(
            name="node",
            config=NoConfig,
            build=lambda config, context: FACTORY,
            summary="Run a JavaScript program.",
        )
    ]
