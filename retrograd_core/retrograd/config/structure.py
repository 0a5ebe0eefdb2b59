"""From TOML tables to attrs classes, strictly, with every problem found.

cattrs dispatches on the type of each key; the hooks here receive a `_Node`, a value together with its
path in the document, so a problem knows its line. Nothing is converted that the type does not allow:
7.9 is not an integer, "false" is not a boolean, "abc" is not a list.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, get_args

import attrs
import cattrs

from retrograd_hookspecs import ComponentTable, ConfigError, KeyInfo, Problem, key_info

from .document import Document, RawTable, join_key
from .keys import (
    ConfigKey,
    describe,
    element_type,
    is_literal,
    is_union,
    keys_of,
    mapped_type,
    optional_arms,
)
from .messages import bounds_text, did_you_mean, listing, one_of, show, show_typed, suggestion
from .scanner import KeyPath

T = TypeVar("T")

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+._-]+:")


@attrs.frozen(kw_only=True)
class Structured(Generic[T]):
    """A table read as its class.

    `value` is None if there is any problem. `keys` holds the value of every key that was accepted,
    defaults included, so that rules across keys can be checked in spite of problems elsewhere.
    """

    value: T | None
    keys: Mapping[str, Any]
    problems: tuple[Problem, ...]


def structure(cls: type[T], raw: RawTable, *, ignore: Collection[str] = ()) -> tuple[T | None, list[Problem]]:
    """Read a table as the attrs class `cls`: the object, or None and every problem. See `read_table`."""
    read = read_table(cls, raw, ignore=ignore)
    return read.value, list(read.problems)


def read_table(
    cls: type[T],
    raw: RawTable,
    *,
    ignore: Collection[str] = (),
    elsewhere: Mapping[str, Sequence[str]] | None = None,
) -> Structured[T]:
    """Read a table as the attrs class `cls`, whose keys are declared with `retrograd_hookspecs.key`.

    Args:
        raw: the table; one that is not given is read as empty.
        ignore: keys that select the class and are not its own, such as `type`.
        elsewhere: sections by key, to tell where a misplaced key belongs.

    Raises:
        PluginError: the class is not a configuration class, or a key has a type that TOML has not.
    """
    value = raw.document.value(raw.path)
    node = _Node({} if value is None else value, raw.document, raw.path, KeyInfo(doc=""))
    if not isinstance(node.value, Mapping):
        return Structured(value=None, keys={}, problems=(_not_a_table(node),))
    keys, given, problems = _fields(node, cls, ignore, elsewhere or {})
    if not raw.given and problems and raw.path:
        problems = [_missing_section(node, cls)]
    if problems:
        return Structured(value=None, keys=keys, problems=tuple(problems))
    try:
        return Structured(value=_build(node, cls, given), keys=keys, problems=())
    except _RefusedError as refused:
        return Structured(value=None, keys=_without(keys, refused, node), problems=refused.problems)


@attrs.frozen
class _Node:
    """A raw value, where it is, and what its key declares."""

    value: Any
    document: Document
    path: KeyPath
    info: KeyInfo

    def child(self, part: str | int, value: Any, info: KeyInfo | None = None) -> _Node:
        return _Node(value, self.document, (*self.path, part), info or self.info)

    def problem(self, message: str, hint: str = "") -> Problem:
        return Problem(
            where=self.document.origin(self.path).where, key=join_key(self.path), message=message, hint=hint
        )

    def refuse(self, message: str, hint: str = "") -> NoReturn:
        raise _RefusedError((self.problem(message, hint),))

    def refuse_value(self, wanted: str, seen: str, hint: str = "") -> NoReturn:
        """Refuse the value as seen, unless it may hold a credential."""
        if self.info.secret:
            self.refuse(f"{wanted} (the value seen is not shown: it may be secret)")
        self.refuse(f"{wanted}, got {seen}", hint)

    def wrong_type(self, expected: str, hint: str = "") -> NoReturn:
        self.refuse_value(f"expected {expected}", show_typed(self.value), hint)


class _RefusedError(Exception):
    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(*problems)
        self.problems = tuple(problems)


def _fields(
    node: _Node, cls: type[Any], ignore: Collection[str], elsewhere: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Any], dict[str, Any], list[Problem]]:
    """Accepted keys with defaults, the arguments for `cls`, and the problems."""
    declared = {key.name: key for key in keys_of(cls)}
    problems: list[Problem] = []
    given: dict[str, Any] = {}
    for name, value in node.value.items():
        if name in ignore:
            continue
        key = declared.get(name)
        if key is None:
            problems.append(_unknown_key(node.child(name, value), name, declared, elsewhere))
            continue
        try:
            given[name] = _structure_key(node.child(name, value, key.info), key)
        except _RefusedError as refused:
            problems.extend(refused.problems)
    keys = dict(given)
    for key in declared.values():
        if key.name in node.value and key.info.excluded_by in node.value:
            problems.append(_excluded(node.child(key.name, None, key.info), node.document, key))
        if key.required and key.name not in node.value:
            problems.append(node.child(key.name, None).problem("required key is missing", key.info.doc))
        elif key.name not in node.value:
            keys[key.name] = key.default
    return keys, given, problems


def _structure_key(node: _Node, key: ConfigKey) -> Any:
    value = _converter().structure(node, key.type)
    _check_bounds(node, value)
    return value


def _check_bounds(node: _Node, value: Any) -> None:
    if isinstance(value, list | tuple):
        for index, element in enumerate(value):
            _check_bounds(node.child(index, element), element)
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    info = node.info
    if (
        (info.minimum is not None and value < info.minimum)
        or (info.maximum is not None and value > info.maximum)
        or (info.above is not None and value <= info.above)
        or (info.below is not None and value >= info.below)
    ):
        allowed = bounds_text(minimum=info.minimum, maximum=info.maximum, above=info.above, below=info.below)
        unit = f" {info.unit}" if info.unit else ""
        node.refuse_value(f"must be {allowed}", f"{show(value)}{unit}")


def _build(node: _Node, cls: type[T], arguments: Mapping[str, Any]) -> T:
    """The object; what its validators refuse becomes problems at their keys."""
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise _RefusedError([node.problem(p.message, p.hint) for p in error.problems]) from error
    except (ValueError, TypeError) as error:
        problems = _validator_problems(node, cls, arguments)
        raise _RefusedError(problems or [node.problem(_text(error))]) from error


def _validator_problems(node: _Node, cls: type[Any], arguments: Mapping[str, Any]) -> list[Problem]:
    """Problems of every validator: `__init__` stops at the first, and does not say whose it was."""
    instance = object.__new__(cls)
    for key in keys_of(cls):
        object.__setattr__(instance, key.name, arguments.get(key.name, key.default))
    problems = []
    for field in attrs.fields(cls):
        if field.validator is None or key_info(field) is None:
            continue
        value = getattr(instance, field.name)
        try:
            field.validator(instance, field, value)
        except AttributeError:
            continue  # it reads a field that is no key; the message of `__init__` has to do
        except (ValueError, TypeError) as error:
            problems.append(node.child(field.name, value).problem(_text(error)))
    return problems


def _text(error: Exception) -> str:
    # attrs' own validators put the attribute and the value behind the message.
    return str(error.args[0]) if error.args else type(error).__name__


def _without(keys: Mapping[str, Any], refused: _RefusedError, node: _Node) -> dict[str, Any]:
    bad = {problem.key for problem in refused.problems}
    return {name: value for name, value in keys.items() if join_key((*node.path, name)) not in bad}


def _unknown_key(
    node: _Node, name: str, declared: Mapping[str, ConfigKey], elsewhere: Mapping[str, Sequence[str]]
) -> Problem:
    hint = did_you_mean(name, declared)
    if not hint and name in elsewhere:
        owners = [f"[{section}]" for section in elsewhere[name]]
        hint = f"it is a key of {' and of '.join(owners)}"
    return node.problem("unknown key", hint or listing(declared, what="known keys"))


def _excluded(node: _Node, document: Document, key: ConfigKey) -> Problem:
    other = key.info.excluded_by
    place = document.origin((*node.path[:-1], other)).where
    return node.problem(
        f"cannot be given together with {other} ({place})", f"leave out {key.name} or {other}"
    )


def _missing_section(node: _Node, cls: type[Any]) -> Problem:
    required = [key.name for key in keys_of(cls) if key.required]
    plural = "s" if len(required) > 1 else ""
    return Problem(
        where=node.document.origin(node.path).where,
        key=f"[{join_key(node.path)}]",
        message="this section is missing",
        hint=f"required key{plural}: {', '.join(required)}",
    )


def _not_a_table(node: _Node) -> Problem:
    name = join_key(node.path)
    if isinstance(node.value, list):
        return node.problem("expected one table, got an array of tables", f"write [{name}], not [[{name}]]")
    return node.problem(f"expected a table [{name}], got {show_typed(node.value)}")


@functools.cache
def _converter() -> cattrs.Converter:
    """The converter. Hooks registered last are tried first."""
    converter = cattrs.Converter(detailed_validation=False)
    converter.register_structure_hook_func(lambda t: t is Any, lambda node, _: node.value)
    converter.register_structure_hook_func(attrs.has, _structure_class)
    converter.register_structure_hook(ComponentTable, _structure_component_table)
    converter.register_structure_hook_func(lambda t: mapped_type(t) is not None, _structure_mapping)
    converter.register_structure_hook_func(lambda t: element_type(t) is not None, _structure_array)
    converter.register_structure_hook_func(is_literal, _structure_literal)
    converter.register_structure_hook_func(is_union, _structure_union)
    for scalar, hook in _SCALAR_HOOKS.items():
        converter.register_structure_hook(scalar, hook)
    return converter


def _structure_int(node: _Node, _: Any) -> int:
    if type(node.value) is not int:
        node.wrong_type("an integer", suggestion(node.value, int))
    return node.value


def _structure_float(node: _Node, _: Any) -> float:
    if type(node.value) not in (int, float):
        node.wrong_type("a number", suggestion(node.value, float))
    try:
        value = float(node.value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        node.refuse_value("must be a finite number", str(value))
    return value


def _structure_bool(node: _Node, _: Any) -> bool:
    if type(node.value) is not bool:
        node.wrong_type("true or false", suggestion(node.value, bool))
    return node.value


def _structure_str(node: _Node, _: Any) -> str:
    if not isinstance(node.value, str) and not (node.info.locator and isinstance(node.value, Path)):
        node.wrong_type("a string", suggestion(node.value, str))
    text = str(node.value)
    if not node.info.locator or _SCHEME.match(text):
        return text
    return str(_resolve(node, text))


def _structure_path(node: _Node, _: Any) -> Path:
    if not isinstance(node.value, str | Path):
        node.wrong_type("a path in quotes")
    return _resolve(node, str(node.value))


def _resolve(node: _Node, text: str) -> Path:
    if not text or "\0" in text:
        node.refuse_value("expected a path", show(text))
    path = Path(text)
    if path.parts[:1] == ("~",):
        path = path.expanduser()
    return node.document.origin(node.path).base_dir / path


def _structure_literal(node: _Node, annotation: Any) -> Any:
    choices = get_args(annotation)
    for choice in choices:
        if type(choice) is type(node.value) and choice == node.value:
            return choice
    hint = ""
    if isinstance(node.value, str):
        hint = did_you_mean(node.value, [c for c in choices if isinstance(c, str)], quoted=True)
    node.refuse_value(f"must be {one_of(choices)}", show(node.value), hint)


def _structure_union(node: _Node, annotation: Any) -> Any:
    arms = optional_arms(annotation)
    if len(arms) == 1:
        return _converter().structure(node, arms[0])
    refusals: list[_RefusedError] = []
    for arm in arms:
        try:
            return _converter().structure(node, arm)
        except _RefusedError as refused:
            if _same_shape(node.value, arm):
                refusals.append(refused)
    # A table or array that an alternative could have been is best explained by that alternative.
    if refusals:
        raise refusals[0]
    choices = [c for arm in arms if is_literal(arm) for c in get_args(arm) if isinstance(c, str)]
    hint = did_you_mean(node.value, choices, quoted=True) if isinstance(node.value, str) else ""
    if not hint and int in arms:
        hint = suggestion(node.value, int)
    node.wrong_type(describe(annotation), hint)


def _same_shape(value: Any, arm: Any) -> bool:
    if isinstance(value, Mapping):
        return attrs.has(arm) or mapped_type(arm) is not None
    return isinstance(value, list | tuple) and element_type(arm) is not None


def _structure_array(node: _Node, annotation: Any) -> Any:
    element: Any = element_type(annotation)
    if not isinstance(node.value, list | tuple):
        fits = (isinstance(node.value, str) and element in (str, Path)) or type(node.value) is element
        is_simple = isinstance(node.value, str | int | float)
        node.wrong_type(describe(annotation), f"write [{show(node.value)}]" if fits and is_simple else "")
    values: list[Any] = []
    problems: list[Problem] = []
    for index, value in enumerate(node.value):
        try:
            values.append(_converter().structure(node.child(index, value), element))
        except _RefusedError as refused:
            problems.extend(refused.problems)
    if problems:
        raise _RefusedError(problems)
    return tuple(values) if getattr(annotation, "__origin__", None) is tuple else values


def _structure_mapping(node: _Node, annotation: Any) -> dict[str, Any]:
    if not isinstance(node.value, Mapping):
        node.wrong_type("a table")
    element: Any = mapped_type(annotation)
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in node.value.items():
        try:
            values[name] = _converter().structure(node.child(name, value), element)
        except _RefusedError as refused:
            problems.extend(refused.problems)
    if problems:
        raise _RefusedError(problems)
    return values


def _structure_class(node: _Node, cls: type[Any]) -> Any:
    if not isinstance(node.value, Mapping):
        raise _RefusedError([_not_a_table(node)])
    _, given, problems = _fields(node, cls, (), {})
    if problems:
        raise _RefusedError(problems)
    return _build(node, cls, given)


def _structure_component_table(node: _Node, _: Any) -> ComponentTable:
    """Only `type`: the component that it names reads the rest."""
    if not isinstance(node.value, Mapping):
        raise _RefusedError([_not_a_table(node)])
    kind = node.value.get("type")
    if kind is None:
        node.child("type", None).refuse(
            "required key is missing", "it names the component that reads this table"
        )
    if not isinstance(kind, str):
        node.child("type", kind).wrong_type("a string", suggestion(kind, str))
    return ComponentTable(kind)


_SCALAR_HOOKS: dict[type[Any], Any] = {
    int: _structure_int,
    float: _structure_float,
    bool: _structure_bool,
    str: _structure_str,
    Path: _structure_path,
}
