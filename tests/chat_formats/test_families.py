"""Turns as the models write them, family by family, and which template selects which format."""

from __future__ import annotations

import re
from typing import Any

import pytest

from retrograd.parts import first_match
from retrograd_hookspecs import DataError, ToolCall
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

CLASSES: list[type[FormatBase]] = [
    *(DeepSeekFormat, FunctionaryFormat, GemmaFormat, GraniteFormat, HermesFormat, Lfm2Format),
    *(Llama3JsonFormat, Llama3PythonicFormat, MistralFormat, PromptFormat, Qwen3CoderFormat, SmolLM3Format),
]

OSLO = ("get_weather", {"city": "Oslo"})
ADD = ("add", {"a": 1, "b": [2.5, None, True]})

# (format, turn, content, calls)
TURNS: list[tuple[FormatBase, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        HermesFormat(),
        "<think>\nWeather, so <tool_call> it is.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.5, null, true]}}\n</tool_call>',
        "<think>\nWeather, so <tool_call> it is.\n</think>",
        [OSLO, ADD],
    ),
    (
        HermesFormat(),
        "hm, <tool_call>{}</tool_call>?\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "get_weather"}\n</tool_call>',
        "hm, <tool_call>{}</tool_call>?\n</think>\n\nLet me see.",
        [OSLO],
    ),
    (
        HermesFormat(),
        "I could <tool_call> something.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "I could <tool_call> something.\n</think>",
        [OSLO],
    ),
    (HermesFormat(), "<think>I could <tool_call>", "<think>I could <tool_call>", []),
    (
        Qwen3CoderFormat(),
        "I'll look.\n\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        "I'll look.",
        [OSLO],
    ),
    (
        Qwen3CoderFormat(),
        "<function=write_file>\n<parameter=text>\ndef f():\n    return 1\n\n</parameter>\n"
        "<parameter=mode>\n420\n</parameter>\n<parameter=force>\nTrue\n</parameter>\n</function>",
        "",
        [("write_file", {"text": "def f():\n    return 1\n", "mode": 420, "force": True})],
    ),
    (
        Llama3JsonFormat(),
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        "",
        [OSLO],
    ),
    (
        Llama3JsonFormat(),
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}}; {"name":'
        ' "add", "parameters": {"a": 1, "b": [2.5, null, true]}}',
        "",
        [OSLO, ADD],
    ),
    (
        Llama3JsonFormat(),
        '<|python_tag|>brave_search.call(query="weather in Oslo")',
        "",
        [("brave_search", {"query": "weather in Oslo"})],
    ),
    (Llama3JsonFormat(), '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    (
        Llama3PythonicFormat(),
        "[get_weather(city='Oslo'), add(a=1, b=[2.5, None, True])]",
        "",
        [OSLO, ADD],
    ),
    (
        Llama3PythonicFormat(),
        '<|python_start|>[read-file(from="a", class={"x": (1, 2)})]<|python_end|>',
        "",
        [("read-file", {"from": "a", "class": {"x": [1, 2]}})],
    ),
    (Llama3PythonicFormat(), "See [1] and [2, 3].", "See [1] and [2, 3].", []),
    (
        Lfm2Format(),
        "Let me see.<|tool_call_start|>[get_weather(city='Oslo'), add(a=1, b=[2.5, None, True])]"
        "<|tool_call_end|>Checking.",
        "Let me see.\nChecking.",
        [OSLO, ADD],
    ),
    (
        MistralFormat(),
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "9Ae3bDc2F"}]',
        "",
        [OSLO],
    ),
    (
        MistralFormat(),
        'Both then.[TOOL_CALLS]get_weather[CALL_ID]9Ae3bDc2F[ARGS]{"city": "Oslo"}'
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2.5, null, true]}',
        "Both then.",
        [OSLO, ADD],
    ),
    (
        GemmaFormat(),
        'Sure.\n```tool_code\nprint(get_weather(city="Oslo"))\nadd(a=1, b=[2.5, None, True])\n```',
        "Sure.",
        [OSLO, ADD],
    ),
    (
        GemmaFormat(),
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>"
        "<start_function_call>call:add{a:1,b:[2.5,null,true]}<end_function_call>",
        "",
        [OSLO, ADD],
    ),
    (
        GemmaFormat(),
        '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>',
        "",
        [OSLO],
    ),
    (
        DeepSeekFormat(),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n'
        '{"a": 1, "b": [2.5, null, true]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [OSLO, ADD],
    ),
    (
        DeepSeekFormat(),
        "</think>I look it up.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "</think>I look it up.",
        [OSLO],
    ),
    (
        GraniteFormat(),
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "add", "arguments":'
        ' {"a": 1, "b": [2.5, null, true]}}]',
        "",
        [OSLO, ADD],
    ),
    (
        GraniteFormat(),
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>',
        "",
        [OSLO],
    ),
    (
        SmolLM3Format(),
        '<think>\n\n</think>\n<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>',
        "<think>\n\n</think>",
        [OSLO],
    ),
    (SmolLM3Format(), '<code>\nget_weather(city="Oslo")\n</code>', "", [OSLO]),
    (FunctionaryFormat(), 'all\nLet me look.>>>get_weather\n{"city": "Oslo"}', "Let me look.", [OSLO]),
    (
        FunctionaryFormat(),
        'get_weather\n{"city": "Oslo"}>>>add\n{"a": 1, "b": [2.5, null, true]}',
        "",
        [OSLO, ADD],
    ),
    (FunctionaryFormat(), "all\nHello!", "Hello!", []),
    (FunctionaryFormat(), '<function=get_weather>{"city": "Oslo"}</function>', "", [OSLO]),
    (
        PromptFormat(),
        'First this.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>\n'
        "Then that.",
        "First this.\nThen that.",
        [OSLO],
    ),
]


