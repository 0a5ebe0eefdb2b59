"""What a record says of a rollout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.gguf import open_model
from retrograd.observe.pieces import piece_decoder
from retrograd.observe.records import VERSION, Stamp, count_records, group_records, line, metric_fields
from retrograd_hookspecs import Message, RolloutGroup, Score, ToolCall
from retrograd_plugins.tokenizers.gpt2 import Gpt2Tokenizer
from retrograd_plugins.tokenizers.llama import LlamaTokenizer

from .examples import decode, group, rollout, sum_group


def records(made: RolloutGroup, *, max_text_chars: int = 0) -> list[dict[str, Any]]:
    """Records of a group as a reader gets them."""
    found = group_records(
        made, Stamp(12.5, 3), update=4, split="train", max_text_chars=max_text_chars, decode=decode
    )
    return [json.loads(line(record)) for record in found]


def of_kind(found: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in found if record["kind"] == kind]


def test_a_group_is_a_prompt_its_members_and_the_selection() -> None:
    made = group("g", [rollout("a", ["yes"], total=1.0), rollout("b", ["no"], total=0.0)])
    found = records(made)
    assert [record["kind"] for record in found] == [
        "prompt",
        "rollout",
        "outcome",
        "rollout",
        "outcome",
        "selection",
    ]
    assert len(found) == count_records([made])
    for record in found:
        assert (record["v"], record["time"], record["segment"]) == (VERSION, 12.5, 3)
        assert (record["update"], record["group"]) == (4, "g")


def test_prompt() -> None:
    made = group(
        "g", [], source="tasks.jsonl:7", rubric="be short", metadata={"answer": 4, "path": Path("/x")}
    )
    [prompt] = of_kind(records(made), "prompt")
    assert prompt["source"] == "tasks.jsonl:7"
    assert prompt["messages"] == [{"role": "user", "content": "Q?"}]
    assert prompt["rubric"] == "be short"
    assert prompt["prompt_tokens"] == 2
    assert prompt["metadata"] == {"answer": 4, "path": "/x"}


def test_a_plain_answer_is_told_once() -> None:
    [record] = of_kind(records(group("g", [rollout("a", ["yes"], finish="length")])), "rollout")
    assert record["completion"] == "yes"
    assert "messages" not in record
    assert record["finish"] == "length"


def test_messages_hold_calls_and_observations() -> None:
    call = ToolCall(name="add", arguments={"a": 1, "b": [2]}, id="c1")
    turns = [
        Message(role="assistant", content="calling", tool_calls=(call,), raw=True),
        Message(role="tool", content="broken", tool_call_id="c1", name="add", is_error=True),
        "three",
    ]
    [record] = of_kind(records(group("g", [rollout("a", turns)])), "rollout")
    assert record["messages"] == [
        {
            "role": "assistant",
            "content": "calling",
            "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": [2]}, "id": "c1"}],
            "raw": True,
        },
        {"role": "tool", "content": "broken", "tool_call_id": "c1", "name": "add", "is_error": True},
        {"role": "assistant", "content": "three"},
    ]


def test_tokens_count_from_the_end_of_the_prompt() -> None:
    turns = ["ab", Message(role="tool", content="xyz"), "c"]
    member = rollout("a", turns, logp=[-0.123456, -2.0, -3.5], advantage=[0.5, 0.5, -1.0])
    [record] = of_kind(records(group("g", [member])), "rollout")
    assert record["tokens"] == {
        "count": 6,
        "trained_count": 3,
        "pieces": ["a", "b", "x", "y", "z", "c"],
        "trained": [[0, 2], [5, 1]],
        "logp": [-0.1235, -2.0, -3.5],
        "advantage": [0.5, 0.5, -1.0],
    }


def test_a_constant_advantage_is_one_number() -> None:
    [record] = of_kind(records(group("g", [rollout("a", ["abc"], advantage=0.25)])), "rollout")
    assert record["tokens"]["advantage"] == 0.25


def test_an_advantage_that_is_not_known_is_left_out() -> None:
    [record] = of_kind(records(group("g", [rollout("a", ["abc"])])), "rollout")
    assert "advantage" not in record["tokens"]


def test_outcome() -> None:
    member = rollout(
        "a",
        ["ab", Message(role="tool", content="x"), "c"],
        reward=Score(kind="value", value=0.5, explanation="half of the tests pass"),
        judgement=Score(kind="value", value=0.75, explanation="terse", judge_weight=2.0),
        total=2.0,
        step_rewards=((2, 0.1), (5, -0.2)),
    )
    [record] = of_kind(records(group("g", [member])), "outcome")
    assert record["reward"] == {"kind": "value", "value": 0.5, "explanation": "half of the tests pass"}
    assert record["judgement"] == {
        "kind": "value",
        "value": 0.75,
        "explanation": "terse",
        "judge_weight": 2.0,
    }
    assert record["total"] == 2.0
    assert record["step_rewards"] == [[0, 0.1], [3, -0.2]]


@pytest.mark.parametrize("kind", ["missing", "error"])
def test_a_reward_that_is_none_has_no_number(kind: Any) -> None:
    member = rollout("a", ["x"], reward=Score(kind=kind, explanation="timed out"))
    [record] = of_kind(records(group("g", [member])), "outcome")
    assert record["reward"] == {"kind": kind, "explanation": "timed out"}
    assert record["total"] is None


def test_selection_says_what_is_trained_and_why_the_rest_is_not() -> None:
    members = [rollout("a", ["x"]), rollout("b", ["y"], excluded="truncated")]
    [record] = of_kind(records(group("g", members)), "selection")
    assert (record["trained"], record["excluded"], record["dropped"]) == (["a"], {"b": "truncated"}, "")
    [record] = of_kind(records(group("g", members, dropped="no reward spread")), "selection")
    assert (record["trained"], record["dropped"]) == ([], "no reward spread")


def test_a_long_text_is_cut_with_a_count() -> None:
    member = rollout("a", ["abcdefghij"], prompt="a long prompt", advantage=1.0)
    found = records(group("g", [member], prompt="a long prompt", rubric="0123456789"), max_text_chars=4)
    [prompt], [made] = of_kind(found, "prompt"), of_kind(found, "rollout")
    assert prompt["messages"][0]["content"] == "a lo… [9 more characters]"
    assert prompt["rubric"] == "0123… [6 more characters]"
    assert prompt["cut_chars"] == 15
    assert made["completion"] == "abcd… [6 more characters]"
    assert made["tokens"]["pieces"] == ["a", "b", "c", "d"]
    assert (made["tokens"]["count"], made["tokens"]["trained_count"]) == (10, 10)
    assert len(made["tokens"]["logp"]) == 4


def test_zero_keeps_texts_whole() -> None:
    [record] = of_kind(records(group("g", [rollout("a", ["x" * 100_000])])), "rollout")
    assert record["completion"] == "x" * 100_000
    assert "cut_chars" not in record


def test_a_line_is_one_line_whatever_the_text_holds() -> None:
    text = 'a\nb\u2028c\u0000"\\ \ud800 😀'
    written = line({"text": text})
    assert written.count(b"\n") == 1
    assert json.loads(written) == {"text": text}


def test_metrics_that_are_not_finite_are_named() -> None:
    assert metric_fields({"a": 1, "b": float("nan"), "c": float("-inf")}) == {
        "metrics": {"a": 1.0, "b": None, "c": None},
        "nonfinite": {"b": "nan", "c": "-inf"},
    }
    assert metric_fields({"a": np.float32(0.5)}) == {"metrics": {"a": 0.5}}


def test_a_logp_that_is_not_finite_is_null() -> None:
    member = rollout("a", ["ab"], logp=[-np.inf, -1.0], advantage=float("nan"))
    [record] = of_kind(records(group("g", [member])), "rollout")
    assert record["tokens"]["logp"] == [None, -1.0]
    assert record["tokens"]["advantage"] == [None, None]


def test_every_example_keeps_its_tokens() -> None:
    made = sum_group(3, 1)
    for member, record in zip(made.members, of_kind(records(made), "rollout"), strict=True):
        tokens = record["tokens"]
        assert "".join(tokens["pieces"]) == "".join(decode(member.tokens[made.prompt_tokens :].tolist()))
        assert (
            sum(length for _, length in tokens["trained"]) == tokens["trained_count"] == len(tokens["logp"])
        )


class ByteTokenizer:
    """A token is a byte; a first space is taken off a text, as SentencePiece vocabularies do."""

    def decode_bytes(self, ids: Sequence[int], *, special: bool = True) -> bytes:
        return bytes(ids).removeprefix(b" ")


def test_a_character_is_in_the_token_that_completes_it() -> None:
    decoder = piece_decoder(ByteTokenizer())  # type: ignore[arg-type]
    assert decoder(list("aé😀".encode())) == ["a", "", "é", "", "", "", "😀"]
    assert "".join(decoder(list(b" x y"))) == " x y"


def test_bytes_that_are_no_text_break_nothing() -> None:
    decoder = piece_decoder(ByteTokenizer())  # type: ignore[arg-type]
    assert decoder(list(b"\xffa")) == ["\ufffd", "a"]
    assert decoder(list("é".encode()[:1])) == ["\ufffd"]
    assert decoder([]) == []


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_pieces_of_a_real_tokenizer_join_to_its_text(model: str, request: pytest.FixtureRequest) -> None:
    """Of a vocabulary of bytes, and of one that puts spaces first."""
    metadata = open_model(request.getfixturevalue(f"{model}_path")).metadata
    tokenizer: Any = {"smollm2": Gpt2Tokenizer, "gemma3": LlamaTokenizer}[model](metadata)
    text = "Zürich, 東京 😀 — two  spaces\n\tand code: x = {'a': 1}"
    ids = tokenizer.encode(" " + text)
    pieces = piece_decoder(tokenizer)(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == " " + text
