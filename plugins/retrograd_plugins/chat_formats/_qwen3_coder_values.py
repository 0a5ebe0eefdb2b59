"""Grammar of parameters as elements: a text stands as it is, any other value as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd_hookspecs import RolloutError

from ._grammar import json_rule, quoted
from ._reading import json_text

CLOSE = "</parameter>"
_END = f'"\\n"? {quoted(CLOSE)}'
_NO_TAG = "^(?:[^<]|<+[^/<])*<*$"
"""Texts within a JSON value: without `</`, for the first `</parameter>` ends the value."""
_UNREAD = {"title", "description", "default", "examples", "deprecated", "format", "$defs", "definitions"}
_DEEPEST = 20


def parameter_rules(rule: str, name: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The parameters of a tool, in the order of its schema, and the rules that they are made of.

    Raises `RolloutError` for a parameter that no rule can describe.
    """
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = schema.get("required", ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    lines, parts = [], []
    for number, key in enumerate([*properties, *(key for key in required if key not in properties)]):
        one = f"{rule}_{number}"
        try:
            value, rules = _value(one, properties.get(key, {}), shared)
        except ValueError as error:
            raise RolloutError(f"the parameter {key!r} of the tool {name!r} {error}") from None
        lines += [f'{one}: {quoted(f"<parameter={key}>")} "\\n" {value} WS?', *rules]
        parts.append(one if key in required else f"{one}?")
    return " ".join(parts), lines


def _value(rule: str, schema: Any, shared: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A value with the tag behind it, and the rules that it is made of."""
    given = _resolved(schema, shared)
    choices = next((key for key in ("anyOf", "oneOf") if key in given), None)
    arms = [_resolved(arm, shared) for arm in given[choices]] if choices else [given]
    if choices and (more := {*given} - _UNREAD - {choices}):
        raise ValueError(f"has {choices!r} beside {min(more)!r}, for which the format has no grammar")
    made = [_arm(f"{rule}_{number}", arm, shared) for number, arm in enumerate(arms)]
    if any(value == "text" for value, _ in made):
        return "text", []
    return f"({' | '.join(value for value, _ in made)})", [line for _, lines in made for line in lines]


def _arm(rule: str, arm: Mapping[str, Any], shared: Mapping[str, Any]) -> tuple[str, list[str]]:
    """One of the kinds of value that a parameter may have; "text" for any text."""
    keys = {*arm} - _UNREAD
    kinds = arm.get("type", ())
    if "enum" in keys or "const" in keys:
        values = arm["enum"] if "enum" in keys else [arm["const"]]
        texts = [quoted(value if isinstance(value, str) else json_text(value)) for value in values]
        return f"({' | '.join(texts)}) {_END}", []
    if not keys or ("string" in kinds and keys == {"type"}):
        return "text", []
    if "string" not in kinds:
        return f"{json_rule({**shared, **arm}, _NO_TAG)} {_END}", []
    if unread := keys - {"type", "minLength", "maxLength"}:
        raise ValueError(f"is a text with {min(unread)!r}, for which the format has no grammar")
    length = f"{arm.get('minLength', 0)},{arm.get('maxLength', '')}"
    terminal = rule.upper()
    return f"{rule}_text", [
        f"{terminal}: /(?s:.){{{length}}}/ & ~(ANY {quoted(CLOSE)} ANY)",
        f"{rule}_text[lazy]: {terminal} {quoted(f'{chr(10)}{CLOSE}')}",
    ]


def _resolved(schema: Any, shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with what it refers to in its place."""
    found: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    for _ in range(_DEEPEST):
        if isinstance(alone := found.get("allOf"), list) and len(alone) == 1:
            found = {**alone[0], **{key: value for key, value in found.items() if key != "allOf"}}
        elif isinstance(reference := found.get("$ref"), str):
            table, _, name = reference.removeprefix("#/").partition("/")
            if name not in shared.get(table, {}):
                raise ValueError(f"refers to {reference!r}, which is not among the definitions")
            found = {**shared[table][name], **{key: value for key, value in found.items() if key != "$ref"}}
        else:
            return found
    raise ValueError("refers to itself")
