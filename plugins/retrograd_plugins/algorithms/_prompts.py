"""Prompts of rollouts: chat JSONL whose records end on a user message, and the order of their draws."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np

from retrograd.records import RecordError, read_records
from retrograd_hookspecs import AuditFinding, ChatFormat, DataError, Message, Problem, TokenizerError

from ..datasets._conversation import check_order, parse_messages
from ..datasets._tools import parse_tools

if TYPE_CHECKING:
    from retrograd.conversation import ConversationEncoder

T = TypeVar("T")

_KEYS = ("messages", "tools", "rubric")


@attrs.frozen(kw_only=True)
class Prompt:
    """A record: its messages, its tokens with the generation prompt, and its further fields."""

    origin: str
    """`file:line`."""
    messages: tuple[Message, ...]
    tokens: tuple[int, ...]
    tools: bool = False
    """The model is shown tools."""
    rubric: str = ""
    metadata: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def text(self) -> str:
        """The last user message: what a reward program sees."""
        return self.messages[-1].content


def load_prompts(
    path: Path, encoder: ConversationEncoder, chat_format: ChatFormat, *, ctx: int, max_new_tokens: int
) -> list[Prompt]:
    """All prompts of a file, in the order of its lines.

    Raises: `DataError` with one problem a bad line, among them prompts that do not fit `ctx` together with
    an answer of `max_new_tokens`.
    """

    def parse(record: dict[str, Any], origin: str) -> Prompt:
        prompt = _parse(record, origin, encoder, chat_format)
        needed = len(prompt.tokens) + max_new_tokens
        if needed > ctx:
            raise RecordError(
                f"the prompt's {len(prompt.tokens)} tokens and max_new_tokens = {max_new_tokens} are {needed}"
                f" tokens, more than training.ctx = {ctx}",
                hint=f"raise ctx to {needed} or more, lower max_new_tokens, or shorten the prompt",
            )
        return prompt

    return read_records(path, parse)


def _parse(
    record: dict[str, Any], origin: str, encoder: ConversationEncoder, chat_format: ChatFormat
) -> Prompt:
    from retrograd.conversation import Conversation

    if "messages" not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise RecordError(
            f"has no messages; its keys are {keys}",
            hint='expected {"messages": [{"role": "user", "content": "…"}]}',
        )
    if record["messages"] == []:
        raise RecordError("is empty", key="messages", hint="a prompt needs a user message")
    messages = parse_messages(record["messages"], "messages", chat_format)
    check_order(messages, "messages")
    if messages[-1].role != "user":
        raise RecordError(
            f"ends on a message of role {messages[-1].role}, and a prompt ends on what the user asks",
            key=f"messages[{len(messages) - 1}]",
            hint="take the answer out: the model writes it",
        )
    rubric = record.get("rubric", "")
    if not isinstance(rubric, str):
        raise RecordError("must be a string", key="rubric")
    tools = parse_tools(record.get("tools"), "tools")
    conversation = Conversation(messages=tuple(messages), tools=tools)
    try:
        tokens = encoder.prompt(conversation)
    except TokenizerError as error:
        raise RecordError(f"template and tokenizer cannot write it: {error}") from error
    return Prompt(
        origin=origin,
        messages=tuple(messages),
        tokens=tuple(tokens),
        tools=bool(tools),
        rubric=rubric,
        metadata={name: value for name, value in record.items() if name not in _KEYS},
    )


def audit_prompts(
    prompts: Sequence[Prompt], held_out: Sequence[Prompt], *, judged: bool, longest: int, ctx: int
) -> list[AuditFinding]:
    """How long they are (`longest` with an answer), and what of them is not read or is trained on too."""
    tokens = max(len(prompt.tokens) for prompt in prompts)
    size = f"{len(prompts)} prompts, the longest of {tokens} tokens"
    message = f"{size}; with an answer at most {longest} of {ctx}"
    findings = [AuditFinding(level="ok", check="prompts", message=message)]
    unread = [prompt.origin for prompt in prompts if prompt.rubric]
    if unread and not judged:
        message = f"{len(unread)} prompts carry a rubric, and no judge reads it; first {unread[0]}"
        findings.insert(0, AuditFinding(level="note", check="data", message=message))
    known = {prompt.tokens: prompt.origin for prompt in prompts}
    shared = [prompt for prompt in held_out if prompt.tokens in known]
    if shared:
        message = (
            f"{len(shared)} of {len(held_out)} held-out prompts are trained on too; first:"
            f" {shared[0].origin} is {known[shared[0].tokens]}"
        )
        findings.append(AuditFinding(level="warning", check="held-out data", message=message))
    return findings


@attrs.frozen(kw_only=True)
class PromptOrder:
    """The endless order of draws: all prompts once, then all once more, and so on.

    `shuffled`: each pass in an order of its own, a function of seed and pass alone.
    """

    count: int
    seed: int
    shuffled: bool

    def at(self, draw: int) -> int:
        """Number of the prompt of draw `draw` (from 0)."""
        round_, place = divmod(draw, self.count)
        if not self.shuffled:
            return place
        return int(np.random.default_rng([self.seed, round_]).permutation(self.count)[place])


def spread(items: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` prompts or scenarios, evenly over the file."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def digest(prompts: Sequence[Prompt]) -> str:
    """Hash of what is drawn from and of what rewards see."""
    hasher = hashlib.sha256()
    for prompt in prompts:
        text = repr((prompt.tokens, prompt.text, prompt.rubric, sorted(prompt.metadata.items(), key=str)))
        hasher.update(text.encode())
    return hasher.hexdigest()


def load_both(path: Path, held_out: Path | None, load: Any) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts. Raises `DataError` with the bad lines of both files."""
    problems: list[Problem] = []
    loaded: list[list[Prompt]] = []
    for file in (path, held_out):
        try:
            loaded.append(load(file) if file is not None else [])
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return loaded[0], loaded[1]
