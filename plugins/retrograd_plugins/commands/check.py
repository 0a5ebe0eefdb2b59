"""`retrograd check`: everything that can be found wrong without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrograd.cli.options import config_argument, model_options, set_option
from retrograd_hookspecs import Component, NoConfig, RetrogradError, hookimpl


@click.command(name="check", help="Validate CONFIG, its data, model and plugins; estimate memory and time.")
@config_argument
@model_options
@set_option
@click.option("--show", default=1, show_default=True, help="Examples to show with their trained tokens.")
def check(config: Path, model: str | None, device: str | None, overrides: tuple[str, ...], show: int) -> int:
    """Report every problem (exit 2), else the audit, an estimate of memory, and the time of a step."""
    import sys

    from retrograd.cli.document import open_document
    from retrograd.preview import preview
    from retrograd.progress import PlainReporter

    try:
        document = open_document(config, model=model, device=device, overrides=overrides)
        found = preview(document, PlainReporter(sys.stderr), examples=show)
    except RetrogradError as error:
        error.exit_code = 2  # whatever stands in the way of a run is a problem of what was checked
        raise
    for line in found.lines():
        click.echo(line)
    return 2 if found.failed else 0


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`check`."""
    return [
        Component(
            name="check",
            config=NoConfig,
            build=lambda config, context: check,
            summary="Validate a TOML file, its data, model and plugins.",
        )
    ]
