"""The convention for models whose template knows no tools: JSON between `<tool_call>` tags.

The catalogue in the system prompt tells the model so (`retrograd.tool_prompt`). Matches every model; the
core tries it last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._tagged_json import parse_tagged, tagged_grammar, write_tagged


class PromptFormat(FormatBase):
    """`<tool_call>{json}</tool_call>` on one line."""

    name = "prompt"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return True

    def parse(self, text: str) -> ParsedTurn:
        return parse_tagged(text)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        return write_tagged(calls, inner="")

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> str:
        """Tagged JSON, with any white space."""
        return tagged_grammar(tools, thinking)


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        attrs.evolve(
            component(
                PromptFormat,
                "prompt",
                "JSON between <tool_call> tags, explained in the prompt: any model without its own format",
                "retrograd's behaviour specification, section 6",
            ),
            fallback=True,
        )
    ]