@pytest.mark.parametrize(("chat_format", "turn", "content", "calls"), TURNS)
def test_turns_of_the_models(
    chat_format: FormatBase, turn: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    parsed = chat_format.parse(turn)
    assert parsed.error == ""
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert parsed.content == content


def test_ids_are_read() -> None:
    both = '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "a1"}]', "[TOOL_CALLS]f[CALL_ID]a1[ARGS]{}"
    assert [MistralFormat().parse(text).tool_calls[0].id for text in both] == ["a1", "a1"]


# (template, written)
WRITTEN: list[tuple[FormatBase, str]] = [
    (HermesFormat(), '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'),
    (PromptFormat(), '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'),
    (SmolLM3Format(), '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'),
    (Llama3JsonFormat(), '{"name": "get_weather", "parameters": {"city": "Oslo"}}'),
    (Llama3PythonicFormat(), "[get_weather(city='Oslo')]"),
    (Lfm2Format(), "<|tool_call_start|>[get_weather(city='Oslo')]<|tool_call_end|>"),
    (
        MistralFormat("[TOOL_CALLS] ["),
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "call00000"}]',
    ),
    (MistralFormat("[TOOL_CALLS]…[ARGS]"), '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}'),
    (
        MistralFormat("[TOOL_CALLS]…[CALL_ID]…[ARGS]"),
        '[TOOL_CALLS]get_weather[CALL_ID]call00000[ARGS]{"city": "Oslo"}',
    ),
    (GemmaFormat("tool_code"), "```tool_code\nget_weather(city='Oslo')\n```"),
    (
        GemmaFormat("<start_function_call>"),
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>",
    ),
    (GemmaFormat("<|tool_call>"), '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'),
    (
        DeepSeekFormat("```json"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        DeepSeekFormat(),
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (GraniteFormat(), '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'),
    (FunctionaryFormat(">>>all"), 'get_weather\n{"city": "Oslo"}'),
    (FunctionaryFormat("<function="), '<function=get_weather>{"city": "Oslo"}</function>'),
    (
        Qwen3CoderFormat(),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    ),
]


@pytest.mark.parametrize(("chat_format", "text"), WRITTEN)
def test_calls_are_written_as_the_models_write_them(chat_format: FormatBase, text: str) -> None:
    call = ToolCall(name="get_weather", arguments={"city": "Oslo"}, id="call00000")
    assert chat_format.format_calls((call,)) == text
    assert chat_format.format_calls(()) == ""


@pytest.mark.parametrize(
    ("chat_format", "turn", "error", "calls"),
    [
        (HermesFormat(), "<tool_call>\n{'name': 'f'}\n</tool_call>", "Expecting property name", 0),
        (HermesFormat(), '<tool_call>{"name": "f", "arguments": {}', "Expecting", 0),
        (HermesFormat(), "<think></think><tool_call>{</think>}</tool_call>", "Expecting", 0),
        (HermesFormat(), '<tool_call>{"name": "f", "arguments": {}}', "the turn ends", 0),
        (HermesFormat(), '<tool_call>{"name": "f", "arguments": {}} x</tool_call>', "something else", 0),
        (
            HermesFormat(),
            '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
            "'a'.*twice",
            0,
        ),
        (HermesFormat(), '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN", 0),
        (
            HermesFormat(),
            '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
            "out of range",
            0,
        ),
        (
            HermesFormat(),
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
            "surrogate",
            0,
        ),
        (HermesFormat(), '<tool_call>{"name": "f"}</tool_call>', "no arguments", 0),
        (HermesFormat(), '<tool_call>{"arguments": {}}</tool_call>', "no name", 0),
        (HermesFormat(), '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "name is a text", 0),
        (HermesFormat(), '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "are an object", 0),
        (HermesFormat(), '<tool_call>["f"]</tool_call>', "is an object", 0),
        (
            HermesFormat(),
            '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{</tool_call>'
            '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            "Expecting",
            2,
        ),
        (Llama3JsonFormat(), '{"name": "f", "parameters": {"a": }}', "Expecting value", 0),
        (Llama3JsonFormat(), '{"name": "f", "parameters": {}}; {"name": "g"}', "no parameters", 1),
        (Llama3JsonFormat(), "<|python_tag|>print(1)", "Expecting value", 0),
        (Llama3JsonFormat(), "<|python_tag|>web.call(1)", "needs key=value", 0),
        (Llama3PythonicFormat(), "[f(**[1])]", "needs a dictionary", 0),
        (Llama3PythonicFormat(), "[f(a={1: 2})]", 'needs "key": value', 0),
        (Llama3PythonicFormat(), "[f(a={'b': 1, 'b': 2})]", "'b' is given twice", 0),
        (Llama3PythonicFormat(), "[f(a=1e999)]", "out of range", 0),
        (Llama3PythonicFormat(), "[f(1)]", "needs key=value", 0),
        (Llama3PythonicFormat(), "[f(a=open('x'))]", "literal value", 0),
        (Llama3PythonicFormat(), "[f(a=1, a=2)]", "given twice", 0),
        (Llama3PythonicFormat(), "[f(a='x\\N{nothing}')]", "invalid escape", 0),
        (Lfm2Format(), "<|tool_call_start|>f(a=1)<|tool_call_end|>", "list of calls in brackets", 0),
        (Lfm2Format(), "<|tool_call_start|>[f(a=1)]", "no <\\|tool_call_end", 0),
        (MistralFormat(), "[TOOL_CALLS] [{]", "Expecting property name", 0),
        (MistralFormat(), "[TOOL_CALLS]f[ARGS]{", "Expecting", 0),
        (MistralFormat(), "[TOOL_CALLS] []", "empty", 0),
        (GemmaFormat(), "```tool_code\nimport os\n```", "NAME\\(key=value", 0),
        (GemmaFormat(), "```tool_code\nprint(f(a=1), f(a=2))\n```", "more than one call", 0),
        (GemmaFormat(), "<|tool_call>f{}<tool_call|>", "comes call:NAME", 0),
        (GemmaFormat(), "<|tool_call>call:f{a:1,a:2}<tool_call|>", "'a' is given twice", 0),
        (GemmaFormat(), '<|tool_call>call:f{a:{<|"|>b<|"|>1}}<tool_call|>', "comes a colon", 0),
        (GemmaFormat(), "<|tool_call>call:f{a:[1 2]}<tool_call|>", "a comma or ]", 0),
        (GemmaFormat(), "<|tool_call>call:f{a:b}<tool_call|>", "Expecting|neither quoted", 0),
        (GemmaFormat(), '<|tool_call>call:f{a:<|"|>x}<tool_call|>', "no closing", 0),
        (DeepSeekFormat(), "<｜tool▁calls▁begin｜>f", "comes <｜tool▁call▁begin｜>", 0),
        (GraniteFormat(), "<|tool_call|>[]", "empty", 0),
        (Lfm2Format(), "<|tool_call_start|>[]<|tool_call_end|>", "empty", 0),
        (SmolLM3Format(), "<code>\n</code>", "empty", 0),
        (DeepSeekFormat(), "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "has no <｜tool▁sep｜>", 0),
        (
            DeepSeekFormat(),
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n<｜tool▁call▁end｜>",
            "not closed by ```",
            0,
        ),
        (GraniteFormat(), '<|tool_call|>{"name": "f"}', "no arguments", 0),
        (FunctionaryFormat(), "f\n{1}", "Expecting property name", 0),
        (Qwen3CoderFormat(), "<tool_call>\nf()\n</tool_call>", "comes <function=NAME>", 0),
        (Qwen3CoderFormat(), "<function=f>\n<parameter=a>\n1\n</function>", "no </function>", 0),
        (
            Qwen3CoderFormat(),
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "given twice",
            0,
        ),
        (Llama3JsonFormat(), '{"name": "f", "parameters": {}} and so on', "something else follows", 0),
        (Llama3PythonicFormat(), "[f(a=1)] and so on", "something else follows", 0),
        (MistralFormat(), '[TOOL_CALLS] [{"name": "f", "arguments": {}}] so', "something else follows", 0),
        (MistralFormat(), "[TOOL_CALLS]f[ARGS]{} so[TOOL_CALLS]g[ARGS]{}", "something else follows", 1),
        (GraniteFormat(), '<|tool_call|>[{"name": "f", "arguments": {}}]]', "something else follows", 0),
        (SmolLM3Format(), "<code>\nx = 1\n</code>", "NAME\\(key=value", 0),
    ],
)
def test_malformed_calls_are_errors(chat_format: FormatBase, turn: str, error: str, calls: int) -> None:
    parsed = chat_format.parse(turn)
    assert re.search(error, parsed.error), parsed.error
    assert len(parsed.tool_calls) == calls


def test_a_text_that_looks_like_json_cannot_be_written_without_quotes() -> None:
    with pytest.raises(DataError, match="'qwen3_coder' cannot write the call of 'f'"):
        Qwen3CoderFormat().format_calls((ToolCall(name="f", arguments={"a": "5"}),))


# Lines of the models' chat templates that give the format away.
TEMPLATES = {
    "hermes": [
        "return a json object with function name and arguments within <tool_call></tool_call> XML tags",
        '{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}',
    ],
    "qwen3_coder": [
        "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' + args_name }}"
    ],
    "llama3_json": [
        '<|start_header_id|>{{- \'the format {"name": function name, "parameters": dictionary of\' }}',
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{{- '\"parameters\": ' }}",
    ],
    "llama3_pythonic": ["put it in the format of [func_name1(params_name1=params_value1, params_name2=…)]"],
    "lfm2": ["{{- '<|tool_call_start|>[' + calls + ']<|tool_call_end|>' -}}"],
    "mistral": ['{{- "[TOOL_CALLS] [" }}', "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"],
    "gemma": [
        "{{ '<start_function_call>call:' }}",
        "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
        "<start_of_turn>model … wrap calls in ```tool_code```",
    ],
    "deepseek": ["{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}"],
    "granite": ["{{- '<|tool_call|>' + tools | tojson }}"],
    "smollm3": ["{%- if xml_tools or python_tools %}… <tool_call> … <code>"],
    "functionary": [
        "{{ '>>>all\\n' + message['content'] }}",
        "<function=example_function_name>{…}</function>",
    ],
    "prompt": [
        "",
        "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}",
        "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim }}{{ '<end_of_turn>\\n' }}",
        'Return calls within <tool_call></tool_call> tags as <tool_calls>[{"name": …}]</tool_calls>',
        "{{- '<tool_call>' + tc.name }}{{- '<arg_key>' + k + '</arg_key>' }}",
    ],
}


@pytest.mark.parametrize(
    ("expected", "template"), [(name, template) for name, lines in TEMPLATES.items() for template in lines]
)
def test_template_selects_the_format(expected: str, template: str) -> None:
    formats = sorted(
        (format_class(template) for format_class in CLASSES), key=lambda f: (f.name == "prompt", f.name)
    )
    chosen = first_match(formats, template, {"tokenizer.ggml.tokens": []})
    assert chosen.name == expected
