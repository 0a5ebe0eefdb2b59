"""What a format writes it reads back, what it cannot write it refuses, what it cannot read is an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.testing.chat_formats import check_chat_format
from retrograd_hookspecs import DataError, ParsedTurn, ToolCall
from retrograd_plugins.chat_formats._base import FormatBase
from retrograd_plugins.chat_formats.deepseek import DeepSeekFormat
from retrograd_plugins.chat_formats.functionary import FunctionaryFormat
from retrograd_plugins.chat_formats.gemma import GemmaFormat
from retrograd_plugins.chat_formats.granite import GraniteFormat
from retrograd_plugins.chat_formats.hermes import HermesFormat
from retrograd_plugins.chat_formats.lfm2 import Lfm2Format
from retrograd_plugins.chat_formats.llama3_json import Llama3JsonFormat
from retrograd_plugins.chat_formats.llama3_pythonic import Llama3PythonicFormat
from retrograd_plugins.chat_formats.mistral import MistralFormat
from retrograd_plugins.chat_formats.prompt import PromptFormat
from retrograd_plugins.chat_formats.qwen3_coder import Qwen3CoderFormat
from retrograd_plugins.chat_formats.smollm3 import SmolLM3Format

from .strategies import TEXT, TRICKY, calls

# Formats that can write any JSON, in every variant that a template chooses.
ANY_JSON = {
    "hermes": HermesFormat(),
    "prompt": PromptFormat(),
    "smollm3": SmolLM3Format(),
    "llama3_json": Llama3JsonFormat(),
    "llama3_pythonic": Llama3PythonicFormat(),
    "lfm2": Lfm2Format(),
    "mistral": MistralFormat(),
    "mistral-spaced": MistralFormat("[TOOL_CALLS] ["),
    "mistral-args": MistralFormat("[TOOL_CALLS]name[ARGS]"),
    "deepseek": DeepSeekFormat(),
    "deepseek-fenced": DeepSeekFormat("```json"),
    "granite": GraniteFormat(),
    "granite-closed": GraniteFormat("<|tool_call|><|/tool_call|>"),
    "functionary": FunctionaryFormat(">>>all"),
    "functionary-element": FunctionaryFormat("<function="),
    "gemma": GemmaFormat("tool_code"),
}
# Formats whose texts stand without quotes, so that some cannot be written.
BARE = {
    "qwen3_coder": Qwen3CoderFormat(),
    "gemma-function": GemmaFormat("<start_function_call>"),
    "gemma-4": GemmaFormat("<|tool_call>"),
}
EVERY = ANY_JSON | BARE
FORMATS = pytest.mark.parametrize("chat_format", EVERY.values(), ids=EVERY)
WORDS = st.from_regex(r"[a-z][a-z ,.'äé\n]{0,10}[a-z]", fullmatch=True).filter(
    lambda text: text not in ("true", "false", "null")
)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)


def contents(parsed: ParsedTurn | list[ToolCall]) -> list[tuple[str, str]]:
    found = parsed.tool_calls if isinstance(parsed, ParsedTurn) else parsed
    return [(call.name, json.dumps(call.arguments)) for call in found]


def assert_read_back(chat_format: FormatBase, wanted: list[ToolCall]) -> None:
    parsed = chat_format.parse(chat_format.format_calls(wanted))
    assert parsed.error == ""
    assert contents(parsed) == contents(wanted)
    assert parsed.content == ""


@pytest.mark.parametrize("chat_format", ANY_JSON.values(), ids=ANY_JSON)
@given(wanted=calls())
@settings(max_examples=150, deadline=None)
def test_any_json_is_read_back(chat_format: FormatBase, wanted: list[ToolCall]) -> None:
    assert_read_back(chat_format, wanted)


@pytest.mark.parametrize("chat_format", BARE.values(), ids=BARE)
@given(wanted=calls(WORDS, KEYS))
@settings(max_examples=150, deadline=None)
def test_plain_texts_are_read_back(chat_format: FormatBase, wanted: list[ToolCall]) -> None:
    assert_read_back(chat_format, wanted)


@pytest.mark.parametrize("chat_format", BARE.values(), ids=BARE)
@given(wanted=calls())
@settings(max_examples=150, deadline=None)
def test_what_cannot_be_written_is_refused(chat_format: FormatBase, wanted: list[ToolCall]) -> None:
    try:
        text = chat_format.format_calls(wanted)
    except DataError as error:
        assert chat_format.name in str(error)  # noqa: PT017
    else:
        assert contents(chat_format.parse(text)) == contents(wanted)


_JSON = (
    '{"name": "f", "arguments": {}}',
    '{"name": "f", "parameters": {"a": [1}',
    "{",
    "}",
    "[",
    "]",
    ",",
    "'",
)
_CALLS = (
    "f[ARGS]",
    "[CALL_ID]x",
    "f(a=",
    ")",
    "[f(",
    "function",
    "\n```json\n",
    "call:f{",
    "a:",
    "; ",
    "all\n",
)
_OPENINGS = (
    "<tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "```tool_code\n",
    "<|tool_call|>",
    "<code>",
    ">>>",
)
_CLOSINGS = ("</tool_call>", "```", "</parameter>", "</function>", "<end_function_call>", "</think>", "f\n")
_ELEMENTS = ("<function=f>", "<parameter=a>", "<start_function_call>", "<escape>", "<think>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
PIECES = st.sampled_from((*_JSON, *_CALLS, *_OPENINGS, *_CLOSINGS, *_ELEMENTS, *_DEEPSEEK))


@FORMATS
@given(pieces=st.lists(PIECES | TEXT | TRICKY, max_size=10))
@settings(max_examples=200, deadline=None)
def test_reading_never_raises(chat_format: FormatBase, pieces: list[str]) -> None:
    text = "".join(pieces)
    parsed = chat_format.parse(text)
    assert chat_format.parse(text) == parsed
    if not parsed.tool_calls and not parsed.error:
        assert len(parsed.content) <= len(text)


@FORMATS
@pytest.mark.parametrize(
    "make", [lambda f: "[" * 100_000, lambda f: '{"a":' * 100_000, lambda f: "9" * 10_000]
)
def test_deep_and_long_values_are_errors(chat_format: FormatBase, make: Callable[[Any], str]) -> None:
    example = chat_format.format_calls([ToolCall(name="f", arguments={"a": 12345678})])
    assert "12345678" in example
    parsed = chat_format.parse(example.replace("12345678", make(chat_format)))
    assert parsed.error or chat_format.name == "qwen3_coder"


@FORMATS
def test_contract(chat_format: FormatBase) -> None:
    check_chat_format(chat_format)
