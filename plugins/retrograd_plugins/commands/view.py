"""`retrograd view`: the page of a recorded run, in a browser."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from retrograd_hookspecs import Component, NoConfig, hookimpl


@click.command(name="view", help="Serve the directory of [observe] on this machine, read only, until Ctrl-C.")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port; by default one that is free is chosen."
)
@click.option("--open/--no-open", "open_page", default=False, help="Open the page in a browser.")
def view(directory: Path, port: int, open_page: bool) -> None:
    """Print the address and serve until an interrupt."""
    import webbrowser

    from retrograd.observe.server import ViewServer

    try:
        server = ViewServer(directory, port)
    except OSError as error:
        raise click.UsageError(f"port {port} cannot be used: {error.strerror}; leave --port out") from error
    with server:
        runs = server.runs
        if not runs:
            raise click.UsageError(f"{directory} holds no observe.jsonl: give the directory of [observe]")
        for address in runs:
            click.echo(address)
        click.echo("Ctrl-C ends", err=True)
        if open_page:
            webbrowser.open(runs[0])
        with contextlib.suppress(KeyboardInterrupt):
            server.serve()


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`view`."""
    return [
        Component(
            name="view",
            config=NoConfig,
            build=lambda config, context: view,
            summary="Serve the page of a recorded run on this machine.",
        )
    ]
