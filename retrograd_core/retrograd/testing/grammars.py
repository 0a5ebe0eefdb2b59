"""Contract of chat formats with a grammar, and of the engines that read it: `check_grammar`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrograd.agent.arguments import fitted, validate_arguments
from retrograd.tool_prompt import openai_tool
from retrograd_hookspecs import (
    GrammarEngine,
    GrammarFormat,
    TokenConstraint,
    Tokenizer,
    ToolCall,
    ToolSpec,
)

_CLOSING = (b'"', b"}", b"]", b",", b":", b"<", b"\n<", b"/", b">")
"""What texts of tokens begin with that bring a call to its end."""
_TAG = "\n</parameter>"
"""What ends a text without quotes."""
_LONGEST = 1000


def _tool(name: str, required: Sequence[str] = (), defs: Any = None, **properties: Any) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return ToolSpec(
        name=name, description="", input_schema=schema if defs is None else {**schema, "$defs": defs}
    )


TOOLS = (
    _tool("submit"),
    _tool(
        "get",
        ["unit", "days"],
        unit={"type": "string", "enum": ["°C", 'say "F"', "5"]},
        days={"type": "integer", "minimum": 0, "maximum": 14},
    ),
    _tool("get_all", ["texts"], texts={"type": "array", "items": {"type": "string"}, "minItems": 1}),
    _tool(
        "edit-file",
        ["path"],
        path={"type": "string"},
        force={"type": "boolean", "default": False},
        mode={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        note={"anyOf": [{"type": "string"}, {"type": "null"}]},
    ),
    _tool(
        "plan",
        ["step"],
        defs={
            "Step": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "at": {"$ref": "#/$defs/Point"}},
                "required": ["name"],
            },
            "Point": {
                "type": "object",
                "properties": {"x": {"type": "number", "minimum": -9, "maximum": 9}, "kind": {"const": "p"}},
                "required": ["x", "kind"],
            },
        },
        step={"$ref": "#/$defs/Step"},
        more={"type": "array", "items": {"$ref": "#/$defs/Step"}},
    ),
)
"""No parameters, choices, arrays, optional ones, texts with quotes, nested objects."""
CALLS = (
    ToolCall(name="get", arguments={"unit": "°C", "days": 3}),
    ToolCall(name="edit-file", arguments={"path": 'a "b"/ü.txt', "force": True, "note": "x\ny"}),
    ToolCall(name="plan", arguments={"step": {"name": "go", "at": {"x": 1.5, "kind": "p"}}}),
    ToolCall(name="get_all", arguments={"texts": ["é", "{}"]}),
    ToolCall(name="submit", arguments={}),
)


def catalogue(tools: Sequence[ToolSpec] = TOOLS) -> tuple[Mapping[str, Any], ...]:
    """Tools in OpenAI's function shape."""
    return tuple(openai_tool(tool.name, tool.description, tool.input_schema) for tool in tools)


