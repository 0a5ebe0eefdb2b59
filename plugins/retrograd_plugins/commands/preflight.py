"""`retrograd preflight`: which kernel serves each op of a training step."""

from __future__ import annotations

from typing import Any

import click

from retrograd.cli.options import model_options
from retrograd_hookspecs import Component, NoConfig, hookimpl


@click.command(name="preflight", help="Show which kernel serves each op of a training step.")
@model_options
@click.option("--targets", multiple=True, help="LoRA targets; default those of [lora].targets.")
@click.option("--strict", is_flag=True, help="Fail if any op is served by a fallback.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def preflight(
    model: str | None, device: str | None, targets: tuple[str, ...], strict: bool, as_json: bool
) -> int:
    """Exit code 1 with `--strict` if a fallback would run."""
    import json

    from retrograd.cli.document import model_document
    from retrograd.inspection import served_ops

    if model is None:
        raise click.UsageError("--model is required")
    rows = served_ops(model_document(model, device=device), targets)
    slow = [row for row in rows if not row.fast]
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        for row in rows:
            click.echo(row.line())
        click.echo(f"{len(rows)} ops, {len(slow)} served by fallbacks")
    return 1 if strict and slow else 0


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`preflight`."""
    return [
        Component(
            name="preflight",
            config=NoConfig,
            build=lambda config, context: preflight,
            summary="Show which kernel serves each op.",
        )
    ]
