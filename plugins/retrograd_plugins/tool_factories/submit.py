"""`submit`: end the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd.agent.tools import FunctionToolFactory, NoParams
from retrograd_hookspecs import Component, NoConfig, Sandbox, StepResult, hookimpl


async def _submit(sandbox: Sandbox, arguments: Mapping[str, Any], params: NoParams) -> StepResult:
    return StepResult(observation="submitted", done=True)


FACTORY = FunctionToolFactory(
    description="End the task. Call it when the work is done; its result is then checked and cannot be"
    " changed.",
    properties={},
    params=NoParams,
    function=_submit,
)


@hookimpl
def retrograd_tool_factories() -> list[Component[NoConfig, Any]]:
    """`submit`."""
    return [
        Component(
            name="submit",
            config=NoConfig,
            build=lambda config, context: FACTORY,
            summary="End the task.",
        )
    ]
