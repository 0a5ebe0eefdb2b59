"""Grammars of assistant turns, in Lark with the extensions of llguidance.

A turn is text, reasoning and calls, cut as `read_turn` cuts it: a call begins at a family's marker wherever
that stands outside of `<think>…</think>`. Text is matched by lazy rules that end with a marker; whatever may
follow it is the grammar of a call. Bytes that are no UTF-8 are text, too.

What no grammar here can hold: that a key stands once in an object whose keys are not listed, and that a
number with an exponent is in the range of float64. Such a call is still answered with an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ._reading import json_text

_SPACES = r"[ \t\n\r]{1,32}"
_JSON = {"whitespace_pattern": _SPACES, "json_allow_general_unicode_escapes": True}
_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
}
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_TABLES = ("properties", "patternProperties", "$defs", "definitions")
_CLOSED_BY = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_MORE_KEYS = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")

_RULES = r"""
closed[lazy]: ANY "</think>"
think[lazy]: TEXT "<think>"
thought: think closed
ANY: ~/[^\s\S]/
WS: /[ \t\n\r]{1,32}/
"""


def turn_grammar(rules: str, *, thinking: bool, marker: str, ends: bool = False, never: str = "") -> str:
    """The grammar of a turn.

    Args:
        rules: of `call`, one block of calls with the text before it; its first rules are lazy, `TEXT` and the
            marker.
        thinking: the turn begins inside reasoning. Unless it closes it, it ends only if no marker was
            written: `parse` would read a call.
        marker: expression of everything that `parse` takes for the beginning of a call.
        ends: nothing may follow a block of calls.
        never: expression of what text must not hold.
    """
    last = "TEXT | think ANY"
    return "\n".join(
        [
            f"start: {'closed rest | OPEN' if thinking else 'rest'}",
            f"rest: thought* ({last} | call)" if ends else f"rest: (call | thought)* ({last})",
            f"TEXT: {f'~(ANY {never} ANY)' if never else 'ANY'}",
            *([f"OPEN: ~(ANY ({marker}{f' | {never}' if never else ''}) ANY)"] if thinking else []),
            _RULES.strip(),
            rules.strip(),
        ]
    )


def quoted(text: str) -> str:
    """A text as a literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def function_of(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and input schema of a tool in OpenAI's function shape."""
    function = tool["function"]
    return function["name"], function.get("parameters") or {}


def call_rules(tools: Sequence[Mapping[str, Any]], key: str = "arguments", more: str = "") -> str:
    """The rules `object`, a call as JSON with name and `key`, and `members`, what follows its `"name":`.

    Args:
        more: expression of what may follow the arguments.
    """
    middle = f'WS? "," WS? {quoted(quoted(key))} WS? ":" WS?'
    lines = [
        'object: "{" WS? "\\"name\\"" WS? ":" members',
        f'members: WS? ({alternatives("tool", len(tools))}) {more} WS? "}}"',
    ]
    for number, tool in enumerate(tools):
        name, schema = function_of(tool)
        lines.append(f"tool_{number}: {quoted(json_text(name))} {middle} {arguments_json(schema)}")
    return "\n".join(lines) + "\n"


def alternatives(rule: str, count: int) -> str:
    """`rule_0 | rule_1 | …`."""
    return " | ".join(f"{rule}_{number}" for number in range(count))


def arguments_json(schema: Mapping[str, Any]) -> str:
    """The arguments of a call as JSON."""
    return json_rule({"type": "object", **schema})


def json_rule(schema: Mapping[str, Any], strings: str = "") -> str:
    """JSON that fits a schema, as a rule.

    Args:
        strings: pattern of texts that the schema leaves free.
    """
    return f"%json {json.dumps({'x-guidance': _JSON, **_prepared(schema, strings)}, ensure_ascii=False)}"


def _prepared(schema: Any, strings: str, *, alone: bool = True) -> Any:
    """The schema with objects closed that list their keys, and without formats that nothing checks.

    Args:
        alone: no other schema speaks about the same value.
    """
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _LISTS and isinstance(value, list):
            apart = key == "prefixItems" or (alone and key != "allOf" and "properties" not in schema)
            found[key] = [_prepared(item, strings, alone=apart) for item in value]
        elif key in _TABLES and isinstance(value, Mapping):
            found[key] = {name: _prepared(item, strings) for name, item in value.items()}
        elif key in ("items", "additionalProperties"):
            found[key] = _prepared(value, strings)
        elif key != "format" or value in _FORMATS:
            found[key] = value
    if alone and "properties" in found and not any(key in found for key in (*_CLOSED_BY, *_MORE_KEYS)):
        found["additionalProperties"] = False
    if strings and found.get("type") == "string" and not {"enum", "const", "pattern", "format"} & {*found}:
        found["pattern"] = strings
    return found
