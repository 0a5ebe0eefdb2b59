"""Checks of template and data before the first step; each returns findings, and raises nothing.

Faults found here cost others whole runs: a stop token outside the mask (the model never stops), a second
BOS, a template that rewrites history, a tool call that its own parser cannot read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrograd_hookspecs import (
    AuditFinding,
    ChatFormat,
    DataError,
    Message,
    TokenExample,
    Tokenizer,
    TokenizerError,
    ToolCall,
)

from .conversation import Conversation, ConversationEncoder
from .tool_prompt import call_id, openai_tool

LOW_SHARE = 0.02
"""Share of trained tokens below which most of the work trains nothing."""
MARK_BEGIN, MARK_END = "⟦", "⟧"

_CALL = ToolCall(name="lookup", arguments={"text": 'a "quoted" line\nand ünïcode', "count": 3}, id=call_id(0))
_TOOL = openai_tool(
    "lookup",
    "Looks a text up.",
    {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["text"],
    },
)


def audit_template(
    encoder: ConversationEncoder, chat_format: ChatFormat, *, tools: bool = True
) -> list[AuditFinding]:
    """Findings on the chat template, and with `tools` on how it and the chat format write them."""
    if not tools:
        return [_history(encoder, tools=False)]
    return [
        _tool_support(encoder),
        _history(encoder, tools=False),
        _history(encoder, tools=True),
        calls_read_back(chat_format),
    ]


def audit_examples(
    examples: Sequence[TokenExample], tokenizer: Tokenizer, *, ctx: int, chat: bool
) -> list[AuditFinding]:
    """Findings on tokenised data. With `chat`, trained runs are turns, which must end in a stop token."""
    findings = [single_bos(examples, tokenizer, chat=chat), trained_share(examples), lengths(examples, ctx)]
    if chat:
        findings.insert(0, stop_tokens_trained(examples, tokenizer))
    return [*findings, duplicates(examples)]


def stop_tokens_trained(examples: Sequence[TokenExample], tokenizer: Tokenizer) -> AuditFinding:
    """Every trained run ends with a stop token, and holds no other."""
    check = "stop token"
    turns = 0
    for example in examples:
        stops = np.isin(example.tokens, list(tokenizer.stop_ids))
        for start, end in trained_runs(example):
            turns += 1
            if not stops[end - 1]:
                last = tokenizer.token_text(int(example.tokens[end - 1]))
                return _error(
                    check,
                    f"{example.origin}: a trained turn ends with {last!r}, which is not a stop token: the"
                    " model would not learn to stop",
                )
            if stops[start : end - 1].any():
                return _error(check, f"{example.origin}: a stop token stands inside a trained turn")
    return _ok(check, f"all {turns} trained turns end with a stop token, which is trained")


def single_bos(examples: Sequence[TokenExample], tokenizer: Tokenizer, *, chat: bool) -> AuditFinding:
    """BOS begins every conversation once (the text stream once), and is not doubled."""
    check = "BOS"
    bos = tokenizer.bos_id
    if bos is None:
        return _ok(check, "the model has no BOS token")
    for number, example in enumerate(examples):
        begins = [int(token) == bos for token in example.tokens[:2]]
        if begins == [True, True]:
            return _error(check, f"{example.origin}: begins with BOS twice (template and tokenizer?)")
        if tokenizer.adds_bos and (chat or number == 0) and not begins[0]:
            return _error(check, f"{example.origin}: the model asks for BOS first, and it is not there")
    name = tokenizer.token_text(bos)
    wanted = "as the model asks" if tokenizer.adds_bos else f"the model does not ask for {name!r}"
    return _ok(check, f"at most one at the start, {wanted}")


def trained_share(examples: Sequence[TokenExample]) -> AuditFinding:
    """How much of the data is trained."""
    check = "trained share"
    tokens = sum(example.tokens.size for example in examples)
    trained = sum(int(example.trained.sum()) for example in examples)
    empty = [example.origin for example in examples if not example.trained.any()]
    if empty:
        return _error(check, f"{len(empty)} examples train nothing, first {empty[0]}")
    if not tokens:
        return _error(check, "there are no examples")
    message = f"{trained} of {tokens} tokens ({trained / tokens:.1%}) in {len(examples)} examples"
    if trained / tokens < LOW_SHARE:
        return _finding("warning", check, f"{message}: nearly all work is spent on context")
    return _ok(check, message)


def lengths(examples: Sequence[TokenExample], ctx: int) -> AuditFinding:
    """Nothing is longer than the context; the longest, the mean, and the context that would do."""
    check = "length"
    sizes = [example.tokens.size for example in examples]
    if not sizes:
        return _error(check, "there are no examples")
    too_long = [e for e in examples if e.tokens.size > ctx]
    if too_long:
        first = too_long[0]
        return _error(
            check,
            f"{len(too_long)} examples are longer than training.ctx = {ctx}, first {first.origin} with"
            f" {first.tokens.size} tokens",
        )
    message = f"longest {max(sizes)} of {ctx} tokens, mean {sum(sizes) / len(sizes):.0f}"
    if max(sizes) * 2 < ctx:
        return _finding("note", check, f"{message}; training.ctx = {max(sizes)} would do")
    return _ok(check, message)


def within_context(examples: Sequence[TokenExample], limit: int) -> AuditFinding:
    """No example has positions that the model was never trained for; `limit` is its context in tokens."""
    check = "model context"
    longer = [example for example in examples if example.tokens.size > limit]
    if longer:
        return _finding(
            "warning",
            check,
            f"{len(longer)} examples are longer than the {limit} tokens that the model was made for, first"
            f" {longer[0].origin} with {longer[0].tokens.size}",
        )
    return _ok(check, f"no example is longer than the model's {limit} tokens")


def duplicates(examples: Sequence[TokenExample]) -> AuditFinding:
    """Examples with equal tokens."""
    first: dict[bytes, str] = {}
    twice: list[tuple[str, str]] = []
    for example in examples:
        content = example.tokens.tobytes()
        if content in first:
            twice.append((example.origin, first[content]))
        else:
            first[content] = example.origin
    if twice:
        again, before = twice[0]
        return _finding(
            "warning",
            "duplicates",
            f"{len(twice)} of {len(examples)} examples repeat an earlier one, first {again} ({before})",
        )
    return _ok("duplicates", f"none among {len(examples)} examples")


def overlap(training: Sequence[TokenExample], evaluation: Sequence[TokenExample]) -> AuditFinding:
    """Held-out examples that are trained on as well."""
    known = {example.tokens.tobytes(): example.origin for example in training}
    shared = [(e.origin, known[e.tokens.tobytes()]) for e in evaluation if e.tokens.tobytes() in known]
    if shared:
        held, trained = shared[0]
        return _finding(
            "warning",
            "held-out data",
            f"{len(shared)} of {len(evaluation)} held-out examples are trained on too;"
            f" first: {held} is {trained}",
        )
    return _ok("held-out data", f"none of {len(evaluation)} examples is trained on")


def calls_read_back(chat_format: ChatFormat) -> AuditFinding:
    """A tool call that the format writes is read back to itself."""
    check = "tool calls"
    text = chat_format.format_calls((_CALL,))
    parsed = chat_format.parse(text)
    read = [(call.name, dict(call.arguments)) for call in parsed.tool_calls]
    if parsed.error or read != [(_CALL.name, dict(_CALL.arguments))]:
        return _finding(
            "warning",
            check,
            f"the chat format {chat_format.name!r} does not read its own call back:"
            f" {parsed.error or f'{text!r} became {read}'}",
        )
    return _ok(check, f"the chat format {chat_format.name!r} reads its own calls back")


def describe_masks(example: TokenExample, tokenizer: Tokenizer) -> str:
    """The example as text, each trained run between ⟦ and ⟧, special tokens by name, after a line of counts.

    Bytes that are not UTF-8 within a run appear as U+FFFD.
    """
    pieces: list[str] = []
    position = 0
    for start, end in trained_runs(example):
        pieces.append(tokenizer.decode(example.tokens[position:start].tolist()))
        pieces.append(MARK_BEGIN + tokenizer.decode(example.tokens[start:end].tolist()) + MARK_END)
        position = end
    pieces.append(tokenizer.decode(example.tokens[position:].tolist()))
    trained = int(example.trained.sum())
    head = (
        f"{example.origin}: {example.tokens.size} tokens, {trained} of them trained {MARK_BEGIN}…{MARK_END}"
    )
    return f"{head}\n{''.join(pieces)}"


def trained_runs(example: TokenExample) -> list[tuple[int, int]]:
    """The maximal ranges [start, end) of trained tokens."""
    padded = np.concatenate(([False], example.trained, [False])).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _tool_support(encoder: ConversationEncoder) -> AuditFinding:
    if encoder.support.tools:
        return _ok("template tools", "catalogue, calls and observations come out of the chat template")
    return _finding(
        "note",
        "template tools",
        "the chat template knows no tools: a catalogue goes into the"
        f" {'system prompt' if encoder.support.system else 'first user message'}, calls and observations into"
        " the text of turns",
    )


def _history(encoder: ConversationEncoder, *, tools: bool) -> AuditFinding:
    """Does the template repeat earlier turns exactly, across a user turn and across a tool turn?"""
    check = "template history with tools" if tools else "template history"
    first = Message(role="assistant", content="" if tools else "One.", tool_calls=(_CALL,) if tools else ())
    between = (
        Message(role="tool", content="found", tool_call_id=_CALL.id, name=_CALL.name)
        if tools
        else Message(role="user", content="And then?")
    )
    messages = (
        Message(role="user", content="Begin."),
        first,
        between,
        Message(role="assistant", content="Two."),
    )
    conversation = Conversation(messages=messages, tools=(_TOOL,) if tools else ())
    try:
        encoded = encoder.encode(conversation)
    except TokenizerError as error:
        return _finding("warning", check, f"the template refuses a plain conversation of two turns: {error}")
    except DataError as error:
        return _finding("note", check, f"a plain conversation of two turns cannot be trained: {error}")
    if len(encoded.samples) > 1:
        return _finding(
            "note",
            check,
            "the template rewrites earlier turns, so a conversation becomes one sample for each of its turns"
            " (rollouts start a new sequence there too)",
        )
    return _ok(check, "earlier turns stay as they are: one sequence of tokens a conversation")


def _ok(check: str, message: str) -> AuditFinding:
    return _finding("ok", check, message)


def _error(check: str, message: str) -> AuditFinding:
    return _finding("error", check, message)


def _finding(level: str, check: str, message: str) -> AuditFinding:
    return AuditFinding(level=level, check=check, message=message)
