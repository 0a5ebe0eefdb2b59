"""Traces: SFT prepares exactly the token ids that the rollout had, for every chat format and template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import TokenType

from retrograd.assembly import Assembly, assemble
from retrograd.cli.document import open_document
from retrograd.testing.vocabulary import byte_level_vocabulary
from retrograd_hookspecs import ToolCall
from retrograd_plugins.commands.collect import Collection, Options, run_collection
from tests.datasets.standins import TEMPLATES

from .families import FAMILIES, names
from .support import SMALL, Agents, Turn, stop_token, sum_scenario

pytestmark = pytest.mark.slow
"""All families of chat formats: a long proof, for `pytest -m slow`."""

CTX = {"ctx": 3072}
SPECIALS = {
    "gemma": ("<bos>", "<end_of_turn>", "<eos>", "<start_of_turn>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "mistral": ("<s>", "</s>"),
    "qwen2.5": ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>"),
    "qwen3": ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"),
    "r1": ("<bos>", "<eos>", "<User>", "<Assistant>", "<think>", "</think>"),
    "smollm2": ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
}
"""BOS, the stop token and the other special tokens of the templates in `tests/datasets/templates`."""


def templated(name: str, tiny_model: Callable[..., Path]) -> Path:
    """A tiny model with one of those templates."""
    vocabulary = byte_level_vocabulary("llama")
    tokens: list[str] = list(vocabulary["tokenizer.ggml.tokens"])
    types = np.array(vocabulary["tokenizer.ggml.token_type"])
    specials = SPECIALS[name]
    first = len(tokens) - 8
    tokens[first:] = [*specials, *(f"<unused{n}>" for n in range(8 - len(specials)))]
    types[first:] = TokenType.USER_DEFINED
    types[first : first + 2] = TokenType.CONTROL
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 1,
        "tokenizer.ggml.padding_token_id": first,
        "tokenizer.ggml.add_bos_token": name not in ("qwen2.5", "qwen3", "smollm2"),
    }
    source = (TEMPLATES / f"{name}.jinja").read_text()
    return tiny_model(**{**SMALL, "context_length": 4096}, chat_template=source, metadata=metadata)


def assembled(path: Path) -> Assembly:
    return assemble(open_document(path))


def options(agents: Agents, **changes: Any) -> Options:
    given: dict[str, Any] = {
        "out": agents / "traces.jsonl",
        "report": None,
        "k": 1,
        "keep": 1,
        "min_reward": None,
        "verified": None,
        "raw": False,
        "limit": None,
        "seed": None,
        "force": True,
        "api": False,
        "pairs": False,
        "min_gap": 0.5,
    }
    return Options(**{**given, **changes})


def rollouts(collection: Collection) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Tokens and masks of the trajectories that were written."""
    kept = [
        member.played.trajectory
        for group in collection.collected.groups
        for member in group.passed
        if not member.left_out
    ]
    return sorted((tuple(t.tokens), tuple(t.trained)) for t in kept)


def prepared(agents: Agents, variables: Mapping[str, Any] | None = None) -> list[Any]:
    """What SFT's dataset makes of the traces."""
    path = agents.toml("sft.toml", training=CTX, sft={"data": "traces.jsonl"})
    assembly = assembled(path)
    dataset = assembly.build("datasets", "jsonl", template_variables=dict(variables or {}))
    examples = dataset.load(agents / "traces.jsonl", ctx=3072)
    return sorted((tuple(e.tokens.tolist()), tuple(e.trained.tolist())) for e in examples)


def turns_of(services: Any) -> list[list[Turn]]:
    """Trajectories that end cleanly: as the template would write them, with text around calls, in tokens that
    no tokenizer would choose, with text that templates trim, and without a call."""
    chat_format, tokenizer = services.get("chat_format"), services.get("tokenizer")
    stop = stop_token(tokenizer, services.get("template"))

    def calls(*given: tuple[str, dict[str, Any]]) -> str:
        return str(chat_format.format_calls([ToolCall(name=name, arguments=a) for name, a in given]))

    add = calls(("add", {"a": 1, "b": 2}))
    both = calls(("add", {"a": 3, "b": 4}), ("fail", {}))
    submit = calls(("submit", {"answer": "one"}))
    letters = [token for letter in submit for token in tokenizer.encode(letter)]
    return [
        [add, submit],
        [both, submit],
        [add, "It is 3."],
        [f"<think>\nhm\n</think>\n\n{add}", submit],
        [both, add, [*letters, stop]],
        [f"{add}\n\n", " 3 \n"],
        ["I know: 1"],
        [calls(("submit", {"answer": "one"}), ("add", {"a": 1, "b": 1}))],
    ]


