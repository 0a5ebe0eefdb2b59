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

from retrograd_hookspecs import (
    BuildContext,
    ChatFormat,
    ChatTemplate,
    Component,
    Dataset,
    ModelError,
    NoConfig,
    TokenExample,
    Tokenizer,
    TokenizerError,
    hookimpl,
)

if TYPE_CHECKING:
    from retrograd.conversation import EncodedConversation


class ChatDataset:
    """Reads chat JSONL for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        chat_format: ChatFormat,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        from retrograd.conversation import ConversationEncoder

        self._model = (tokenizer, template, chat_format)
        self._chat_format = chat_format
        self._encoder = ConversationEncoder(tokenizer, template, chat_format, template_variables)
        self._notes: list[str] = []

    def with_variables(self, template_variables: Mapping[str, Any]) -> ChatDataset:
        """The same dataset with variables for the chat template (`enable_thinking`)."""
        return ChatDataset(*self._model, template_variables)

    def load(self, path: Path, *, ctx: int) -> Sequence[TokenExample]:
        """All examples in the order of the lines; a record may become several (see `notes`).

        Raises: `DataError` with one problem a bad line, among them records longer than `ctx` tokens.
        """
        from ._conversation import parse_conversation, unknown_keys
        from ._encoded import Tally, examples
        from ._records import RecordError, read_records

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


def _build(config: NoConfig, context: BuildContext) -> Dataset:
    template = context.service("template")
    if template is None:
        raise ModelError(
            "chat data needs a chat template, and the model has no tokenizer.chat_template: use an instruct"
            ' model, or train plain text with data_format = "text"'
        )
    return ChatDataset(context.service("tokenizer"), template, context.service("chat_format"))


@hookimpl
def retrograd_datasets() -> list[Component[NoConfig, Dataset]]:
    """`chat`."""
    return [
        Component(
            name="chat",
            config=NoConfig,
            build=_build,
            summary='Chat JSONL (data_format = "jsonl"): assistant turns and their stop tokens are trained.',
            needs=("tokenizer", "template", "chat_format"),
        )
    ]
