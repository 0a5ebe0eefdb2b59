"""From a conversation to tokens and the mask of what is trained.

The tokens are those of a rollout of the same conversation: the prompt up to an assistant turn, ending in the
template's generation prompt; the turn's own tokens and the stop token, as sampled; the framing up to the
next assistant turn; and so on. Only turns and their stop tokens are trained. What the template writes
after the last stop token is never seen by the model and is left out.

A template that does not repeat earlier turns exactly (Qwen3 takes `<think>` out of history) breaks that
sequence; there a rollout starts a new one, and so does the record: it becomes several samples, in which each
assistant turn is trained once, behind exactly the context that it is sampled from.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from retrograd_hookspecs import (
    ChatFormat,
    ChatTemplate,
    DataError,
    Message,
    Problem,
    Tokenizer,
    TokenizerError,
)

from .token_pieces import PieceEncoder
from .tool_prompt import observed, probe_template, write_tools_as_text

_STAND_IN = "zq_turn"
"""Stands, with a number, for a sampled turn while the template's text behind it is looked for."""

REMARKS = {
    "split": "the chat template does not repeat an earlier assistant turn as it was sampled, so the record"
    " became several samples; each assistant turn is trained once",
    "stripped": "the chat template removes white space around an assistant turn; what is trained is what the"
    " template writes",
    "rewritten": "the chat template writes an assistant turn otherwise than its content says; what is trained"
    " is what the template writes",
    "dropped": "the chat template leaves out the text of a system, user or tool message",
    "special": "the text of a special token inside a message became that token",
    "tools as text": "the chat template has no place for tools, so the catalogue stands in the system prompt"
    " and calls in the text of the turn, as in a rollout",
    "unread call": "the model's chat format does not read the tool calls of a turn back as they were given",
}
"""What can be remarkable about a record, by name."""


@attrs.frozen(kw_only=True)
class Conversation:
    """Messages and the tools that they may call, in OpenAI's function shape."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@attrs.frozen(kw_only=True)
class Sample:
    """Token ids, and whether each is a target of the loss."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]


@attrs.frozen(kw_only=True)
class EncodedConversation:
    """One sample, or several where the template rewrites history. `remarks` are keys of `REMARKS`."""

    samples: tuple[Sample, ...]
    remarks: frozenset[str] = frozenset()


@attrs.frozen(kw_only=True)
class Continuation:
    """What follows a sampled turn: the template's framing with observations or a user's message, up to where
    the model writes again.

    `tokens` follow the turn's stop token. `text` is the whole conversation so far. `exact` is False where the
    template rewrites earlier turns, so that the framing was taken from a rendering around a stand-in of the
    turn: what the model sampled is kept as it was.
    """

    tokens: tuple[int, ...]
    text: str
    exact: bool


@attrs.define
class _Sequence:
    """A sample in the making: its tokens, and the text that they stand for."""

    text: str
    stop_text: str
    tokens: list[int]
    trained: list[bool]
    raw: bool = False
    """The last turn is the exact text that was sampled."""

    def extend(self, ids: Sequence[int], trained: bool) -> None:
        self.tokens.extend(ids)
        self.trained.extend([trained] * len(ids))


