"""`python`: a shell, files, Python and pytest."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import Component, NoConfig, ToolDefinition, ToolsetDefinition, hookimpl

TOOLSET = ToolsetDefinition(
    name="python",
    include=("base",),
    tools=("python", "pytest"),
    definitions=(
        ToolDefinition(id="python", version="1", builtin={"factory": "python"}),
        ToolDefinition(
            id="pytest",
            version="1",
            name="run_tests",
            builtin={"factory": "run_tests", "params": {"runner": "pytest"}},
        ),
    ),
)


@hookimpl
def retrograd_toolsets() -> list[Component[NoConfig, Any]]:
    """`python`."""
    return [
        Component(
            name="python",
            config=NoConfig,
            build=lambda config, context: TOOLSET,
            summary="A shell, files, Python and pytest.",
        )
    ]
