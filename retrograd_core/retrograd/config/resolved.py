"""`resolved.toml`: every value of a run with its defaults, as a configuration that repeats the run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import tomlkit

from retrograd_hookspecs import ComponentTable, ConfigError, Problem

from .document import join_key
from .keys import ConfigKey, keys_of
from .run_config import RunConfig
from .sections import SHARED_SECTIONS


def to_table(config: Any, *, defaults: bool = True, secrets: bool = True) -> dict[str, Any]:
    """The TOML values of a configuration object: no None, paths as strings, tuples as lists.

    Without `defaults`, keys that have their default are left out, as a user would leave them out. Without
    `secrets`, keys that may hold one are: for values that do not stay in memory.
    """
    return {
        key.name: _plain(value, defaults, secrets)
        for key, value in _items(config)
        if value is not None
        and (defaults or key.required or value != key.default)
        and (secrets or not key.info.secret)
    }


def resolved_text(config: RunConfig, components: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """The text of `resolved.toml`.

    Args:
        components: configuration object by table, as `{"sft": SftConfig(...), "optimizer.sgd": ...}`.
        versions: version by distribution, of everything that the run uses.
    """
    lines = [*_header(config, versions)]
    for name in SHARED_SECTIONS:
        section = getattr(config, name)
        if section is not None:
            lines += _table(name, section)
    types = dict(_component_tables(components))
    for name, component in components.items():
        if keys_of(type(component)) or name in types:
            lines += _table(name, component, types.get(name, ""))
    return "\n".join(lines) + "\n"


def write_resolved(
    path: Path, config: RunConfig, components: Mapping[str, Any], versions: Mapping[str, str]
) -> None:
    """Write `resolved_text` to `path`, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(resolved_text(config, components, versions), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        message = f"cannot write the resolved configuration: {error.strerror or error}"
        raise ConfigError([Problem(where=str(path), message=message)]) from error


def _header(config: RunConfig, versions: Mapping[str, str]) -> Iterator[str]:
    yield "# Every value of this run, defaults included. Paths are absolute; `retrograd train` repeats it."
    yield f"# From {_one_line(config.source)}"
    for override in config.document.overrides:
        yield f"#   with {_one_line(override)}"
    for name, version in sorted(versions.items()):
        yield f"# {name} {version}"


def _component_tables(components: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and `type` of every sub-table that is in `components` itself."""
    for name, component in components.items():
        for key, value in _items(component):
            if isinstance(value, ComponentTable):
                yield f"{name}.{key.name}", value.type


def _table(name: str, config: Any, component: str = "") -> list[str]:
    """Lines of a table: its own keys first, then sub-tables, as TOML needs them. `component`: its `type`."""
    own: list[str] = [f"type = {_toml(component)}"] if component else []
    below: list[str] = []
    given = {key.name for key, value in _items(config) if value is not None}
    for key, value in _items(config):
        label = join_key((key.name,))
        if key.info.secret and value is not None:
            own.append(f"# {label} is left out: it may hold a secret")
        elif key.info.excluded_by in given:
            own.append(f"# {label} is left out: {key.info.excluded_by} excludes it")
        elif value is None:
            own.append(f"# {label}: {key.info.default_text or 'not set'}")
        elif isinstance(value, ComponentTable):
            continue  # a table of its own, with the keys of its component
        elif attrs.has(type(value)):
            below += _table(f"{name}.{label}", value)
        elif isinstance(value, tuple) and value and all(attrs.has(type(element)) for element in value):
            for element in value:
                below += _table(f"{name}.{label}", element)
                below[below.index(f"[{name}.{label}]")] = f"[[{name}.{label}]]"
        else:
            own.append(f"{label} = {_toml(_plain(value, True, False))}")
    return ["", f"[{name}]", *own, *below]


def _items(config: Any) -> Iterable[tuple[ConfigKey, Any]]:
    return [(key, getattr(config, key.name)) for key in keys_of(type(config))]


def _plain(value: Any, defaults: bool, secrets: bool) -> Any:
    if isinstance(value, ComponentTable):
        return {"type": value.type}
    if attrs.has(type(value)):
        return to_table(value, defaults=defaults, secrets=secrets)
    if isinstance(value, Mapping):
        return {
            name: _plain(element, defaults, secrets) for name, element in value.items() if element is not None
        }
    if isinstance(value, list | tuple):
        return [_plain(element, defaults, secrets) for element in value]
    return str(value) if isinstance(value, Path) else value


def _toml(value: Any) -> str:
    """A value on one line; tables inline."""
    if isinstance(value, Mapping):
        pairs = [f"{tomlkit.key(name).as_string()} = {_toml(element)}" for name, element in value.items()]
        return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(element) for element in value) + "]"
    return str(tomlkit.item(value).as_string())


def _one_line(text: str) -> str:
    """Text for a comment, which ends at a line break and holds no control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
