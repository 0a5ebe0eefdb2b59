"""A small tokenizer whose tokens merge across turn boundaries, chat templates of several families, and a
chat format: what the tests of conversations need, independent of the product's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from retrograd_hookspecs import Message, ParsedTurn, TokenizerError, ToolCall

_WORDS = (
    "\n\n",
    ".\n",
    "Hello",
    "hello",
    "world",
    " world",
    "user\n",
    "assistant",
    ">\n",
    "\n\n\n",
)


class StandInTokenizer:
    """Longest match over bytes and a few words; special tokens are matched first where asked for.

    `space_prefix` puts ▁ before a text and after each special token, as old SentencePiece models do.
    """

    def __init__(
        self,
        specials: Sequence[str],
        stops: Sequence[str],
        *,
        bos: str | None = None,
        adds_bos: bool = False,
        space_prefix: bool = False,
    ) -> None:
        self._specials = tuple(specials)
        self._space_prefix = space_prefix
        self._pieces: list[bytes] = [bytes([b]) for b in range(256)]
        self._pieces += [word.encode() for word in _WORDS]
        self._first_special = len(self._pieces)
        self.vocabulary_size = self._first_special + len(specials)
        self.stop_ids = frozenset(self.id(stop) for stop in stops)
        self.bos_id = self.id(bos) if bos else None
        self.eos_id = self.id(stops[0])
        self.adds_bos = adds_bos
        self.adds_eos = False

    def id(self, special: str) -> int:
        return self._first_special + self._specials.index(special)

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        ids = [self.bos_id] if bos and self.adds_bos and self.bos_id is not None else []
        pattern = "|".join(re.escape(s) for s in sorted(self._specials, key=len, reverse=True))
        parts = re.split(f"({pattern})", text) if special else [text]
        after_special = True
        for part in parts:
            if special and part in self._specials:
                ids.append(self.id(part))
                after_special = True
            elif part:
                ids += self._ordinary((" " if self._space_prefix and after_special else "") + part)
                after_special = False
        return ids

    def _ordinary(self, text: str) -> list[int]:
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            best = max(
                (i for i, piece in enumerate(self._pieces) if data.startswith(piece, at)),
                key=lambda i: len(self._pieces[i]),
            )
            ids.append(best)
            at += len(self._pieces[best])
        return ids

    def decode_bytes(self, ids: Sequence[int], *, special: bool = True) -> bytes:
        parts = []
        for i in ids:
            if i < self._first_special:
                parts.append(self._pieces[i])
            elif special:
                parts.append(self._specials[i - self._first_special].encode())
        return b"".join(parts)

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        return self.decode_bytes(ids, special=special).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        if token_id >= self._first_special:
            return self._specials[token_id - self._first_special]
        piece = self._pieces[token_id].decode("latin-1")
        return piece.replace(" ", "\u2581") if self._space_prefix else piece.replace(" ", "\u0120")


class StandInTemplate:
    """A Jinja chat template; `bos_token` is a variable of it."""

    def __init__(self, source: str, bos: str = "") -> None:
        self.source = source
        self._bos = bos
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = refuse
        self._template = environment.from_string(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            return self._template.render(
                messages=[_as_dict(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos,
                **(variables or {}),
            )
        except jinja2.TemplateError as error:
            raise TokenizerError(str(error)) from error


def _as_dict(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.role == "tool":
        shown.update(name=message.name, tool_call_id=message.tool_call_id)
    return shown


class StandInFormat:
    """`<tool_call>` around one JSON object a call."""

    name = "stand-in"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return True

    def parse(self, text: str) -> ParsedTurn:
        calls = []
        for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
            try:
                call = json.loads(body)
                calls.append(ToolCall(name=call["name"], arguments=call["arguments"]))
            except (ValueError, KeyError, TypeError) as error:
                return ParsedTurn(content=text, error=f"not a call: {error}")
        content = re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL).strip()
        return ParsedTurn(content=content, tool_calls=tuple(calls))

    def format_calls(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(
            "<tool_call>\n"
            + json.dumps({"name": c.name, "arguments": dict(c.arguments)}, ensure_ascii=False)
            + "\n</tool_call>"
            for c in calls
        )


TEMPLATES = Path(__file__).parent / "templates"


def template(name: str, bos: str = "") -> StandInTemplate:
    """The template `name` of the folder beside this module; its first line says whose behaviour it has."""
    return StandInTemplate((TEMPLATES / f"{name}.jinja").read_text(), bos)


def chatml() -> StandInTokenizer:
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    return StandInTokenizer(
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>", *tags), ["<|im_end|>", "<|endoftext|>"]
    )


def llama3() -> StandInTokenizer:
    headers = ("<|start_header_id|>", "<|end_header_id|>")
    stops = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    bos = "<|begin_of_text|>"
    return StandInTokenizer((bos, *stops, *headers), stops, bos=bos, adds_bos=True)


def gemma() -> StandInTokenizer:
    tokens = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
    return StandInTokenizer(tokens, ["<end_of_turn>", "<eos>"], bos="<bos>", adds_bos=True)


def r1() -> StandInTokenizer:
    tokens = ("<bos>", "<eos>", "<User>", "<Assistant>", "<think>", "</think>")
    return StandInTokenizer(tokens, ["<eos>"], bos="<bos>", adds_bos=True)


def mistral() -> StandInTokenizer:
    return StandInTokenizer(("<s>", "</s>"), ["</s>"], bos="<s>", adds_bos=True, space_prefix=True)