class ConversationEncoder:
    """Encodes conversations for one model: tokenizer, chat template with its variables, chat format."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        chat_format: ChatFormat,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._template = template
        self._chat_format = chat_format
        self._variables = dict(variables or {})
        self.pieces = PieceEncoder(tokenizer)
        self.support = probe_template(template, self._variables)

    def prompt(self, conversation: Conversation) -> list[int]:
        """Token ids that the model continues with its next turn.

        Raises: `TokenizerError` if the template refuses the conversation.
        """
        messages, tools = self._prepared(conversation)
        return self.pieces.prompt(self._render(messages, tools, generation=True))

    def start(self, conversation: Conversation) -> Continuation:
        """The prompt of a rollout.

        Raises: `TokenizerError` if the template refuses the conversation.
        """
        messages, tools = self._prepared(conversation)
        text = self._render(messages, tools, generation=True)
        return Continuation(tokens=tuple(self.pieces.prompt(text)), text=text, exact=True)

    def follow(self, conversation: Conversation, text: str) -> Continuation:
        """What comes after the last assistant turn of a rollout, which was sampled and is raw.

        `text` is the conversation up to and with that turn, without its stop token; only what follows it is
        tokenised.

        Raises: `TokenizerError` if the template refuses the conversation; `DataError` if the turn's end
        cannot be told from the template's text.
        """
        messages, tools = self._prepared(conversation)
        return self._follow(messages, tools, text)

    def _follow(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], text: str
    ) -> Continuation:
        try:
            full = self._render(messages, tools, generation=True)
        except TokenizerError:
            full = ""  # it refuses a turn whose calls stand in its content
        for stop_text in sorted(self.pieces.stop_texts, key=len, reverse=True):
            if full.startswith(text + stop_text):
                framing = full[len(text) + len(stop_text) :]
                tokens = tuple(self.pieces.framing(framing, stop_text))
                return Continuation(tokens=tokens, text=full, exact=True)
        stop_text, framing = self._behind(messages, tools, generation=True)
        return Continuation(
            tokens=tuple(self.pieces.framing(framing, stop_text)),
            text=text + stop_text + framing,
            exact=False,
        )

    def _behind(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, generation: bool
    ) -> tuple[str, str]:
        """What the template writes behind the last assistant turn, whatever it makes of the turn itself: the
        text of the stop token, and the rest.

        A stand-in takes the turn's place. Some templates drop the content of a turn with calls, and so the
        stand-in stands in the arguments of its calls too. Some check that an observation answers a call
        (Mistral), which they do not see in a raw turn: for them earlier turns are given by their calls.
        """
        last = max(i for i, message in enumerate(messages) if message.role == "assistant")
        texts = "".join(message.content + message.name for message in messages)
        stand_in = next(name for n in itertools.count() if (name := f"{_STAND_IN}{n}x") not in texts)
        calls = tuple(
            attrs.evolve(
                call,
                name=stand_in if self.pieces.find_stop(call.name) else call.name,
                arguments={stand_in: stand_in},
            )
            for call in messages[last].tool_calls
        )
        turn = attrs.evolve(messages[last], content=stand_in, tool_calls=calls, raw=False, token_ids=())
        refusal: TokenizerError | None = None
        for history in (messages[:last], list(map(_by_calls, messages[:last]))):
            try:
                full = self._render([*history, turn, *messages[last + 1 :]], tools, generation=generation)
            except TokenizerError as error:
                refusal = refusal or error
                continue
            behind = full[full.rfind(stand_in) + len(stand_in) :]
            stop = self.pieces.find_stop(behind)
            if stand_in in full and stop is not None:
                return behind[stop.start : stop.stop], behind[stop.stop :]
        if refusal is not None:
            raise refusal
        raise _refused(
            last,
            "the chat template does not write this turn with a stop token behind it, so what follows it in a"
            " rollout is not known",
            "use another chat template",
        )

    def encode(self, conversation: Conversation) -> EncodedConversation:
        """Samples with every assistant turn trained once.

        Raises: `TokenizerError` if the template refuses the conversation; `DataError` if a turn cannot be
        told apart from the template's text, holds a stop token itself, or is not ended by one.
        """
        messages, tools = self._prepared(conversation)
        remarks = self._look_at(conversation, messages)
        sequences: list[_Sequence] = []
        prompt = ""
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            if sequences and message.raw and sequences[-1].raw:
                # As a rollout goes on: the sampled turn stays as it is, whatever the template makes of it
                # later.
                sequence = sequences[-1]
                before = sequence.text.removesuffix(sequence.stop_text)
                follows = self._follow(messages[:index], tools, before)
                sequence.extend(follows.tokens, trained=False)
                prompt, turn = follows.text, message.content
                stop_text, _ = self._behind(messages[: index + 1], tools, generation=False)
            else:
                prompt = self._render(messages[:index], tools, generation=True)
                turn, stop_text = self._turn(prompt, messages[: index + 1], tools, remarks)
                if sequences and prompt.startswith(sequences[-1].text):
                    sequence = sequences[-1]
                    framing = self.pieces.framing(prompt[len(sequence.text) :], sequence.stop_text)
                    sequence.extend(framing, trained=False)
                else:
                    sequence = _Sequence("", "", [], [])
                    sequence.extend(self.pieces.prompt(prompt), trained=False)
                    sequences.append(sequence)
            if message.token_ids:
                sequence.extend(self._sampled(index, message, sequence.tokens), trained=True)
            else:
                sequence.extend(self.pieces.turn(turn, sequence.tokens), trained=True)
                sequence.extend([self.pieces.stop_texts[stop_text]], trained=True)
            sequence.text, sequence.stop_text = prompt + turn + stop_text, stop_text
            sequence.raw = message.raw
        if len(sequences) > 1:
            remarks.add("split")
        self._check_context(messages, prompt, remarks)
        return EncodedConversation(
            samples=tuple(Sample(tokens=tuple(s.tokens), trained=tuple(s.trained)) for s in sequences),
            remarks=frozenset(remarks),
        )

    def _prepared(
        self, conversation: Conversation
    ) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
        """Messages and tools as the template gets them."""
        messages = tuple(observed(message) for message in conversation.messages)
        if self._needs_tools_as_text(conversation):
            messages = write_tools_as_text(messages, conversation.tools, self._chat_format, self.support)
            return messages, ()
        return messages, conversation.tools

    def _needs_tools_as_text(self, conversation: Conversation) -> bool:
        uses_tools = conversation.tools or any(
            m.tool_calls or m.role == "tool" for m in conversation.messages
        )
        return bool(uses_tools) and not self.support.tools

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, generation: bool
    ) -> str:
        # The template must not write the calls of a raw turn once more: its content holds them already.
        shown = [attrs.evolve(message, tool_calls=()) if message.raw else message for message in messages]
        return self._template.render(
            shown, tools=tools, add_generation_prompt=generation, variables=self._variables
        )

    def _turn(
        self,
        prompt: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        remarks: set[str],
    ) -> tuple[str, str]:
        """Text of the last message as the model samples it after `prompt`, and its stop token's text."""
        index, message = len(messages) - 1, messages[-1]
        if message.raw:
            stop_text, _ = self._behind(messages, tools, generation=False)
            return message.content, stop_text
        full = self._render(messages, tools, generation=False)
        begins = _common_length(prompt, full)
        rest = full[begins:]
        stop = self.pieces.find_stop(rest)
        if stop is None:
            known = ", ".join(repr(text) for text in sorted(self.pieces.stop_texts)) or "none"
            raise _refused(
                index,
                f"the chat template ends the turn with {rest[-20:]!r}, where no stop token stands, so the"
                " model would not learn to stop",
                f"stop tokens of this model: {known}",
            )
        stop_text = rest[stop.start : stop.stop]
        if begins < len(prompt):
            return _turn_after_opening(index, message, prompt, begins), stop_text
        turn = rest[: stop.start]
        self._compare(message, prompt, turn, remarks)
        return turn, stop_text

    def _sampled(self, index: int, message: Message, before: Sequence[int]) -> list[int]:
        """The tokens that a raw turn was sampled as. Raises `DataError` unless they spell its content."""
        *ids, stop = message.token_ids
        if stop not in self.pieces.stop_ids:
            raise _refused(index, f"token_ids end with {stop}, which is no stop token of this model")
        text = self.pieces.text(ids, before[-1] if before else None)
        if text != message.content:
            raise _refused(
                index,
                f"token_ids spell {text[:60]!r} with this model's tokenizer, and the content is"
                f" {message.content[:60]!r}",
                "traces with token_ids are for the model that wrote them; leave token_ids out for another",
            )
        return [*ids, stop]

    def _compare(self, message: Message, prompt: str, turn: str, remarks: set[str]) -> None:
        # The generation prompt may hold the beginning of the content.
        written = prompt[len(prompt) - len(message.content) :] + turn
        if message.content not in written:
            remarks.add("stripped" if message.content.strip() in written else "rewritten")
        if message.tool_calls:
            parsed = self._chat_format.parse(turn)
            if [(c.name, dict(c.arguments)) for c in parsed.tool_calls] != [
                (c.name, dict(c.arguments)) for c in message.tool_calls
            ]:
                remarks.add("unread call")

    def _look_at(self, conversation: Conversation, messages: Sequence[Message]) -> set[str]:
        """Refuse assistant turns that hold a stop token; note special tokens elsewhere, tools as text."""
        remarks = {"tools as text"} if self._needs_tools_as_text(conversation) else set()
        for index, message in enumerate(messages):
            if message.role != "assistant":
                if self.pieces.special_text_in(message.content):
                    remarks.add("special")
                continue
            if message.token_ids:
                continue  # it ended where it did; text that spells a stop token is not one
            calls = "".join(
                json.dumps(dict(call.arguments), ensure_ascii=False) for call in message.tool_calls
            )
            stop = self.pieces.find_stop(message.content + calls)
            if stop is not None:
                name = (message.content + calls)[stop.start : stop.stop]
                raise _refused(
                    index,
                    f"the assistant turn contains the stop token {name!r}, where it would end",
                    "take it out; the chat template writes the stop token",
                )
        return remarks

    def _check_context(self, messages: Sequence[Message], prompt: str, remarks: set[str]) -> None:
        """Note messages before the last assistant turn whose text is not in what the model sees."""
        last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=0)
        for message in messages[:last]:
            text = message.content.strip()
            # Templates may write an observation as a JSON string.
            if (
                message.role != "assistant"
                and text not in prompt
                and json.dumps(text, ensure_ascii=False)[1:-1] not in prompt
            ):
                remarks.add("dropped")


