"""`retrograd plugins list`."""

from __future__ import annotations

from typing import Any

import click

from retrograd_hookspecs import Component, NoConfig, hookimpl


@click.group(name="plugins", help="Show installed plugins.")
def plugins() -> None:
    """Group of plugin commands."""


@plugins.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--kind", help="Only this kind (algorithms, losses, …).")
def list_plugins(as_json: bool, kind: str | None) -> None:
    """List every installed plugin: kind, name, distribution, version, module."""
    import json

    from retrograd.plugins import Catalogue
    from retrograd_hookspecs import KINDS

    if kind is not None and kind not in KINDS:
        raise click.UsageError(f"--kind: {kind!r} is not a kind; kinds: {', '.join(KINDS)}")
    entries = [e for e in Catalogue.installed().all() if kind in (None, e.kind)]
    if as_json:
        rows = [
            {
                "kind": e.kind,
                "name": e.name,
                "distribution": e.distribution,
                "version": e.version,
                "module": e.module,
            }
            for e in entries
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    width = max((len(e.name) for e in entries), default=0)
    current = ""
    for entry in entries:
        if entry.kind != current:
            current = entry.kind
            click.echo(f"{current}:")
        click.echo(f"  {entry.name:<{width}}  {entry.distribution} {entry.version}")


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`plugins`."""
    return [
        Component(
            name="plugins",
            config=NoConfig,
            build=lambda config, context: plugins,
            summary="Show installed plugins.",
        )
    ]
