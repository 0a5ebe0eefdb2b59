"""Constrained decoding of tool calls: a chat format's grammars, compiled once for each catalogue of tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from retrograd_hookspecs import ChatFormat, GrammarEngine, GrammarFormat, RolloutError, TokenConstraint

KEY = "agent.constrain_tool_calls"

Tools = Sequence[Mapping[str, Any]]
"""In OpenAI's function shape."""

_PROBE: Tools = ({"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}},)


def has_grammar(chat_format: ChatFormat) -> bool:
    """True if this variant of the format can be constrained."""
    return isinstance(chat_format, GrammarFormat) and chat_format.grammar(_PROBE, thinking=False) is not None


class CallConstraints:
    """Constraints for the turns of one chat format.

    Args:
        chat_format: one that `has_grammar`.
    """

    def __init__(self, chat_format: GrammarFormat, engine: GrammarEngine) -> None:
        self._chat_format = chat_format
        self._engine = engine
        self._makers: dict[tuple[str, bool], Callable[[], TokenConstraint]] = {}

    def of(self, tools: Tools, *, thinking: bool = False) -> TokenConstraint | None:
        """The constraint of one turn; None without tools.

        Args:
            thinking: the prompt ends in `<think>`.

        Raises: `RolloutError` if the tools' schemas cannot be held by a grammar.
        """
        if not tools:
            return None
        place = json.dumps(tools), thinking
        if place not in self._makers:
            self._makers[place] = self._compiled(tools, thinking)
        return self._makers[place]()

    def _compiled(self, tools: Tools, thinking: bool) -> Callable[[], TokenConstraint]:
        try:
            return self._compile(tools, thinking)
        except RolloutError as error:
            # One tool is named where one alone is to blame.
            for tool in tools if len(tools) > 1 else ():
                self._compiled((tool,), thinking)
            names = ", ".join(repr(tool["function"]["name"]) for tool in tools)
            raise RolloutError(
                f"{KEY}: the grammar of calls cannot hold the input schema of {names}: {error}; simplify the"
                " schema, or leave the key out"
            ) from error

    def _compile(self, tools: Tools, thinking: bool) -> Callable[[], TokenConstraint]:
        grammar = self._chat_format.grammar(tools, thinking=thinking)
        if grammar is None:
            raise RolloutError(f"the chat format {self._chat_format.name!r} has no grammar")
        return self._engine.compile(grammar)