def check(agents: Agents, *, raw: bool, variables: Mapping[str, Any] | None = None) -> Collection:
    agents.scenarios([sum_scenario(0, opening="A *game* begins.")])
    agent: dict[str, Any] = {"template_variables": dict(variables)} if variables else {}
    path = agents.agent(training=CTX, agent=agent)
    turns = turns_of(assembled(path).services)
    agents.script(dict(enumerate(turns)))
    given = options(agents, k=len(turns), keep=len(turns), verified=False, raw=raw)
    collection = run_collection(open_document(path), given)
    [group] = collection.collected.groups
    assert [m.refused for m in group.members] == [""] * len(turns), [m.detail for m in group.members]
    assert not any(m.left_out for m in group.members), [(m.left_out, m.detail) for m in group.members]
    assert prepared(agents, variables) == rollouts(collection)
    lines = (agents / "traces.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    said = [m for record in written for m in record["messages"] if m["role"] == "assistant"]
    assert sum(m.get("raw", False) for m in said) == collection.written.raw_turns
    assert len(said) == collection.written.turns == sum(map(len, turns))
    if raw:
        assert all(m["raw"] and m["token_ids"] for m in said)
    return collection


@pytest.mark.parametrize("raw", [False, True], ids=["fewest raw", "all raw"])
@pytest.mark.parametrize("family", names())
def test_every_chat_format(family: str, raw: bool, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    collection = check(Agents(tmp_path, FAMILIES[family].model(tiny_model)), raw=raw)
    if not raw and family != "deepseek":  # whose turns begin inside a thought that no record can open
        assert 0 < collection.written.raw_turns < collection.written.turns


@pytest.mark.parametrize("raw", [False, True], ids=["fewest raw", "all raw"])
@pytest.mark.parametrize("name", sorted(SPECIALS))
def test_every_template(name: str, raw: bool, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    check(Agents(tmp_path, templated(name, tiny_model)), raw=raw)


def test_templates_of_the_tests_are_all_here() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(SPECIALS)


def test_template_variables_are_those_of_the_run(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    check(Agents(tmp_path, templated("qwen3", tiny_model)), raw=False, variables={"enable_thinking": False})


def test_what_the_template_writes_is_structured(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    agents = Agents(tmp_path, tiny_model(**SMALL))
    agents.scenarios([sum_scenario(0)])
    path = agents.agent()
    add, submit = turns_of(assembled(path).services)[0]
    agents.script({0: [f"Let me see.\n{add}", submit]})
    collection = run_collection(open_document(path), options(agents, verified=False))
    assert collection.written.raw_turns == 0
    [record] = [json.loads(line) for line in (agents / "traces.jsonl").read_text().splitlines()]
    assert record["messages"] == [
        {"role": "user", "content": "What is 0 + 1?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": "call00000",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
                }
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "call00000", "name": "add"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call00001",
                    "type": "function",
                    "function": {"name": "submit", "arguments": {"answer": "one"}},
                }
            ],
        },
        {"role": "tool", "content": "thank you", "tool_call_id": "call00001", "name": "submit"},
    ]
    assert [tool["function"]["name"] for tool in record["tools"]] == [
        *("add", "submit", "fail", "wait", "crash")
    ]


def test_only_the_turn_that_differs_is_raw(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    agents = Agents(tmp_path, tiny_model(**SMALL))
    agents.scenarios([sum_scenario(0)])
    path = agents.agent()
    turns: Sequence[list[Turn]] = turns_of(assembled(path).services)
    add, submit = turns[0]
    letters = turns[4][2]
    agents.script({0: [add, add, add, submit], 1: [add, letters]})
    collection = run_collection(open_document(path), options(agents, k=2, keep=2, verified=False))
    assert (collection.written.turns, collection.written.raw_turns) == (6, 1)
    assert prepared(agents) == rollouts(collection)


def test_a_trace_of_another_model_is_refused_by_sft(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """Ids that spell another text are an error, not training data."""
    agents = Agents(tmp_path, tiny_model(**SMALL))
    agents.scenarios([sum_scenario(0)])
    path = agents.agent()
    agents.script({0: turns_of(assembled(path).services)[4]})
    run_collection(open_document(path), options(agents, verified=False, raw=True))
    text = (agents / "traces.jsonl").read_text()
    record = json.loads(text)
    turn = next(m for m in record["messages"] if m["role"] == "assistant")
    turn["token_ids"][0] += 1
    (agents / "traces.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(Exception, match="token_ids spell"):
        prepared(agents)
