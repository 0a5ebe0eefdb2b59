"""Arguments of tool calls against their schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd_hookspecs import ToolSpec

MOST_SHOWN = 3
"""Problems that one message tells the model."""


def validate_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, in words for the model; None if nothing is.

    The text is a function of schema and arguments alone.
    """
    import jsonschema

    validator = jsonschema.Draft202012Validator(dict(spec.input_schema))
    errors = sorted(validator.iter_errors(dict(arguments)), key=lambda e: (list(map(str, e.path)), e.message))
    if not errors:
        return None
    shown = "; ".join(_text(error) for error in errors[:MOST_SHOWN])
    more = f"; {len(errors) - MOST_SHOWN} more" if len(errors) > MOST_SHOWN else ""
    return f"the arguments of {spec.name} are wrong: {shown}{more}"


def _text(error: Any) -> str:
    place = ".".join(str(part) for part in error.absolute_path)
    return f"{place}: {error.message}" if place else str(error.message)
