"""Arguments of tool calls against their schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from retrograd_hookspecs import RolloutError, ToolCall, ToolSpec

MOST_SHOWN = 3
"""Problems that one message tells the model."""
LONGEST_SHOWN = 300
"""Characters of one problem: it quotes what the model wrote."""


def check_schema(spec: ToolSpec) -> None:
    """Raise `RolloutError` unless the tool's input schema is JSON Schema (draft 2020-12)."""
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(dict(spec.input_schema))
    except jsonschema.SchemaError as error:
        place = ".".join(str(part) for part in error.absolute_path)
        shown = f"{place}: {error.message}" if place else error.message
        raise RolloutError(f"the tool {spec.name!r} has an input schema that is wrong: {shown}") from error


def fitted(spec: ToolSpec, call: ToolCall) -> Mapping[str, Any]:
    """The arguments of a call, in the reading that the schema asks for.

    Only a chat format that writes no types leaves a choice: `ToolCall.texts`.
    """
    properties = spec.input_schema.get("properties", {})
    found = dict(call.arguments)
    for name, text in call.texts.items():
        if name in properties and not _fits(spec, name, found[name]) and _fits(spec, name, text):
            found[name] = text
    return found


def _fits(spec: ToolSpec, name: str, value: Any) -> bool:
    schema = {key: item for key, item in spec.input_schema.items() if key in ("$defs", "definitions")}
    schema["properties"] = {name: spec.input_schema["properties"][name]}
    return (
        validate_arguments(ToolSpec(name=spec.name, description="", input_schema=schema), {name: value})
        is None
    )


def validate_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, in words for the model; None if nothing is.

    The text is a function of schema and arguments alone. Nothing that a schema refers to is fetched.

    Raises: `RolloutError` if the schema cannot be used.
    """
    import jsonschema
    import referencing

    wrong = f"the arguments of {spec.name} are wrong: "
    try:
        unsent = _not_json(arguments)
        if unsent:
            return f"{wrong}{unsent}"
        registry: Any = referencing.Registry()
        validator = jsonschema.Draft202012Validator(dict(spec.input_schema), registry=registry)
        errors = sorted(
            validator.iter_errors(dict(arguments)), key=lambda e: (list(map(str, e.path)), e.message)
        )
    except RecursionError:
        return f"{wrong}they are nested too deeply"
    except Exception as error:  # a reference that leads nowhere, a pattern that is none, …
        raise RolloutError(
            f"the input schema of the tool {spec.name!r} cannot be used: {type(error).__name__}: {error}"
        ) from error
    if not errors:
        return None
    shown = "; ".join(_text(error) for error in errors[:MOST_SHOWN])
    more = f"; {len(errors) - MOST_SHOWN} more" if len(errors) > MOST_SHOWN else ""
    return f"{wrong}{shown}{more}"


def _not_json(value: Any, place: str = "") -> str:
    """What of a value cannot be sent to a tool, although Python's parser reads it; "" for nothing."""
    at = f"{place}: " if place else ""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{at}the number is not finite"
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        return f"{at}the text holds half a character (a lone surrogate)"
    if isinstance(value, Mapping):
        found = [
            _not_json(key, place) or _not_json(element, f"{place}.{key}" if place else str(key))
            for key, element in value.items()
        ]
    elif isinstance(value, list | tuple):
        found = [_not_json(element, f"{place}[{index}]") for index, element in enumerate(value)]
    else:
        return ""
    return next((fault for fault in found if fault), "")


def _text(error: Any) -> str:
    place = ".".join(str(part) for part in error.absolute_path)
    text = f"{place}: {error.message}" if place else str(error.message)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
