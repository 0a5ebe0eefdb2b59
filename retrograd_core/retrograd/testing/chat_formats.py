"""Contract of chat formats: `check_chat_format` for a plugin's tests."""

from __future__ import annotations

import json

from retrograd_hookspecs import ChatFormat, ToolCall

_CALLS = (
    ToolCall(name="get_weather", arguments={"city": "Tromsø", "days": 3}),
    ToolCall(
        name="search", arguments={"query": 'it\'s "quoted", {braced} [and] more', "limit": 2.5, "exact": True}
    ),
    ToolCall(name="submit", arguments={}),
    ToolCall(name="edit_file", arguments={"path": "a/b.py", "lines": [1, 2], "options": {"keep": None}}),
)
_HARMLESS = (
    "",
    "Plain text.",
    "2 < 3 and {x} [y]",
    "日本語\n\nزمین",
    "<think>Should I call a tool?</think>\n\nNo.",
)


def check_chat_format(chat_format: ChatFormat) -> None:
    """Raises AssertionError where a `ChatFormat` breaks its contract.

    Calls written by `format_calls`, one or several, are read back by `parse` to the same names and
    arguments, with nothing left over; a turn without calls is content as it is; a call that is cut short
    anywhere never raises and never becomes another call.
    """
    assert chat_format.name, "a chat format needs a name"
    assert isinstance(chat_format.matches("", {}), bool), "matches returns a bool"
    for count in range(1, len(_CALLS) + 1):
        calls = _CALLS[:count]
        text = chat_format.format_calls(calls)
        parsed = chat_format.parse(text)
        assert not parsed.error, f"{text!r} is its own text but was refused: {parsed.error}"
        assert _contents(parsed.tool_calls) == _contents(calls), f"{text!r} was read as {parsed.tool_calls}"
        assert not parsed.content.strip(), f"{text!r} left the content {parsed.content!r}"
    for text in _HARMLESS:
        parsed = chat_format.parse(text)
        assert parsed.content == text, f"{text!r} is content but became {parsed}"
        assert not parsed.tool_calls
        assert not parsed.error
    whole = chat_format.format_calls(_CALLS)
    contents = _contents(_CALLS)
    for end in range(len(whole)):
        found = _contents(chat_format.parse(whole[:end]).tool_calls)
        assert found == contents[: len(found)], f"{whole[:end]!r} was read as {found}"


def _contents(calls: tuple[ToolCall, ...]) -> list[tuple[str, str]]:
    return [(call.name, json.dumps(dict(call.arguments), sort_keys=True)) for call in calls]