def _turn_after_opening(index: int, message: Message, prompt: str, begins: int) -> str:
    """The sampled text where the generation prompt ends in text that the template leaves out of a given turn
    (`<think>` of a reasoning model, from about character `begins` on): the content must begin with it."""
    # The given turn may happen to share its first characters with that text.
    for start in range(begins, max(begins - 16, -1), -1):
        opening = prompt[start:]
        if message.content.startswith(opening) and not message.tool_calls:
            return message.content[len(opening) :]
        if message.content.startswith(opening.strip()) and not message.tool_calls and opening.strip():
            return message.content[len(opening.strip()) :].lstrip("\n")
    shown = prompt[begins:][-60:]
    raise _refused(
        index,
        f"the template's generation prompt ends in {shown!r}, which this turn does not continue",
        f"begin the content with {shown!r}, give the sampled text with raw = true, or set template_variables"
        " that turn this opening off",
    )


def _by_calls(message: Message) -> Message:
    """A raw turn with calls, given by them alone."""
    if not message.raw or not message.tool_calls:
        return message
    return attrs.evolve(message, content="", raw=False, token_ids=())


def _common_length(first: str, second: str) -> int:
    """Length of the common prefix."""
    if second.startswith(first):
        return len(first)
    return next(i for i, (a, b) in enumerate(zip(first, second + "\0", strict=False)) if a != b)


def _refused(index: int, message: str, hint: str = "") -> DataError:
    return DataError([Problem(where="conversation", key=f"messages[{index}]", message=message, hint=hint)])
