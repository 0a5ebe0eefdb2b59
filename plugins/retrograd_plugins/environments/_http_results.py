"""What environment servers send, as specs and observations."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrograd.agent.tools import cap_text
from retrograd.agent.world import clean
from retrograd_hookspecs import RolloutError, StepResult, ToolSpec

_SCHEMA_KEYS = ("input_schema", "inputSchema", "parameters")
_NO_NAME = re.compile(r"""[\s<>"'`(){}\[\]|,=]""")
"""What ends a name in some chat format."""


def tool_specs(content: Any, what: str) -> tuple[ToolSpec, ...]:
    """The tools of `{"tools": [...]}` or of a list, in the server's order.

    Each has a name, a description and a schema: `input_schema`, `inputSchema`, or OpenAI's function shape.

    Raises:
        RolloutError: it is something else; `what` names the request.
    """
    tools = content.get("tools") if isinstance(content, Mapping) else content
    if not isinstance(tools, list):
        raise RolloutError(f'{what}: expected {{"tools": [...]}}')
    specs: list[ToolSpec] = []
    for number, tool in enumerate(_readable(tools)):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise RolloutError(f"{what}: tool number {number} has no name")
        if _NO_NAME.search(inner["name"]) or not inner["name"].isprintable():
            raise RolloutError(f"{what}: a model cannot call a tool with the name {inner['name']!r}")
        schema = next((inner[key] for key in _SCHEMA_KEYS if inner.get(key) is not None), None)
        schema = {"type": "object", "properties": {}} if schema is None else schema
        if not isinstance(schema, Mapping):
            raise RolloutError(f"{what}: the schema of {inner['name']} is no object")
        if any(spec.name == inner["name"] for spec in specs):
            raise RolloutError(f"{what}: there are two tools with the name {inner['name']!r}")
        description = inner.get("description") or ""
        specs.append(ToolSpec(name=inner["name"], description=str(description), input_schema=dict(schema)))
    return tuple(specs)


def _readable(tools: list[Any]) -> list[Any]:
    """The tools with texts that tokenizers can read."""
    found: list[Any] = json.loads(clean(json.dumps(tools, ensure_ascii=False)))
    return found


def text_of(result: Any) -> tuple[str, bool]:
    """A tool's result as text, and whether it is an error.

    A text is itself; `{"content": …, "is_error": …}` is its content, blocks of the kind of MCP included;
    anything else is shown as JSON.
    """
    if isinstance(result, str):
        return result, False
    if isinstance(result, Mapping) and "content" in result:
        failed = result.get("is_error", result.get("isError", False))
        return _content(result["content"]), bool(failed)
    if result is None:
        return "", False
    return as_json(result), False


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(_block(block) for block in content)
    return as_json(content)


def _block(block: Any) -> str:
    if isinstance(block, Mapping) and isinstance(block.get("text"), str):
        return str(block["text"])
    if isinstance(block, Mapping) and isinstance(block.get("type"), str) and "data" in block:
        return f"[{block['type']} {block.get('mimeType') or block.get('mime_type') or ''}]".replace(" ]", "]")
    return block if isinstance(block, str) else as_json(block)


def as_json(value: Any) -> str:
    """Compact JSON, keys in the server's order."""
    return json.dumps(value, ensure_ascii=False)


def reward_of(value: Any, what: str) -> float | None:
    """A reward, None for none. Raises `RolloutError` for what is no finite number."""
    if value is None:
        return None
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise RolloutError(f"{what}: the reward {value!r} is no finite number")
    return float(value)


def step_result(text: str, *, is_error: bool, reward: float | None, done: Any, limit: int) -> StepResult:
    """A result with its observation capped."""
    return StepResult(observation=cap_text(text, limit), is_error=is_error, reward=reward, done=done is True)
