"""Files that a run reads and writes: what can be said about them before anything is loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from retrograd_hookspecs import Problem

from .config import SHARED_SECTIONS, Document, SharedSections, keys_of
from .config.run_config import UnknownValueError


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all; what had the name stays until it is complete.

    Raises: `OSError`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def output_problem(path: Path, name: str, *, force: bool) -> Problem | None:
    """Why the file that `name` (an option) gives cannot be written; None if it can."""
    if path.is_dir():
        return Problem(where=name, message=f"{path} is a directory", hint="give the name of a file in it")
    if path.exists() and not force:
        return Problem(where=name, message=f"{path} exists", hint="--force replaces it")
    obstacle = _obstacle(path.absolute().parent)
    if obstacle is not None:
        return Problem(where=name, message=f"{path} cannot be written: {obstacle}", hint="give another path")
    return None


def input_keys(classes: Mapping[str, type[Any]]) -> list[str]:
    """Dotted keys of the files that are read (`key(..., input=True)`); `classes` by table."""
    return [f"{table}.{key.name}" for table, cls in classes.items() for key in keys_of(cls) if key.info.input]


def file_problems(
    shared: SharedSections,
    components: Mapping[str, Any],
    *,
    algorithm: bool,
    unread: Collection[str] = (),
) -> Iterator[Problem]:
    """Input files that are missing, and outputs that cannot be written.

    Args:
        components: configuration object by table; None where its table is wrong.
        algorithm: False for a command that only loads a model: no data is read and nothing is written.
        unread: keys of files that the command does not read.
    """
    inputs = dict(_model(shared))
    if algorithm:
        inputs.update(_inputs(shared, components))
    for key, path in inputs.items():
        if not path.exists() and key not in unread:
            yield _problem(shared.document, key, f"there is no file {path}", "check the path")
    if algorithm:
        yield from _output(shared, inputs)
        yield from _checkpoints(shared)
        yield from _observed(shared)


def _model(shared: SharedSections) -> Iterator[tuple[str, Path]]:
    # Structuring made a local path absolute and left a locator (`pypi:…`) as it is.
    path = Path(_value(shared, "model.path") or "")
    if path.is_absolute():
        yield "model.path", path


def _inputs(shared: SharedSections, components: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    for dotted in input_keys(SHARED_SECTIONS):
        value = _value(shared, dotted)
        if isinstance(value, Path):
            yield dotted, value
    for table, config in components.items():
        if config is not None:
            for dotted in input_keys({table: type(config)}):
                value = getattr(config, dotted.removeprefix(f"{table}."))
                if isinstance(value, Path):
                    yield dotted, value


def _output(shared: SharedSections, inputs: Mapping[str, Path]) -> Iterator[Problem]:
    path = _value(shared, "output.path")
    if path is None:
        return
    message, hint = "", "give another path"
    if path.is_dir():
        message, hint = f"{path} is a directory", "give the name of a file in it"
    elif (obstacle := _obstacle(path.parent)) is not None:
        message = f"{path} cannot be written: {obstacle}"
    for key, source in inputs.items():
        if path.exists() and source.exists() and path.samefile(source):
            message = f"the result would replace {source}, which is {key}"
    if message:
        yield _problem(shared.document, "output.path", message, hint)


def _checkpoints(shared: SharedSections) -> Iterator[Problem]:
    directory = _value(shared, "checkpoint.directory")
    obstacle = _obstacle(directory) if directory is not None else None
    if obstacle is not None:
        message = f"no checkpoint can be written to {directory}: {obstacle}"
        yield _problem(shared.document, "checkpoint.directory", message, "give another directory")


def _observed(shared: SharedSections) -> Iterator[Problem]:
    directory = _value(shared, "observe.directory")
    if directory is None or _value(shared, "observe.enabled") is False:
        return
    if (obstacle := _obstacle(directory)) is not None:
        message = f"nothing can be recorded in {directory}: {obstacle}"
        yield _problem(shared.document, "observe.directory", message, "give another directory")


def _obstacle(directory: Path) -> str | None:
    """Why no file can be created in a directory that exists or will be made; None if one can."""
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not existing.is_dir():
        return f"{existing} is not a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable"
    return None


def _value(shared: SharedSections, key: str) -> Any:
    try:
        return shared.value(key)
    except UnknownValueError:
        return None


def _problem(document: Document, key: str, message: str, hint: str) -> Problem:
    return Problem(where=document.where(key), key=key, message=message, hint=hint)
