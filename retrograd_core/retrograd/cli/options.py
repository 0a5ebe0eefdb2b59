"""Arguments that commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def config_argument(function: F) -> F:
    """CONFIG, an existing TOML file."""
    return click.argument("config", type=click.Path(path_type=Path))(function)


def model_options(function: F) -> F:
    """`--model` and `--device`, which override `[model]`."""
    function = click.option(
        "--device",
        help="auto (a GPU if there is one), cpu, gpu, or the name of an installed backend.",
    )(function)
    return click.option("--model", help="GGUF file or locator; overrides [model].path.")(function)


def set_option(function: F) -> F:
    """`--set a.b=v`, repeatable."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a key of the file, e.g. --set training.lr=1e-4. Repeatable.",
    )(function)
