"""`retrograd config-schema`: the JSON Schema of run files, installed plugins included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrograd_hookspecs import Component, NoConfig, hookimpl


@click.command(name="config-schema", help="Print the JSON Schema of run files, for editors.")
@click.option(
    "--load",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Local hook file, as in [plugins] load; repeatable.",
)
def config_schema(files: tuple[Path, ...]) -> None:
    """Write the schema to stdout; all installed plugins' keys are in it."""
    import json

    from retrograd.installed import installed_schema

    click.echo(json.dumps(installed_schema(files), indent=2, ensure_ascii=False))


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`config-schema`."""
    return [
        Component(
            name="config_schema",
            config=NoConfig,
            build=lambda config, context: config_schema,
            summary="Print the JSON Schema of run files.",
        )
    ]
