"""A TOML file as values that know where they were written."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from retrograd_hookspecs import ConfigError, Problem

from .scanner import KeyPath, scan
from .syntax import syntax_problem

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@attrs.frozen
class Origin:
    """Where a value was given, and the directory against which a relative path in it resolves."""

    where: str
    base_dir: Path


@attrs.frozen(eq=False, kw_only=True)
class Document:
    """The values of a configuration with the origin of each. Immutable: overrides give a new document."""

    name: str
    """The file's name as the user gave it, or `Trainer(...)`."""
    base_dir: Path
    values: Mapping[str, Any]
    origins: Mapping[KeyPath, Origin]
    overrides: tuple[str, ...] = ()
    """What was set over the file, for the record: `--set training.lr`."""

    @classmethod
    def from_values(
        cls, values: Mapping[str, Any], *, name: str = "Trainer(...)", base_dir: Path | None = None
    ) -> Document:
        """A document that Python code builds; every problem in it is reported at `name`."""
        base = (base_dir or Path.cwd()).absolute()
        return cls(name=name, base_dir=base, values=copy.deepcopy(dict(values)), origins={})

    def origin(self, path: KeyPath) -> Origin:
        """Where `path` was given; for a path that is not given, where its nearest parent was."""
        for length in range(len(path), 0, -1):
            found = self.origins.get(path[:length])
            if found is not None:
                return found
        return Origin(self.name, self.base_dir)

    def where(self, key: str = "") -> str:
        """`file:line` of a dotted key; `file` alone if not even its section is given."""
        return self.origin(split_key(key)).where

    def table(self, name: str) -> RawTable:
        """The table of a dotted name, "training" or "optimizer.muon", given or not."""
        return RawTable(self, split_key(name))

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value of a dotted key, or `default` if it is not given."""
        value = self.value(split_key(key))
        return default if value is None else value

    def value(self, path: KeyPath) -> Any:
        """The raw value at a path, or None: TOML has no null."""
        value: Any = self.values
        for part in path:
            if isinstance(part, str) and isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(part, int) and isinstance(value, list | tuple) and -1 < part < len(value):
                value = value[part]
            else:
                return None
        return value

    def with_value(
        self, key: str | KeyPath, value: Any, *, where: str, base_dir: Path | None = None
    ) -> Document:
        """This document with `key` set to `value`, as a command-line flag does.

        `where` names the flag in messages (`--model`). Relative paths in the value resolve against
        `base_dir`, by default the working directory.

        Raises:
            ConfigError: a parent of the key is not a table.
        """
        path = split_key(key) if isinstance(key, str) else key
        values = copy.deepcopy(dict(self.values))
        container: Any = values
        for depth, part in enumerate(path[:-1], start=1):
            container = _enter(container, part, path[:depth], where)
        _assign(container, path[-1], value, path, where)
        origins = {known: origin for known, origin in self.origins.items() if known[: len(path)] != path}
        origin = Origin(where, (base_dir or Path.cwd()).absolute())
        for depth in range(1, len(path)):
            origins.setdefault(path[:depth], origin)
        origins[path] = origin
        return attrs.evolve(self, values=values, origins=origins, overrides=(*self.overrides, where))

    def with_set(self, assignment: str, *, base_dir: Path | None = None) -> Document:
        """This document with one `--set KEY=VALUE` applied.

        VALUE is read as TOML; what is not TOML is a string, so `--set training.optimizer=sgd` needs
        no quotes. A number in KEY is an index into an array.

        Messages and `overrides` name KEY alone: VALUE may be a secret.

        Raises:
            ConfigError: there is no `=`, KEY is not a dotted key, or a parent of it is not a table.
        """
        name, separator, text = assignment.partition("=")
        where = f"--set {name.strip()}"
        path = _parse_dotted(name.strip())
        if not separator or path is None:
            raise ConfigError(
                [Problem(where=where, message="expected KEY=VALUE", hint="for example training.lr=1e-4")]
            )
        return self.with_value(self._indexed(path), parse_value(text), where=where, base_dir=base_dir)

    def _indexed(self, names: tuple[str, ...]) -> KeyPath:
        path: KeyPath = ()
        for name in names:
            is_array = isinstance(self.value(path), list | tuple)
            path = (*path, int(name) if is_array and name.isdecimal() else name)
        return path


@attrs.frozen(eq=False)
class RawTable:
    """A table of a document as the user wrote it, given or not; values are plain Python."""

    document: Document
    path: KeyPath

    @property
    def name(self) -> str:
        """Dotted name: `training`, `agent.mcp_servers[0]`."""
        return join_key(self.path)

    @property
    def given(self) -> bool:
        """True if the table is written, even if empty."""
        return self.document.value(self.path) is not None

    @property
    def values(self) -> Mapping[str, Any]:
        """The keys that were given; empty if the table was not."""
        value = self.document.value(self.path)
        return value if isinstance(value, Mapping) else {}

    def where(self, key: str = "") -> str:
        """`file:line` of a key, or of the table for "" and for a key that is not given."""
        return self.document.origin((*self.path, key) if key else self.path).where

    def table(self, key: str) -> RawTable:
        """A sub-table."""
        return RawTable(self.document, (*self.path, key))

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value of a key, or `default` if it is not given."""
        return self.values.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self.values


