"""Nous Hermes 2 and 3, Qwen 2.5 and 3, Granite 4: JSON between `<tool_call>` tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._tagged_json import OPEN, parse_tagged, tagged_grammar, write_tagged

# Other formats put something else between the same tags, or use them for several things.
_OTHERS = ("<function=", "<arg_key>", "python_tools", "<tool_calls>", "<invoke name=")


class HermesFormat(FormatBase):
    """JSON objects between `<tool_call>` and `</tool_call>`, each on its own line."""

    name = "hermes"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return OPEN in template and not any(other in template for other in _OTHERS)

    def parse(self, text: str) -> ParsedTurn:
        return parse_tagged(text)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        return write_tagged(calls)

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> str:
        """Tagged JSON, with any white space."""
        return tagged_grammar(tools, thinking)


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        component(
            HermesFormat,
            "hermes",
            "JSON between <tool_call> tags: Hermes, Qwen 2.5 and 3, Granite 4",
            "NousResearch Hermes function calling; Qwen 2.5 chat template",
        )
    ]
