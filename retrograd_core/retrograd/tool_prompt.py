"""Tool conversations for chat templates that know no tools.

A template supports tools if a catalogue, a call and an observation all come out of it, which is tried once
with sentinels. For any other template the catalogue goes into the system prompt, calls are written the way
the model's `ChatFormat` writes them, and observations come back as user messages between
`<tool_response>` tags. Training data and rollouts use the same rendering.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from retrograd_hookspecs import ChatFormat, ChatTemplate, Message, TokenizerError, ToolCall

ERROR_PREFIX = "ERROR: "
"""What an observation with `is_error` begins with."""

_CATALOGUE, _CALL, _OBSERVATION, _SYSTEM = "zq_catalogue", "zq_call", "zq_observation", "zq_system"


@attrs.frozen(kw_only=True)
class TemplateSupport:
    """What a chat template can express."""

    tools: bool
    system: bool


def probe_template(template: ChatTemplate, variables: Mapping[str, Any] | None = None) -> TemplateSupport:
    """Render sentinels and look for them in the text."""
    return TemplateSupport(
        tools=_supports_tools(template, variables), system=_supports_system(template, variables)
    )


def call_id(index: int) -> str:
    """Id of the conversation's call number `index` where the record gives none; nine letters and digits,
    which every template accepts."""
    return f"call{index:05d}"


def observed(message: Message) -> Message:
    """A tool message as the model sees it: a failed one begins with `ERROR: `."""
    if not message.is_error:
        return message
    return attrs.evolve(message, content=ERROR_PREFIX + message.content, is_error=False)


def openai_tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as templates expect it, keys in a fixed order so that its text never depends on the source."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def write_tools_as_text(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    chat_format: ChatFormat,
    support: TemplateSupport,
) -> tuple[Message, ...]:
    """The conversation with system, user and assistant messages alone, tools and calls as their text."""
    plain = _observations_as_user_messages(_calls_as_content(message, chat_format) for message in messages)
    if not tools:
        return tuple(plain)
    catalogue = catalogue_text(tools, chat_format)
    if plain and plain[0].role == "system":
        first = attrs.evolve(plain[0], content=f"{plain[0].content}\n\n{catalogue}")
        return (first, *plain[1:])
    if support.system:
        return (Message(role="system", content=catalogue), *plain)
    if plain and plain[0].role == "user":
        first = attrs.evolve(plain[0], content=f"{catalogue}\n\n{plain[0].content}")
        return (first, *plain[1:])
    return tuple(plain)


def catalogue_text(tools: Sequence[Mapping[str, Any]], chat_format: ChatFormat) -> str:
    """The tools and how to call them, for a system prompt."""
    example = ToolCall(name="NAME", arguments={"ARGUMENT": "VALUE"})
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "These functions are available, one JSON description on a line:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        "To call one, answer with its name and arguments in exactly this form:\n"
        f"{chat_format.format_calls((example,))}\n\n"
        "What it returns comes back between <tool_response> and </tool_response>."
    )


def _calls_as_content(message: Message, chat_format: ChatFormat) -> Message:
    if message.role != "assistant" or not message.tool_calls:
        return message
    if message.raw:
        return attrs.evolve(message, tool_calls=())  # they stand in its content
    calls = chat_format.format_calls(message.tool_calls)
    content = f"{message.content}\n{calls}" if message.content else calls
    return attrs.evolve(message, content=content, tool_calls=())


def _observations_as_user_messages(messages: Any) -> list[Message]:
    """Consecutive observations become one user message, together with a user message right after them."""
    plain: list[Message] = []
    after_observation = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            separator = "\n"
        else:
            text, separator = message.content, "\n\n"
        if after_observation and message.role in ("tool", "user"):
            plain[-1] = attrs.evolve(plain[-1], content=plain[-1].content + separator + text)
        elif message.role == "tool":
            plain.append(Message(role="user", content=text))
        else:
            plain.append(message)
        after_observation = message.role == "tool"
    return plain


def _supports_tools(template: ChatTemplate, variables: Mapping[str, Any] | None) -> bool:
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    call = ToolCall(name="zq_tool", arguments={"text": _CALL}, id=call_id(0))
    messages = (
        Message(role="user", content="zq_user"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content=_OBSERVATION, tool_call_id=call.id, name=call.name),
    )
    try:
        text = template.render(
            messages,
            tools=[openai_tool("zq_tool", _CATALOGUE, parameters)],
            add_generation_prompt=True,
            variables=variables,
        )
    except TokenizerError:
        return False
    return all(sentinel in text for sentinel in (_CATALOGUE, _CALL, _OBSERVATION))


def _supports_system(template: ChatTemplate, variables: Mapping[str, Any] | None) -> bool:
    messages = (Message(role="system", content=_SYSTEM), Message(role="user", content="zq_user"))
    try:
        return _SYSTEM in template.render(messages, add_generation_prompt=True, variables=variables)
    except TokenizerError:
        return False
