"""The TOML keys that an attrs class declares, with their types resolved."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from retrograd_hookspecs import KeyInfo, PluginError, key_info

from .messages import one_of, show


@attrs.frozen(kw_only=True)
class ConfigKey:
    """One key: its name, resolved type, default and documentation."""

    name: str
    type: Any
    info: KeyInfo
    required: bool
    default: Any = None
    """The default, made by its factory if it has one; None where the key is required."""


def keys_of(cls: type[Any]) -> tuple[ConfigKey, ...]:
    """The keys of a configuration class, in the order of its fields.

    Raises:
        PluginError: `cls` is not an attrs class, an annotation cannot be resolved, or it is of a type
            that TOML has not.
    """
    target: Any = cls  # to mypy a class is not hashable
    return _keys_of(target)


@functools.cache
def _keys_of(cls: Any) -> tuple[ConfigKey, ...]:
    label = f"{cls.__module__}.{cls.__qualname__}"
    if not attrs.has(cls):
        raise PluginError(f"{label}: a configuration must be an attrs class with `key(...)` fields")
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except (NameError, AttributeError, TypeError) as error:
        raise PluginError(
            f"{label}: a key's annotation cannot be resolved: {error}; import the name at the top of"
            f" {cls.__module__}, outside `if TYPE_CHECKING`"
        ) from error
    keys = []
    for field in attrs.fields(cls):
        info = key_info(field)
        if info is None or not field.init:
            continue
        if not _is_supported(hints[field.name]):
            raise PluginError(
                f"{label}.{field.name}: {hints[field.name]!r} is not a type that a TOML key can have (int,"
                " float, bool, str, Path, Literal, tuple[X, ...], Mapping[str, X], attrs classes, and"
                " unions of them)"
            )
        required = field.default is attrs.NOTHING
        keys.append(
            ConfigKey(
                name=field.name,
                type=hints[field.name],
                info=info,
                required=required,
                default=None if required else _default(field),
            )
        )
    return tuple(keys)


def _default(field: attrs.Attribute[Any]) -> Any:
    default = field.default
    # attrs.Factory is typed as a function, so isinstance needs its runtime class.
    factory = getattr(default, "factory", None)
    return factory() if factory is not None and not getattr(default, "takes_self", False) else default


def optional_arms(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union without None; a type that is no union is its only one."""
    if is_union(annotation):
        return tuple(arm for arm in get_args(annotation) if arm is not type(None))
    return (annotation,)


def is_union(annotation: Any) -> bool:
    """True for `X | Y` and `Union[X, Y]`, so also for `Optional[X]`."""
    return get_origin(annotation) in (Union, types.UnionType)


def is_literal(annotation: Any) -> bool:
    """True for `Literal[...]`."""
    return get_origin(annotation) is Literal


def element_type(annotation: Any) -> Any | None:
    """X for `tuple[X, ...]`, `list[X]` and `Sequence[X]`; None for anything else."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return arguments[0]
    if origin in (list, Sequence) and len(arguments) == 1:
        return arguments[0]
    return None


def mapped_type(annotation: Any) -> Any | None:
    """X for `dict[str, X]` and `Mapping[str, X]`; None for anything else."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (dict, Mapping) and len(arguments) == 2 and arguments[0] is str:
        return arguments[1]
    return None


_SCALARS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
}
_PLURALS = {
    int: "integers",
    float: "numbers",
    bool: "booleans",
    str: "strings",
    Path: "paths",
}


def describe(annotation: Any) -> str:
    """What a value of this type is called in messages: `an array of strings`."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if is_literal(annotation):
        return one_of(get_args(annotation))
    if is_union(annotation):
        arms = optional_arms(annotation)
        literals = [show(value) for arm in arms if is_literal(arm) for value in get_args(arm)]
        others = [describe(arm) for arm in arms if not is_literal(arm)]
        return " or ".join(others + ([f"one of {', '.join(literals)}"] if literals else []))
    element = element_type(annotation)
    if element is not None:
        return "an array" if element is Any else f"an array of {_plural(element)}"
    if attrs.has(annotation) or mapped_type(annotation) is not None:
        return "a table"
    return "a value"


def _is_supported(annotation: Any) -> bool:
    if annotation in _SCALARS or annotation is Any or is_literal(annotation) or attrs.has(annotation):
        return True
    if is_union(annotation):
        return all(_is_supported(arm) for arm in optional_arms(annotation))
    inner = element_type(annotation) or mapped_type(annotation)
    return inner is not None and _is_supported(inner)


def _plural(annotation: Any) -> str:
    if annotation in _PLURALS:
        return _PLURALS[annotation]
    return "tables" if attrs.has(annotation) else f"values, each {describe(annotation)}"
