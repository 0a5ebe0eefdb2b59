"""The growing token sequence of one trajectory.

Sampled tokens stay as they were sampled; only the template's framing and observations are tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from retrograd.conversation import Continuation, Conversation, ConversationEncoder
from retrograd.engine import Completion
from retrograd_hookspecs import ChatFormat, Message, ParsedTurn

CUT_MARK = "\n[cut here: the token budget of this conversation is nearly used up]"
"""Stands behind what is left of an observation that there was no room for."""

_THINK = "<think>"
MOST_CHARACTERS = 16
"""Of an observation that is cut, no more characters are kept for each token that there is room for."""


@attrs.define(eq=False)
class Trajectory:
    """Messages and tokens of a conversation in progress.

    `tokens`, `trained` and `logp` have one entry a token; `trained` is True where the policy wrote it.
    """

    encoder: ConversationEncoder
    chat_format: ChatFormat
    tools: tuple[Mapping[str, Any], ...]
    opening: tuple[Message, ...]
    messages: list[Message] = attrs.field(factory=list)
    """What followed the opening."""
    tokens: list[int] = attrs.field(factory=list)
    trained: list[bool] = attrs.field(factory=list)
    logp: list[float] = attrs.field(factory=list)
    rewritten: bool = False
    """The template rewrites earlier turns: framing was taken around a stand-in."""
    cuts: int = 0
    """Observations that were cut to the token budget."""
    prompt_tokens: int = 0
    masked: list[float] = attrs.field(factory=list)
    """See `Completion.masked`."""
    _text: str = ""

    def start(self) -> None:
        """Render the opening with the tools. Raises: `TokenizerError` if the template refuses it."""
        prompt = self.encoder.start(self._conversation())
        self._text = prompt.text
        self._add(prompt.tokens)
        self.prompt_tokens = len(self.tokens)

    def add_turn(self, completion: Completion) -> ParsedTurn:
        """Append a sampled turn; what the chat format reads in it. Calls get ids that count up."""
        ids = completion.tokens.tolist()
        previous, thinking = self.tokens[-1], self.thinking
        self.tokens += ids
        self.trained += [True] * len(ids)
        self.logp += completion.logp.tolist()
        self.masked += completion.masked
        stopped = completion.finish == "stop"
        text = self.encoder.pieces.text(ids[:-1] if stopped else ids, previous)
        self._text += text
        # A turn that does not close the thought may hold calls all the same.
        parsed = self.chat_format.parse(f"{_THINK}{text}" if thinking and "</think>" in text else text)
        count = sum(len(message.tool_calls) for message in self.messages)
        calls = tuple(attrs.evolve(call, id=call_id(count + n)) for n, call in enumerate(parsed.tool_calls))
        message = Message(
            role="assistant",
            content=text,
            tool_calls=calls,
            raw=True,
            token_ids=tuple(ids) if stopped else (),
        )
        self.messages.append(message)
        return attrs.evolve(parsed, tool_calls=calls)

    def framing(self, observations: Sequence[Message], most: int | None = None) -> tuple[int, ...] | None:
        """Append observations; the tokens of them and of the template's text up to the next turn. They are
        not part of the sequence before `continue_with`.

        Args:
            most: tokens that there is room for. Observations that need more are cut, all at one length in
                characters, with `CUT_MARK` behind what is left; None if even then there is no room.

        Raises: `TokenizerError` or `DataError` if the template cannot write them.
        """
        given = tuple(observations)
        follows = self._follows(given)
        if most is not None and len(follows.tokens) > most:
            shorter = self._shorter(given, most)
            if shorter is None:
                self.messages += given
                return None
            given, follows = shorter
            self.cuts += sum(a.content != b.content for a, b in zip(given, observations, strict=True))
        self.messages += given
        self._text = follows.text
        self.rewritten = self.rewritten or not follows.exact
        return follows.tokens

    def continue_with(self, framing: Sequence[int]) -> None:
        """Append framing tokens."""
        self._add(framing)

    @property
    def thinking(self) -> bool:
        """True if the next turn begins inside reasoning that the template opened."""
        return self._text.rstrip().endswith(_THINK)

    @property
    def next_token(self) -> int:
        """Index of the token that comes next."""
        return len(self.tokens)

    def arrays(self) -> tuple[Any, Any, Any]:
        """`tokens` int32, `trained` bool, `logp` float64, (n,) each."""
        return (
            np.array(self.tokens, np.int32),
            np.array(self.trained, np.bool_),
            np.array(self.logp, np.float64),
        )

    def _conversation(self, more: Sequence[Message] = ()) -> Conversation:
        return Conversation(messages=(*self.opening, *self.messages, *more), tools=self.tools)

    def _follows(self, observations: Sequence[Message]) -> Continuation:
        return self.encoder.follow(self._conversation(observations), self._text)

    def _shorter(
        self, observations: Sequence[Message], most: int
    ) -> tuple[tuple[Message, ...], Continuation] | None:
        """Observations cut at the greatest length at which they fit, and what they become."""
        best = None
        longest = max(len(message.content) for message in observations)
        low, high = 0, min(longest, MOST_CHARACTERS * most)
        while low < high:
            length = (low + high) // 2
            cut = tuple(_cut(message, length) for message in observations)
            follows = self._follows(cut)
            if len(follows.tokens) <= most:
                best, low = (cut, follows), length + 1
            else:
                high = length
        return best

    def _add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.trained += [False] * len(tokens)
        self.logp += [0.0] * len(tokens)


def _cut(message: Message, length: int) -> Message:
    """The message with its text cut at a length in characters, unless the mark would make it longer."""
    text = message.content[:length] + CUT_MARK
    return attrs.evolve(message, content=text) if len(text) < len(message.content) else message


def call_id(number: int) -> str:
    """Id of a trajectory's call; nine letters and digits, as Mistral's template wants."""
    return f"call{number:05d}"
