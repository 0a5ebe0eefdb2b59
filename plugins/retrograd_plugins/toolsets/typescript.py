"""`typescript`: a shell, files, Node.js and `npm test`."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import Component, NoConfig, ToolDefinition, ToolsetDefinition, hookimpl

TOOLSET = ToolsetDefinition(
    name="typescript",
    include=("base",),
    tools=("node", "npm_test"),
    definitions=(
        ToolDefinition(id="node", version="1", builtin={"factory": "node"}),
        ToolDefinition(
            id="npm_test",
            version="1",
            name="run_tests",
            builtin={"factory": "run_tests", "params": {"runner": "npm"}},
        ),
    ),
)


@hookimpl
def retrograd_toolsets() -> list[Component[NoConfig, Any]]:
    """`typescript`."""
    return [
        Component(
            name="typescript",
            config=NoConfig,
            build=lambda config, context: TOOLSET,
            summary="A shell, files, Node.js and `npm test`.",
        )
    ]
