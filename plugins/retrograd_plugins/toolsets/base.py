"""`base`: a shell and files."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import Component, NoConfig, ToolDefinition, ToolsetDefinition, hookimpl

TOOLS = ("bash", "read_file", "write_file", "edit_file", "list_dir", "grep", "submit")

TOOLSET = ToolsetDefinition(
    name="base",
    tools=TOOLS,
    definitions=tuple(ToolDefinition(id=name, version="1", builtin={"factory": name}) for name in TOOLS),
)


@hookimpl
def retrograd_toolsets() -> list[Component[NoConfig, Any]]:
    """`base`."""
    return [
        Component(
            name="base",
            config=NoConfig,
            build=lambda config, context: TOOLSET,
            summary="A shell and files.",
        )
    ]