def check_grammar(
    chat_format: GrammarFormat, engine: GrammarEngine, tokenizer: Tokenizer, *, walks: int = 4, seed: int = 0
) -> None:
    """Raises AssertionError where a format's grammar breaks its contract.

    Text is free, and ends anywhere. What `format_calls` writes is in the grammar. A call that has begun,
    wherever it was cut, ends in calls that `parse` reads without error and whose arguments fit their tool's
    schema, whichever of the allowed tokens follow; behind a thought and behind one that the prompt opened,
    too.

    Args:
        walks: random turns for each way in which a turn may begin.
    """
    makers = {}
    for thinking in (False, True):
        grammar = chat_format.grammar(catalogue(), thinking=thinking)
        assert grammar is not None, f"the format {chat_format.name!r} has no grammar"
        makers[thinking] = engine.compile(grammar)
    rng = np.random.default_rng(seed)
    walker = _Walker(tokenizer, rng)
    for text in ("", "Plain text: 2 < 3, {x} [y], é.\n\nMore.", "<think>Should I call?</think>\n\nNo."):
        assert _ends(_fed(makers[False](), tokenizer, text), tokenizer), f"{text!r} may not end"
        assert _ends(_fed(makers[True](), tokenizer, text), tokenizer), f"{text!r} may not be a thought"
    for number in range(walks):
        calls = [CALLS[i] for i in rng.permutation(len(CALLS))[: 1 + number % 3]]
        text = chat_format.format_calls(calls)
        thought = f"hm, {text[: max(len(text) // 2, 30)]}"
        for thinking, opening in (
            (False, ""),
            (False, "Let me see. "),
            (False, f"<think>{thought}</think>\n\n"),
            (True, f"{thought}</think>\n\n"),
        ):
            whole = _fed(makers[thinking](), tokenizer, opening + text)
            assert _ends(whole, tokenizer), f"{opening + text!r} may not end"
            cut = int(rng.integers(1, len(text)))
            start = opening + text[:cut]
            constraint = _fed(makers[thinking](), tokenizer, start)
            begun = not _ends(constraint, tokenizer)
            written = (start.encode() + walker.walk(constraint)).decode("utf-8", "replace")
            _check_turn(chat_format, f"<think>{written}" if thinking else written, begun)
        open_thought = _fed(makers[True](), tokenizer, thought)
        assert not _ends(open_thought, tokenizer), f"{thought!r} would be read as a call that breaks off"


def _fed(constraint: TokenConstraint, tokenizer: Tokenizer, text: str) -> TokenConstraint:
    """The constraint after a text, all of whose tokens must be allowed."""
    done = b""
    for token in tokenizer.encode(text, special=True):
        mask = constraint.allowed()
        assert mask is None or mask[token], (
            f"behind {done.decode(errors='replace')!r} {tokenizer.decode([token])!r} is not allowed"
        )
        constraint.advance(token)
        done += tokenizer.decode_bytes([token])
    assert not constraint.problem, constraint.problem
    return constraint


def _ends(constraint: TokenConstraint, tokenizer: Tokenizer) -> bool:
    mask = constraint.allowed()
    return mask is None or bool(mask[sorted(tokenizer.stop_ids)].all())


class _Walker:
    """Writes any tokens at all, then such that end the turn as soon as it may end."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator) -> None:
        texts = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocabulary_size)]
        self._closing = np.array([text.startswith(_CLOSING) for text in texts])
        self._stops = sorted(tokenizer.stop_ids)
        self._tokenizer = tokenizer
        self._rng = rng

    def walk(self, constraint: TokenConstraint) -> bytes:
        """What was written, without a stop token."""
        free = int(self._rng.integers(0, 30))
        written = b""
        for step in range(_LONGEST):
            if step >= free and step % 20 == 0:
                written += self._spell(constraint, _TAG)
            mask = constraint.allowed()
            assert not constraint.problem, constraint.problem
            if mask is None or (step >= free and mask[self._stops].all()):
                return written
            mask = mask.copy()
            mask[self._stops] = False
            closing = mask & self._closing
            token = int(self._rng.choice(np.flatnonzero(closing if step >= free and closing.any() else mask)))
            constraint.advance(token)
            written += self._tokenizer.decode_bytes([token])
        raise AssertionError(f"the turn does not end: {written[-400:]!r}")

    def _spell(self, constraint: TokenConstraint, text: str) -> bytes:
        """As much of a text as is allowed."""
        written = b""
        for token in self._tokenizer.encode(text):
            mask = constraint.allowed()
            if mask is None or not mask[token]:
                break
            constraint.advance(token)
            written += self._tokenizer.decode_bytes([token])
        return written


def _check_turn(chat_format: GrammarFormat, text: str, begun: bool) -> None:
    parsed = chat_format.parse(text)
    assert not parsed.error, f"{text!r}: {parsed.error}"
    assert parsed.tool_calls or not begun, f"{text!r} holds no call"
    specs = {tool.name: tool for tool in TOOLS}
    for call in parsed.tool_calls:
        assert call.name in specs, f"{text!r} calls {call.name!r}"
        problem = validate_arguments(specs[call.name], fitted(specs[call.name], call))
        assert problem is None, f"{text!r}: {problem}"
