"""`retrograd profile`: where the time and the memory of a training step go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrograd.cli.options import config_argument, model_options, set_option
from retrograd_hookspecs import Component, NoConfig, hookimpl


@click.command(name="profile", help="Run a few steps of CONFIG; show time and memory by phase and kernel.")
@config_argument
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps to measure.")
@model_options
@set_option
def profile(
    config: Path, steps: int, model: str | None, device: str | None, overrides: tuple[str, ...]
) -> None:
    """Writes no files."""
    import sys

    from retrograd.cli.document import open_document
    from retrograd.profiling import profile_run
    from retrograd.progress import PlainReporter

    document = open_document(config, model=model, device=device, overrides=overrides)
    for line in profile_run(document, PlainReporter(sys.stderr), steps=steps):
        click.echo(line)


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`profile`."""
    return [
        Component(
            name="profile",
            config=NoConfig,
            build=lambda config, context: profile,
            summary="Show where time and memory of a step go.",
        )
    ]
