"""`retrograd merge`: another name of `retrograd export`."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import Component, NoConfig, hookimpl
from retrograd_plugins.commands.export import export_command


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`merge`."""
    return [
        Component(
            name="merge",
            config=NoConfig,
            build=lambda config, context: export_command("merge"),
            summary="The same as `export`.",
        )
    ]
