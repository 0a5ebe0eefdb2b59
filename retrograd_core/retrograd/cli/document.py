"""From a command line to a configuration."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrograd.config import Document


def open_document(
    config: Path,
    *,
    model: str | None = None,
    device: str | None = None,
    overrides: Sequence[str] = (),
) -> Document:
    """Read the file and lay `--model`, `--device` and `--set` over it, the later over the earlier.

    Raises: `ConfigError` if it cannot be read, or leaves out the command that is running.
    """
    from retrograd.config import load_document

    document = load_document(config)
    if model is not None:
        document = document.with_value("model.path", model, where="--model")
    if device is not None:
        document = document.with_value("model.device", device, where="--device")
    for assignment in overrides:
        document = document.with_set(assignment)
    _refuse_if_left_out(document)
    return document


def _refuse_if_left_out(document: Document) -> None:
    """A command is called before the file is read, so `[plugins] disable` can only refuse it here."""
    import click

    from retrograd.plugins import PluginEntry
    from retrograd_hookspecs import ConfigError, Problem

    from . import ENTRY_POINT

    context = click.get_current_context(silent=True)
    point = context.meta.get(ENTRY_POINT) if context is not None else None
    disable = document.get("plugins.disable")
    if point is None or not isinstance(disable, list | tuple):
        return
    entry = PluginEntry.of_point("commands", point)
    problems = [
        Problem(
            where=document.where("plugins.disable"),
            key="plugins.disable",
            message=f"{name!r} leaves out the command {entry.name.replace('_', '-')!r} for this file",
            hint="take it out of the list, or use another command",
        )
        for name in disable
        if isinstance(name, str) and entry.left_out_by(name)
    ]
    if problems:
        raise ConfigError(problems)


def resume_command(
    config: Path,
    checkpoint: Path,
    *,
    model: str | None = None,
    device: str | None = None,
    overrides: Sequence[str] = (),
) -> str:
    """The command that goes on from a checkpoint of a run that was started with these options."""
    words = ["retrograd", "train", str(config), "--resume", str(checkpoint)]
    words += ["--model", model] if model is not None else []
    words += ["--device", device] if device is not None else []
    for assignment in overrides:
        words += ["--set", assignment]
    return shlex.join(words)


def model_document(model: str, *, device: str | None = None) -> Document:
    """A configuration for commands that need a model and nothing else."""
    from retrograd.config import Document

    values: dict[str, dict[str, str]] = {"model": {"path": model}}
    if device is not None:
        values["model"]["device"] = device
    return Document.from_values(values, name="command line")
