"""JSON Schema (draft-07) of the whole TOML, for editors: completion, documentation, checks.

Draft-07 because Taplo, and Even Better TOML with it, reads that. `x-taplo` holds its documentation of
single values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import attrs

from retrograd_hookspecs import ComponentTable, KeyInfo, PluginError

from .keys import ConfigKey, element_type, is_literal, is_union, keys_of, mapped_type, optional_arms
from .resolved import to_table
from .sections import NAMED_TABLES, OPTIONAL_SECTIONS, SHARED_SECTIONS

_ON_COMMAND_LINE = frozenset({"model.path"})
"""Required keys that a flag may give instead, so that a file without them is not wrong."""


def json_schema(
    sections: Mapping[str, type[Any]],
    choices: Mapping[str, Mapping[str, str]] | None = None,
    variants: Mapping[str, Mapping[str, type[Any]]] | None = None,
) -> dict[str, Any]:
    """The schema of run files.

    Args:
        sections: class of each component table by its dotted name: `{"sft": …, "optimizer.sgd": …}`.
        choices: for keys that name a component, what is installed: `{"training.optimizer":
            {"adamw": "its summary"}}`.
        variants: for sub-tables that a component reads, the class of each component that is installed:
            `{"grpo.judge": {"ruler": …}}`.

    Raises:
        PluginError: a class is no configuration class, or contains itself.
    """
    choices = choices or {}
    properties: dict[str, Any] = {
        name: _table_schema(name, cls, choices, ()) for name, cls in SHARED_SECTIONS.items()
    }
    for table, named in NAMED_TABLES.items():
        properties[table] = _object({}, description=f"Options of each {named.singular}, by its name.")
    for name, cls in sections.items():
        *parents, last = name.split(".")
        container = properties
        for parent in parents:
            container = container.setdefault(parent, _object({}))["properties"]
        container[last] = _table_schema(name, cls, choices, ())
    for name, classes in (variants or {}).items():
        if classes:
            _set_variants(properties, name, classes, choices)
    required = [
        name
        for name, schema in properties.items()
        if name in SHARED_SECTIONS and name not in OPTIONAL_SECTIONS and schema.get("required")
    ]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "retrograd run",
        **_object(properties, required=required, description="A training run of retrograd."),
    }


def _set_variants(
    properties: dict[str, Any],
    name: str,
    classes: Mapping[str, type[Any]],
    choices: Mapping[str, Mapping[str, str]],
) -> None:
    """Replace the schema of a sub-table by one alternative a component, told apart by `type`."""
    *parents, last = name.split(".")
    for parent in parents:
        properties = properties[parent]["properties"]
    alternatives = []
    for component, cls in classes.items():
        schema = _table_schema(name, cls, choices, ())
        schema["properties"] = {"type": {"const": component}, **schema["properties"]}
        schema["required"] = ["type", *schema.get("required", ())]
        alternatives.append(schema)
    properties[last] = {"description": properties[last].get("description", ""), "anyOf": alternatives}


def _table_schema(
    name: str, cls: type[Any], choices: Mapping[str, Mapping[str, str]], parents: tuple[type[Any], ...]
) -> dict[str, Any]:
    if cls in parents:
        raise PluginError(f"{cls.__module__}.{cls.__qualname__}: a configuration class contains itself")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for key in keys_of(cls):
        dotted = f"{name}.{key.name}"
        properties[key.name] = _key_schema(dotted, key, choices, (*parents, cls))
        if key.required and dotted not in _ON_COMMAND_LINE:
            required.append(key.name)
    return _object(properties, required=required, description=_summary(cls))


def _key_schema(
    name: str, key: ConfigKey, choices: Mapping[str, Mapping[str, str]], parents: tuple[type[Any], ...]
) -> dict[str, Any]:
    schema = _type_schema(name, key.type, key.info, choices, parents)
    unit = f" Unit: {key.info.unit}." if key.info.unit else ""
    fallback = f" Default: {key.info.default_text}." if key.info.default_text else ""
    schema["description"] = f"{key.info.doc}{unit}{fallback}"
    if not key.required and key.default is not None:
        schema["default"] = _json(key.default)
    offered = choices.get(name)
    if offered:
        (elements := schema.get("items", schema))["enum"] = list(offered)
        elements["x-taplo"] = {"docs": {"enumValues": list(offered.values())}}
    return schema


def _type_schema(
    name: str,
    annotation: Any,
    info: KeyInfo,
    choices: Mapping[str, Mapping[str, str]],
    parents: tuple[type[Any], ...],
) -> dict[str, Any]:
    if annotation is Any:
        return {}
    if annotation is bool:
        return {"type": "boolean"}
    if annotation in (int, float):
        return {"type": "integer" if annotation is int else "number", **_bounds(info)}
    if annotation is str:
        return {"type": "string"}
    if annotation is Path:
        return {"type": "string", "minLength": 1}
    if is_literal(annotation):
        return {"enum": list(get_args(annotation))}
    if is_union(annotation):
        arms = [_type_schema(name, arm, info, choices, parents) for arm in optional_arms(annotation)]
        return arms[0] if len(arms) == 1 else {"anyOf": arms}
    if annotation is ComponentTable:
        return {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
    element = element_type(annotation)
    if element is not None:
        return {"type": "array", "items": _type_schema(name, element, info, choices, parents)}
    mapped = mapped_type(annotation)
    if mapped is not None:
        return {
            "type": "object",
            "additionalProperties": _type_schema(name, mapped, info, choices, parents) or True,
        }
    return _table_schema(name, annotation, choices, parents)


def _bounds(info: KeyInfo) -> dict[str, float]:
    named = {
        "minimum": info.minimum,
        "maximum": info.maximum,
        "exclusiveMinimum": info.above,
        "exclusiveMaximum": info.below,
    }
    return {name: bound for name, bound in named.items() if bound is not None}


def _object(
    properties: dict[str, Any], *, required: list[str] | None = None, description: str = ""
) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = required
    if description:
        schema["description"] = description
    return schema


def _summary(cls: type[Any]) -> str:
    return (cls.__doc__ or "").strip().split("\n\n")[0]


def _json(value: Any) -> Any:
    if attrs.has(type(value)):
        return to_table(value)
    if isinstance(value, Mapping):
        return {name: _json(element) for name, element in value.items()}
    if isinstance(value, list | tuple):
        return [_json(element) for element in value]
    return str(value) if isinstance(value, Path) else value
