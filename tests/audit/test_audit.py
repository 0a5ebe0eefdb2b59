"""Each check of the audit, on data that passes and on the fault that it is there for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from retrograd.audit import (
    audit_examples,
    audit_template,
    calls_read_back,
    describe_masks,
    duplicates,
    lengths,
    overlap,
    single_bos,
    stop_tokens_trained,
    trained_runs,
    trained_share,
    within_context,
)
from retrograd.conversation import ConversationEncoder
from retrograd_hookspecs import AuditFinding, ParsedTurn, TokenExample, ToolCall
from tests.datasets import standins
from tests.datasets.standins import StandInFormat, StandInTokenizer, template

TOKENIZER = standins.llama3()
BOS, EOT = TOKENIZER.id("<|begin_of_text|>"), TOKENIZER.id("<|eot_id|>")


def example(tokens: Sequence[int], trained: str, origin: str = "f:1") -> TokenExample:
    """`trained` has an x for each trained token."""
    return TokenExample(
        tokens=np.array(tokens, np.int32), trained=np.array([c == "x" for c in trained]), origin=origin
    )


def levels(findings: Sequence[AuditFinding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


GOOD = example([BOS, 65, 66, EOT, 67, 68, EOT], "..xx.xx")


def test_good_chat_data_passes_every_check() -> None:
    findings = audit_examples([GOOD], TOKENIZER, ctx=8, chat=True)
    assert levels(findings) == dict.fromkeys(
        ["stop token", "BOS", "trained share", "length", "duplicates"], "ok"
    )
    assert "all 2 trained turns" in findings[0].message


def test_plain_text_has_no_turns_to_stop() -> None:
    findings = audit_examples(
        [example([BOS, 1, 2], ".xx"), example([2, 3], ".x")], TOKENIZER, ctx=3, chat=False
    )
    assert levels(findings) == dict.fromkeys(["BOS", "trained share", "length", "duplicates"], "ok")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (example([BOS, 65, 66, EOT], "..x.", "f:7"), "f:7: a trained turn ends with 'B'"),
        (example([BOS, 65, EOT, 66, EOT], "..xxx", "f:7"), "f:7: a stop token stands inside a trained turn"),
    ],
)
def test_stop_token_outside_the_mask(bad: TokenExample, message: str) -> None:
    finding = stop_tokens_trained([GOOD, bad], TOKENIZER)
    assert finding.level == "error"
    assert message in finding.message


def test_bos() -> None:
    twice = single_bos([GOOD, example([BOS, BOS, 65, EOT], "...x", "f:9")], TOKENIZER, chat=True)
    assert (twice.level, twice.message.split(":")[:2]) == ("error", ["f", "9"])
    missing = example([65, EOT], ".x", "f:3")
    assert single_bos([GOOD, missing], TOKENIZER, chat=True).level == "error"
    # Windows of a text stream after the first have none.
    assert single_bos([GOOD, missing], TOKENIZER, chat=False).level == "ok"
    # ChatML's <|im_start|> is SmolLM2's BOS, begins every turn, and is not asked for.
    chatml = StandInTokenizer(["<|im_start|>", "<|im_end|>"], ["<|im_end|>"], bos="<|im_start|>")
    start, end = chatml.id("<|im_start|>"), chatml.id("<|im_end|>")
    assert single_bos([example([start, 65, end, start, 66, end], "....xx")], chatml, chat=True).level == "ok"
    assert single_bos([example([start, start, 65], "..x")], chatml, chat=True).level == "error"
    none = StandInTokenizer(["<|im_end|>"], ["<|im_end|>"])
    assert single_bos([GOOD], none, chat=True).level == "ok"


def test_trained_share() -> None:
    assert "4 of 7 tokens (57.1%)" in trained_share([GOOD]).message
    assert trained_share([]).level == "error"
    nothing = example([1, 2], "..", "f:4")
    assert (trained_share([GOOD, nothing]).level, trained_share([GOOD, nothing]).message) == (
        "error",
        "1 examples train nothing, first f:4",
    )
    little = example([1] * 100, "." * 99 + "x")
    assert trained_share([little]).level == "warning"


def test_lengths() -> None:
    assert lengths([GOOD], 7).level == "ok"
    assert lengths([GOOD], 100).level == "note"
    assert "training.ctx = 7 would do" in lengths([GOOD], 100).message
    finding = lengths([example([1, 2], ".x"), GOOD], 6)
    assert finding.level == "error"
    assert "1 examples are longer than training.ctx = 6, first f:1 with 7 tokens" in finding.message
    assert lengths([], 6).level == "error"


def test_context_of_the_model() -> None:
    assert within_context([GOOD], 7).level == "ok"
    finding = within_context([example([1, 2], ".x"), GOOD], 6)
    assert finding.level == "warning"
    assert "1 examples are longer than the 6 tokens that the model was made for, first f:1 with 7" in (
        finding.message
    )


def test_duplicates_and_overlap() -> None:
    other = example([BOS, 65, EOT], "..x", "f:2")
    again = example(GOOD.tokens.tolist(), "..xx.xx", "f:3")
    assert duplicates([GOOD, other]).level == "ok"
    finding = duplicates([GOOD, other, again, again])
    assert finding.level == "warning"
    assert "2 of 4 examples" in finding.message
    assert "f:3 (f:1)" in finding.message
    assert overlap([GOOD], [other]).level == "ok"
    assert overlap([GOOD, other], [again]).level == "warning"


class Deaf(StandInFormat):
    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(content=text, tool_calls=(ToolCall(name="other", arguments={}),))


class Refusing(StandInFormat):
    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(content=text, error="no JSON at column 3")


def test_calls_read_back() -> None:
    assert calls_read_back(StandInFormat()).level == "ok"
    assert calls_read_back(Deaf()).level == "warning"
    assert "no JSON at column 3" in calls_read_back(Refusing()).message


def template_levels(name: str, tokenizer: StandInTokenizer, **variables: object) -> dict[str, str]:
    bos = tokenizer.token_text(tokenizer.bos_id) if tokenizer.bos_id is not None else ""
    encoder = ConversationEncoder(tokenizer, template(name, bos), StandInFormat(), variables)
    return levels(audit_template(encoder, StandInFormat()))


def test_a_run_without_tools_is_told_nothing_of_them() -> None:
    tokenizer = standins.chatml()
    encoder = ConversationEncoder(tokenizer, template("smollm2", ""), StandInFormat(), {})
    assert levels(audit_template(encoder, StandInFormat(), tools=False)) == {"template history": "ok"}


def test_templates() -> None:
    good = dict.fromkeys(
        ["template tools", "template history", "template history with tools", "tool calls"], "ok"
    )
    assert template_levels("qwen2.5", standins.chatml()) == good
    assert template_levels("smollm2", standins.chatml()) == {**good, "template tools": "note"}
    assert template_levels("gemma", standins.gemma()) == {**good, "template tools": "note"}
    # Qwen 3 rewrites history before a user message, and keeps turns across a tool's answer unless it puts an
    # empty thought into the last one.
    assert template_levels("qwen3", standins.chatml())["template history"] == "note"
    assert template_levels("r1", standins.r1())["template history"] == "note"


def test_masks_are_shown_on_the_text() -> None:
    shown = describe_masks(example([BOS, 72, 105, 65, 66, EOT, 67], "...xxx.", "f:5"), TOKENIZER)
    assert shown.splitlines() == [
        "f:5: 7 tokens, 3 of them trained ⟦…⟧",
        "<|begin_of_text|>Hi⟦AB<|eot_id|>⟧C",
    ]


def test_trained_runs() -> None:
    assert trained_runs(example([1] * 6, ".xx..x")) == [(1, 3), (5, 6)]
    assert trained_runs(example([1] * 2, "..")) == []
