"""Chat JSONL: conversations, with or without tools; the assistant's turns are trained.

::

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}

Roles are system, user, assistant and tool. System messages lead, then user and assistant alternate; a
record ends on an assistant turn or on the results of its calls. With `tools` (OpenAI's function shape, or
flat name, description, parameters) an assistant turn may have `tool_calls`, whose arguments are an object or
a JSON string; each is answered by a `tool` message before the next turn, bound by `tool_call_id` or by order.
`"is_error": true` puts `ERROR: ` before an observation. An assistant turn with `"raw": true` holds the exact
text that the model sampled, which the model's parser must read back to the same calls.

Trained are the tokens of assistant turns and the stop token after each, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from retrograd_hookspecs import (
    AuditFinding,
    BuildContext,
    ChatFormat,
    ChatTemplate,
    Component,
    Dataset,
    TokenExample,
    Tokenizer,
    TokenizerError,
    hookimpl,
    key,
)

if TYPE_CHECKING:
    from retrograd.conversation import EncodedConversation


@attrs.frozen(kw_only=True)
class ChatConfig:
    """Keys that an algorithm passes on from its own table."""

    template_variables: Mapping[str, Any] = key(factory=dict, doc="Variables for the chat template.")


class ChatDataset:
    """Reads chat JSONL for one model."""

    turns = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        chat_format: ChatFormat,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        from retrograd.conversation import ConversationEncoder

        self._template = template
        self._chat_format = chat_format
        self._encoder = ConversationEncoder(tokenizer, template, chat_format, template_variables)
        self._notes: list[str] = []

    def findings(self) -> Sequence[AuditFinding]:
        """Does the template render tools and repeat history, and does the chat format read its own calls?"""
        from retrograd.audit import audit_template

        findings = audit_template(self._encoder, self._chat_format)
        note = getattr(self._template, "fallback_note", str)()
        if note:
            findings.insert(0, AuditFinding(level="warning", check="chat template", message=note))
        return findings

    def load(self, path: Path, *, ctx: int) -> Sequence[TokenExample]:
        """All examples in the order of the lines; a record may become several (see `notes`).

        Raises: `DataError` with one problem a bad line, among them records longer than `ctx` tokens.
        """
        from retrograd.records import RecordError, read_records

        from ._conversation import parse_conversation, unknown_keys
        from ._encoded import Tally, examples

        tally = Tally(ctx=ctx)

        def parse(record: dict[str, Any], origin: str) -> list[TokenExample]:
            conversation = parse_conversation(record, self._chat_format)
            try:
                encoded: EncodedConversation = self._encoder.encode(conversation)
            except TokenizerError as error:
                raise RecordError(f"template and tokenizer cannot write it: {error}") from error
            found = examples(encoded.samples, origin, ctx)
            tally.count(origin, encoded.remarks, unknown_keys(record), found)
            return found

        loaded = [example for found in read_records(path, parse) for example in found]
        self._notes = tally.notes()
        return loaded

    def notes(self) -> Sequence[str]:
        """Counts, and what the template did with some of the records; filled by `load`."""
        return list(self._notes)


def _build(config: ChatConfig, context: BuildContext) -> Dataset:
    return ChatDataset(
        context.service("tokenizer"),
        context.service("template"),
        context.service("chat_format"),
        config.template_variables,
    )


@hookimpl
def retrograd_datasets() -> list[Component[ChatConfig, Dataset]]:
    """`jsonl`."""
    return [
        Component(
            name="jsonl",
            config=ChatConfig,
            build=_build,
            summary="Chat JSONL: assistant turns and their stop tokens are trained.",
            needs=("tokenizer", "template", "chat_format"),
        )
    ]
