"""The command line. Subcommands are plugins (`retrograd.commands`), imported when they are asked for."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module, metadata

import click

_GROUP = "retrograd.commands"
ENTRY_POINT = "retrograd.entry_point"
"""Key of the context's `meta` under which the entry point of the command stands that is running."""


class _PluginGroup(click.Group):
    """A group whose commands are entry points. Only metadata is read to list them."""

    def _points(self) -> dict[str, list[metadata.EntryPoint]]:
        """By name: one entry point, or several where distributions offer the same name."""
        points: dict[str, list[metadata.EntryPoint]] = {}
        for point in metadata.entry_points(group=_GROUP):
            same = points.setdefault(point.name.replace("_", "-"), [])
            if point.value not in {other.value for other in same}:
                same.append(point)
        return points

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._points())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        points = self._points().get(name)
        if points is None:
            return None
        if len(points) > 1:
            owners = " and ".join(_owner(point) for point in points)
            return _broken(name, f"is offered by {owners}; uninstall one")
        [point] = points
        ctx.meta[ENTRY_POINT] = point
        try:
            components = import_module(point.value).retrograd_commands()
            component = next(c for c in components if c.name == point.name)
            command: click.Command = component.build(component.config(), None)
        except Exception as error:
            return _broken(name, f"of {_owner(point)} does not load: {type(error).__name__}: {error}")
        return command


def _show_log() -> None:
    """What the packages log (a download, for one) goes to stderr as plain lines."""
    import logging

    for name in ("retrograd", "retrograd_plugins"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(message)s"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)


def _broken(name: str, reason: str) -> click.Command:
    """Stands for a command that cannot be loaded, so that the others still can be listed and run."""

    def fail(arguments: tuple[str, ...]) -> None:
        raise click.ClickException(f"the command {name!r} {reason}")

    return click.Command(
        name,
        callback=fail,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        short_help=f"({reason})",
    )


def _owner(point: metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


@click.command(
    cls=_PluginGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="retrograd", prog_name="retrograd")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Fine-tune GGUF language models on one machine from one TOML file."""
    ctx.obj = {"debug": debug}


def main(arguments: list[str] | None = None) -> None:
    """Entry point: exit 0 on success, 1 on a failed run, 2 on a usage or configuration error."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the command line in this process and return its exit code."""
    stdout = sys.stdout
    _show_log()
    try:
        status = cli.main(arguments, prog_name="retrograd", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show(sys.stderr)
        return error.exit_code if error.exit_code != 1 else 2
    except SystemExit as stop:
        if sys.stdout is not stdout:
            return 0  # click silenced it: its reader went away (`retrograd … | head`), nothing is wrong
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped", err=True)
        return 130
    except Exception as error:
        from retrograd_hookspecs import RetrogradError

        if "--debug" in arguments:
            traceback.print_exc()
        if isinstance(error, RetrogradError):
            click.echo(f"error: {error}", err=True)
            return error.exit_code
        if "--debug" not in arguments:
            click.echo(
                f"error: {type(error).__name__}: {error}\nThis is a fault in retrograd or a plugin;"
                " `retrograd --debug …` shows where.",
                err=True,
            )
        return 1
