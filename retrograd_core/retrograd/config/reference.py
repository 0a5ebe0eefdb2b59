"""The key tables of `docs/configuration.md`, from the same classes that read the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import attrs

from retrograd_hookspecs import ComponentTable

from .keys import ConfigKey, element_type, is_literal, is_union, keys_of, mapped_type, optional_arms
from .messages import bounds_text, show

_BLOCK = re.compile(
    r"(?P<open><!-- keys: (?P<name>\S+) -->\n)(?P<body>.*?)(?P<close><!-- end of keys -->)", re.DOTALL
)
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", Path: "path"}


def update_reference(text: str, classes: Mapping[str, type[Any]]) -> str:
    """A Markdown text with the block of each section written anew.

    A block begins with `<!-- keys: training -->` and ends with `<!-- end of keys -->`; those of sections
    that are not in `classes` stay as they are.
    """

    def renew(match: re.Match[str]) -> str:
        cls = classes.get(match["name"])
        if cls is None:
            return match.group()
        return f"{match['open']}{render_table(match['name'], cls)}{match['close']}"

    return _BLOCK.sub(renew, text)


def sections_in(text: str) -> list[str]:
    """Names of the sections that have a block in a Markdown text."""
    return [match["name"] for match in _BLOCK.finditer(text)]


def render_table(name: str, cls: type[Any]) -> str:
    """Markdown table of a section's keys, followed by those of its sub-tables."""
    rows = ["| key | type | default | description |", "|---|---|---|---|"]
    below: list[str] = []
    for key in keys_of(cls):
        rows.append("| " + " | ".join(_cell(text) for text in _row(key)) + " |")
        for arm in optional_arms(key.type):
            nested = element_type(arm) or arm
            if attrs.has(nested) and nested is not ComponentTable:
                brackets = "[[{}]]" if element_type(arm) else "[{}]"
                title = brackets.format(f"{name}.{key.name}")
                below.append(f"\n`{title}`:\n\n{render_table(f'{name}.{key.name}', nested)}")
    if len(rows) == 2:
        return "No keys.\n"
    return "\n".join(rows) + "\n" + "".join(below)


def _row(key: ConfigKey) -> tuple[str, str, str, str]:
    info = key.info
    bounds = bounds_text(minimum=info.minimum, maximum=info.maximum, above=info.above, below=info.below)
    notes = [info.doc]
    in_unit = f"in {info.unit}" if info.unit else ""
    range_text = ", ".join(text for text in (in_unit, bounds) if text)
    if range_text:
        notes.append(f"{range_text[0].upper()}{range_text[1:]}.")
    if info.excluded_by:
        notes.append(f"Not together with `{info.excluded_by}`.")
    if info.may_grow:
        notes.append("A resumed run may have a larger one.")
    return f"`{key.name}`", type_text(key.type), _default_text(key), " ".join(notes)


def _default_text(key: ConfigKey) -> str:
    if key.info.default_text:
        return key.info.default_text
    if key.required:
        return "required"
    if key.default is None:
        return "none"
    if attrs.has(type(key.default)):
        return "its defaults"
    if isinstance(key.default, list | tuple):
        return f"`[{', '.join(show(element) for element in key.default)}]`"
    if isinstance(key.default, Mapping):
        return "`{}`" if not key.default else "see above"
    return f"`{show(key.default)}`"


def type_text(annotation: Any) -> str:
    """A type as the reference prints it: `integer`, `array of string`, `"f16"` or `"f32"`."""
    if annotation in _TYPES:
        return _TYPES[annotation]
    if is_literal(annotation):
        return ", ".join(f"`{show(value)}`" for value in get_args(annotation))
    if is_union(annotation):
        return " or ".join(type_text(arm) for arm in optional_arms(annotation))
    element, mapped = element_type(annotation), mapped_type(annotation)
    if element is not None:
        return "tables" if attrs.has(element) else f"array of {type_text(element)}"
    if mapped is not None:
        return "table" if mapped is Any else f"table of {type_text(mapped)}"
    return "table" if attrs.has(annotation) else "any value"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
