"""`retrograd quickstart`: train a small model on a small task, and show what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrograd.cli.options import model_options, set_option
from retrograd_hookspecs import Component, NoConfig, hookimpl

SHOWN = 4
"""Held-out prompts whose answers are shown."""


@click.command(
    name="quickstart",
    help="Write an example into DIRECTORY, train it, and compare answers before and after.",
)
@click.argument("directory", type=click.Path(path_type=Path), default=Path("retrograd-quickstart"))
@model_options
@set_option
def quickstart(directory: Path, model: str | None, device: str | None, overrides: tuple[str, ...]) -> int:
    """Files that are there already are used as they are: edit them and run again."""
    import sys

    from retrograd.answers import first_turns, greedy_answers
    from retrograd.cli.document import open_document, resume_command
    from retrograd.progress import terminal_reporter
    from retrograd.session import open_run

    for path in write_files(directory):
        click.echo(f"wrote {path}")
    config = directory / "quickstart.toml"
    document = open_document(config, model=model, device=device, overrides=overrides)
    reporter = terminal_reporter(sys.stderr)
    run, assembly = open_run(document, reporter)
    prompts = first_turns(directory / "heldout.jsonl", SHOWN)
    reporter.message("answers of the base model …")
    before = greedy_answers(assembly, prompts)
    result = run.execute()
    after = greedy_answers(assembly, prompts)
    click.echo("\nHeld-out prompts:")
    for prompt, old, new in zip(prompts, before, after, strict=True):
        click.echo(f"\n  prompt:  {prompt[-1].content}")
        click.echo(f"  before:  {_short(old)}")
        click.echo(f"  after:   {_short(new)}")
    click.echo()
    for line in result.summary():
        click.echo(line)
    system = next((message.content for message in prompts[0] if message.role == "system"), "")
    option = f' --system "{system}"' if system else ""
    click.echo(f"\nTalk to it: retrograd chat {config} --compare{option}")
    if result.checkpoint is not None:
        command = resume_command(config, result.checkpoint, model=model, device=device, overrides=overrides)
        click.echo(f"go on with: {command}", err=True)
        return 1
    return 0


def write_files(directory: Path) -> list[Path]:
    """Copy the example's files that are not there yet; returns those written."""
    from importlib.resources import files

    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted(
        files("retrograd_plugins").joinpath("quickstart_data").iterdir(), key=lambda f: f.name
    ):
        path = directory / source.name
        if source.is_file() and not path.exists():
            path.write_bytes(source.read_bytes())
            written.append(path)
    return written


def _short(text: str, width: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`quickstart`."""
    return [
        Component(
            name="quickstart",
            config=NoConfig,
            build=lambda config, context: quickstart,
            summary="Train a small model on a small task, and show what changed.",
        )
    ]