def load_document(path: Path | str) -> Document:
    """Read a TOML file.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or is not TOML (with line and column).
    """
    file = Path(path)
    name = str(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        hint = "give the path of a TOML file" if isinstance(error, FileNotFoundError) else ""
        message = f"cannot read the configuration: {error.strerror or error}"
        raise ConfigError([Problem(where=name, message=message, hint=hint)]) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"not UTF-8: byte {data[error.start]:#04x}"
        raise ConfigError([Problem(where=f"{name}:{line}", message=message)]) from error
    return parse_document(text, name, base_dir=file.absolute().parent)


def parse_document(text: str, name: str, *, base_dir: Path | None = None) -> Document:
    """Read TOML text; `name` stands for the file in messages.

    Raises:
        ConfigError: the text is not TOML, with line and column.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([syntax_problem(text, name, str(error))]) from error
    except RecursionError as error:
        raise ConfigError([Problem(where=name, message="values are nested too deeply")]) from error
    base = (base_dir or Path.cwd()).absolute()
    origins = {path: Origin(f"{name}:{line}", base) for path, line in scan(text).lines.items()}
    return Document(name=name, base_dir=base, values=values, origins=origins)


def parse_value(text: str) -> Any:
    """A value from the command line: TOML where it is TOML, else the text itself."""
    stripped = text.strip()
    if "\n" not in stripped:
        try:
            parsed = tomllib.loads(f"value = {stripped}")
        except (tomllib.TOMLDecodeError, RecursionError):
            return text
        if set(parsed) == {"value"}:
            return parsed["value"]
    return text


def split_key(key: str) -> KeyPath:
    """Path of a dotted key whose parts are plain names: "training.lr"; "" is the document."""
    return tuple(key.split(".")) if key else ()


def join_key(path: KeyPath) -> str:
    """Dotted key of a path; parts that are not bare keys are quoted, indices are in brackets."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        shown = part if _BARE_KEY.fullmatch(part) else f'"{part}"'
        text += f".{shown}" if text else shown
    return text


def _parse_dotted(text: str) -> tuple[str, ...] | None:
    """The parts of a TOML dotted key, or None if the text is not one."""
    if "\n" in text or "=" in text or "#" in text:
        return None
    try:
        value: Any = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        return None
    names: list[str] = []
    while isinstance(value, dict):
        ((name, value),) = value.items()
        names.append(name)
    return tuple(names)


def _enter(container: Any, part: str | int, path: KeyPath, where: str) -> Any:
    if isinstance(container, dict) and isinstance(part, str):
        inner = container.setdefault(part, {})
    else:
        _check_index(container, part, path, where)
        inner = container[part]
    if not isinstance(inner, dict | list):
        message = "cannot set a key below this one: it is not a table"
        raise ConfigError([Problem(where=where, key=join_key(path), message=message)])
    return inner


def _assign(container: Any, part: str | int, value: Any, path: KeyPath, where: str) -> None:
    if not (isinstance(container, dict) and isinstance(part, str)):
        _check_index(container, part, path, where)
    container[part] = value


def _check_index(container: Any, part: str | int, path: KeyPath, where: str) -> None:
    length = len(container)
    if isinstance(part, int) and part < length:
        return
    known = f"0 to {length - 1}" if length else "none: it is empty"
    message = f"{join_key(path[:-1])} is an array; its elements are {known}"
    raise ConfigError([Problem(where=where, key=join_key(path), message=message)])
