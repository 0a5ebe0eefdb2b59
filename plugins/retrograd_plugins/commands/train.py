"""`retrograd train`: run the algorithm of a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrograd.cli.options import model_options, set_option
from retrograd_hookspecs import Component, NoConfig, hookimpl


@click.command(name="train", help="Train as CONFIG says, and write the result.")
@click.argument("config", type=click.Path(path_type=Path), required=False, metavar="CONFIG")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[CHECKPOINT]",
    help="Go on from a .state directory; without a value from the newest step, else the best.",
)
@model_options
@set_option
def train(
    config: Path | None,
    resume: str | None,
    model: str | None,
    device: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Assemble, audit, train; exit code 0 on success, 1 if the run was interrupted."""
    import sys

    from retrograd.cli.document import open_document, resume_command
    from retrograd.progress import terminal_reporter
    from retrograd.session import start_run

    if config is None:
        if resume is None or Path(resume).suffix != ".toml":
            raise click.UsageError("Missing argument 'CONFIG'.")
        config, resume = Path(resume), ""  # `--resume run.toml`: click took the file for the checkpoint
    document = open_document(config, model=model, device=device, overrides=overrides)
    reporter = terminal_reporter(sys.stderr)
    run, checkpoint = start_run(document, reporter, resume=resume)
    result = run.execute(checkpoint)
    for line in result.summary():
        click.echo(line)
    if result.checkpoint is not None:
        command = resume_command(config, result.checkpoint, model=model, device=device, overrides=overrides)
        click.echo(f"go on with: {command}", err=True)
        return 1
    return 0


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`train`."""
    return [
        Component(
            name="train",
            config=NoConfig,
            build=lambda config, context: train,
            summary="Train as a TOML file says.",
        )
    ]
