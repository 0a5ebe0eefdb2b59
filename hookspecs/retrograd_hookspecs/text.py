"""Tokens, conversations, and how model families write tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import attrs

Role = Literal["system", "user", "assistant", "tool"]


@attrs.frozen(kw_only=True)
class ToolCall:
    """A call as the model made it. `arguments` is the parsed JSON object.

    `texts` holds the text of arguments whose chat format writes no types, so that `5` may be a number or a
    text: a tool gets the text where its schema allows no other reading.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    texts: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)


@attrs.frozen(kw_only=True)
class Message:
    """One turn. `raw` means that `content` of an assistant turn holds the exact text that was sampled, its
    calls included; `token_ids` are then the tokens it was sampled as, with the stop token, where they are
    known."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    is_error: bool = False
    raw: bool = False
    token_ids: tuple[int, ...] = ()


class Tokenizer(Protocol):
    """Exact reproduction of a GGUF's tokenizer. `pre` families that are unknown are refused."""

    vocabulary_size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    adds_eos: bool
    stop_ids: frozenset[int]
    """Tokens that end a turn: EOS, EOT and the family's end-of-message tokens."""

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Token ids. `special`: names of special tokens in the text become those tokens. `bos`: put
        BOS first where the model asks for it (`adds_bos`)."""

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Text; bytes that are not UTF-8 become U+FFFD. `special=False` leaves special tokens out."""

    def decode_bytes(self, ids: Sequence[int], *, special: bool = True) -> bytes:
        """The exact bytes."""

    def token_text(self, token_id: int) -> str:
        """The vocabulary entry as stored."""


class ChatTemplate(Protocol):
    """A model's own Jinja template, run in a sandbox."""

    source: str

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of the conversation. `TokenizerError` carries what the template raised."""


@attrs.frozen(kw_only=True)
class ParsedTurn:
    """An assistant turn read back: text outside calls, calls, and what could not be parsed."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    error: str = ""


class ChatFormat(Protocol):
    """How one model family writes tool calls."""

    name: str

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        """True if a model with this chat template and vocabulary speaks the format."""

    def parse(self, text: str) -> ParsedTurn:
        """Read a sampled assistant turn (without its stop token). Never raises on malformed calls:
        `error` says what was wrong."""

    def format_calls(self, calls: Sequence[ToolCall]) -> str:
        """The text that a model of this family writes for `calls`."""


@runtime_checkable
class GrammarFormat(ChatFormat, Protocol):
    """A chat format with a grammar of its turns, for constrained decoding. Optional."""

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> str | None:
        """The turns in which all calls are calls of `tools` that `parse` reads without error and whose
        arguments fit the tool's schema; text outside of calls, reasoning included, is free.

        None if this variant of the format has no grammar. For the notation see `GrammarEngine.compile`.

        Args:
            tools: at least one, in OpenAI's function shape.
            thinking: the prompt ends in `<think>`, which `parse` is given before a turn that closes it.
        """
