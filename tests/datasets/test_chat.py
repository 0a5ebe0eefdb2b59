"""Chat JSONL: every rule of the format, every bad line named, nothing cut."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.testing.datasets import check_dataset
from retrograd_hookspecs import BuildContext, DataError, TokenExample
from retrograd_plugins.datasets.jsonl import ChatDataset, retrograd_datasets

from . import standins
from .standins import StandInFormat, template

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello world"}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": {}}}
USER = {"role": "user", "content": "Rain?"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "dry"}
ANSWER = {"role": "assistant", "content": "Dry."}


def dataset(name: str = "qwen2.5", variables: dict[str, Any] | None = None) -> ChatDataset:
    return ChatDataset(standins.chatml(), template(name), StandInFormat(), variables)


def load(tmp_path: Path, *lines: Any, name: str = "qwen2.5", ctx: int = 4096) -> list[TokenExample]:
    return list(dataset(name).load(write(tmp_path, *lines), ctx=ctx))


def write(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "chat.jsonl"
    encoded = (
        line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines
    )
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


def refusal(tmp_path: Path, line: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(tmp_path, GOOD, line)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].where == f"{tmp_path / 'chat.jsonl'}:2"
    return str(caught.value)


def messages(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


def test_loads_examples_with_their_line(tmp_path: Path) -> None:
    examples = load(tmp_path, GOOD, b"", b"   ", GOOD)
    assert [example.origin for example in examples] == [f"{tmp_path / 'chat.jsonl'}:{n}" for n in (1, 4)]
    tokenizer = standins.chatml()
    trained = examples[0].tokens[examples[0].trained]
    assert tokenizer.decode(trained.tolist()) == "Hello world<|im_end|>"


def test_contract(tmp_path: Path) -> None:
    tools = messages(USER, CALLS, RESULT, ANSWER, tools=[TOOL])
    check_dataset(dataset(), write(tmp_path, GOOD, tools), bad_line=b'{"messages": []}')


def test_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    line = json.dumps(GOOD).encode()
    plain = load(tmp_path, line)
    marked = load(tmp_path, b"\xef\xbb\xbf" + line + b"\r")
    assert np.array_equal(plain[0].tokens, marked[0].tokens)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"messages": [', r"not valid JSON: Expecting value at column 15"),
        (b"[1]", r"is an array, not a JSON object"),
        (b'{"messages": [{"role": "user", "content": "a\xff"}]}', r"byte 45 of the line, 0xFF, is not UTF-8"),
        ("{}".encode("utf-16"), r"looks like UTF-16"),
        (b'{"messages": [], "x": NaN}', r"holds NaN, which is not JSON"),
        (b'{"messages": [], "x": -Infinity}', r"holds -Infinity"),
        (b'{"messages": [], "x": 1e999}', r"1e999, which is too large"),
        (b'{"messages": [], "messages": []}', r"the key 'messages' twice"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', r"\\ud83d, half of a surrogate pair"),
        (b"[" * 100_000, r"nested too deeply|not valid JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", r"number that cannot be read"),
        ({"message": GOOD["messages"]}, r"unknown key 'message'.*did you mean 'messages'"),
        ({"text": "x"}, r"has no messages; its keys are 'text'"),
        ({"messages": "Hi"}, r"messages: must be an array of messages, is a string"),
        ({"messages": []}, r"messages: is empty"),
        (messages({"role": "bot", "content": "x"}), r"messages\[0\].role: the role is 'bot'.*system, user"),
        (messages({"content": "x"}), r"the role is null"),
        (messages("x"), r"messages\[0\]: must be an object"),
        (messages({"role": "user"}), r"messages\[0\]: has no content"),
        (messages({"role": "user", "content": None}), r"content is null"),
        (messages({"role": "user", "content": ""}), r"messages\[0\].content: is empty"),
        (messages({"role": "user", "content": " \n"}), r"only white space"),
        (
            messages({"role": "user", "content": [{"type": "text"}]}),
            r"is an array.*as one string",
        ),
        (messages({"role": "user", "content": 3}), r"must be a string, is a number 3"),
        (messages({"role": "user", "content": "x", "reasoning_content": "y"}), r"<think>"),
        (messages({"role": "user", "content": "x", "contnet": "y"}), r"did you mean 'content'"),
        (messages({"role": "user", "content": "x", "raw": True}), r"raw belongs to assistant messages"),
        (messages({"role": "assistant", "content": "x", "raw": "yes"}), r"raw: must be true or false"),
        (messages(USER, USER, ANSWER), r"messages\[1\]: the role is 'user', where assistant must follow"),
        (messages(USER, ANSWER, ANSWER), r"messages\[2\]: the role is 'assistant', where user must follow"),
        (messages(ANSWER), r"messages\[0\]: the role is 'assistant', where user must follow"),
        (messages(USER, {"role": "system", "content": "x"}), r"system message after a user message"),
        (messages(USER), r"the record ends on a user message"),
        (messages(USER, ANSWER, RESULT), r"messages\[2\]: an observation without a call"),
        (messages(USER, CALLS, ANSWER), r"messages\[2\]: calls are not answered by then: weather \(c1\)"),
        (messages(USER, CALLS, RESULT, RESULT), r"messages\[3\]: an observation without a call"),
        (
            messages(USER, CALLS, {**RESULT, "tool_call_id": "c2"}, ANSWER),
            r"messages\[2\].tool_call_id: answers the call 'c2'.*'c1'",
        ),
        (
            messages(USER, {**CALLS, "tool_calls": [CALL, {**CALL, "id": "c2"}]}, RESULT),
            r"messages\[2\]: calls are not answered by then: weather \(c2\)",
        ),
        (messages(USER, {**CALLS, "tool_calls": [CALL, CALL]}), r"two calls have the id 'c1'"),
        (
            messages(USER, CALLS, {**RESULT, "name": "time"}),
            r"is named 'time' but answers a call",
        ),
        (messages(USER, {**CALLS, "tool_calls": [{"name": "f"}]}), r"tool_calls\[0\]: has no arguments"),
        (
            messages(USER, {**CALLS, "tool_calls": [{"name": "f", "arguments": "{oops"}]}),
            r"tool_calls\[0\].arguments: the JSON string is not valid JSON: .* at column 2",
        ),
        (
            messages(USER, {**CALLS, "tool_calls": [{"name": "f", "arguments": [1]}]}),
            r"must be an object or a JSON string of one, is an array",
        ),
        (messages(USER, {**CALLS, "tool_calls": [{"arguments": {}}]}), r"name: must be a name, is null"),
        (messages(USER, {**CALLS, "tool_calls": [{"nam": "f", "arguments": {}}]}), r"unknown key 'nam'"),
        (messages(USER, ANSWER, tools={}), r"tools: must be an array of tools"),
        (messages(USER, ANSWER, tools=[TOOL, TOOL]), r"tools\[1\]: the tool 'weather' is given twice"),
        (
            messages(USER, ANSWER, tools=[{"name": "f", "parameters": 1}]),
            r"must be a JSON Schema",
        ),
        (
            messages(USER, ANSWER, tools=[{"name": "f", "parameters": {"type": "array"}}]),
            r"has the type 'array'",
        ),
        (messages(USER, ANSWER, tools=[{"type": "search"}]), r"has the type 'search'"),
        (messages(USER, ANSWER, tool=[TOOL]), r"did you mean 'tools'"),
        (
            messages(USER, {"role": "assistant", "content": "<tool_call>oops</tool_call>", "raw": True}),
            r"'stand-in' cannot read the raw turn: not a call",
        ),
        (
            messages(USER, {"role": "assistant", "content": "nothing", "raw": True, "tool_calls": [CALL]}),
            r'makes the calls none, tool_calls lists weather\({"city": "Köln"}\)',
        ),
        (
            messages(USER, {"role": "assistant", "content": "a<|im_end|>b"}),
            r"contains the stop token '<\|im_end\|>'",
        ),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: Any, expected: str) -> None:
    message = refusal(tmp_path, line)
    assert re.search(expected, message), message


def test_line_731_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, *[GOOD] * 730, b"oops", GOOD)
    with pytest.raises(DataError, match=r"chat\.jsonl:731: is not valid JSON"):
        dataset().load(path, ctx=64)


def test_all_bad_lines_are_reported_and_the_rest_counted(tmp_path: Path) -> None:
    path = write(tmp_path, *[b"oops", GOOD] * 60)
    with pytest.raises(DataError) as caught:
        dataset().load(path, ctx=64)
    where = [problem.where for problem in caught.value.problems]
    assert where[:50] == [f"{path}:{n}" for n in range(1, 100, 2)]
    assert "10 more lines are wrong (60 of 120 records)" in str(caught.value)


def test_record_longer_than_the_context_is_refused_not_cut(tmp_path: Path) -> None:
    length = load(tmp_path, GOOD)[0].tokens.size
    assert load(tmp_path, GOOD, ctx=length)[0].tokens.size == length
    with pytest.raises(DataError, match=rf":1: has {length} tokens, training.ctx is {length - 1}"):
        load(tmp_path, GOOD, ctx=length - 1)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_file_without_records_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="holds no records"):
        dataset().load(path, ctx=64)


def test_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(DataError, match=f"{path}: cannot be read"):
            dataset().load(path, ctx=64)


def test_forms_of_calls_and_tools_give_the_same_tokens(tmp_path: Path) -> None:
    flat_tool = {"parameters": {}, "description": "Weather.", "name": "weather"}
    flat_call = {"name": "weather", "arguments": '{"city": "Köln"}'}
    raw = {
        "role": "assistant",
        "raw": True,
        "content": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
    }
    by_order = {"role": "tool", "content": "dry"}
    examples = load(
        tmp_path,
        messages(USER, CALLS, RESULT, ANSWER, tools=[TOOL]),
        messages(USER, {**CALLS, "tool_calls": [flat_call]}, by_order, ANSWER, tools=[flat_tool]),
        messages(USER, raw, by_order, ANSWER, tools=[TOOL]),
        messages(USER, {**raw, "tool_calls": [CALL]}, RESULT, ANSWER, tools=[TOOL]),
    )
    assert len(examples) == 4
    for example in examples[1:]:
        assert np.array_equal(example.tokens, examples[0].tokens)
        assert np.array_equal(example.trained, examples[0].trained)


def test_observations_are_bound_by_id_whatever_their_order(tmp_path: Path) -> None:
    calls = {**CALLS, "tool_calls": [CALL, {**CALL, "id": "c2"}]}
    second = {"role": "tool", "tool_call_id": "c2", "content": "wet"}
    examples = load(
        tmp_path, messages(USER, calls, second, RESULT, ANSWER), messages(USER, calls, RESULT, second, ANSWER)
    )
    text = [standins.chatml().decode(example.tokens.tolist()) for example in examples]
    assert text[0].index("wet") < text[0].index("dry")
    assert text[1].index("dry") < text[1].index("wet")


def test_record_may_end_on_calls_or_on_all_their_results(tmp_path: Path) -> None:
    ends_on_calls, ends_on_results = load(tmp_path, messages(USER, CALLS), messages(USER, CALLS, RESULT))
    assert np.array_equal(ends_on_calls.tokens, ends_on_results.tokens)


def test_notes_count_and_explain(tmp_path: Path) -> None:
    data = dataset("qwen3")
    thinking = messages(
        USER,
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nNo."},
        USER,
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."},
        id=7,
    )
    examples = data.load(write(tmp_path, GOOD, thinking), ctx=4096)
    assert len(examples) == 3
    notes = data.notes()
    trained = sum(int(e.trained.sum()) for e in examples)
    assert notes[0].startswith(
        f"2 records, 3 samples, {sum(e.tokens.size for e in examples)} tokens, {trained} of"
    )
    assert any("several samples" in note and "(1 records, first" in note and ":2)" in note for note in notes)
    assert any("'id' in 1 records" in note for note in notes)


def test_template_variables_reach_the_template(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    plain = dataset("qwen3")
    closed = dataset("qwen3", {"enable_thinking": False})
    assert plain.load(path, ctx=4096)[0].trained.sum() > closed.load(path, ctx=4096)[0].trained.sum()


def test_component_builds_from_services() -> None:
    (component,) = retrograd_datasets()
    services = {
        "tokenizer": standins.chatml(),
        "template": template("smollm2"),
        "chat_format": StandInFormat(),
    }
    assert set(component.needs) == set(services)
    built = component.build(component.config(), BuildContext(config=None, base_dir=Path(), services=services))
    assert isinstance(built, ChatDataset)
    assert built.turns
    assert {finding.check for finding in built.findings()} >= {"template tools", "tool calls"}
