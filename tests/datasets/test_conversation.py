"""Tokens and masks of conversations: what a rollout would have, and nothing else trained."""

from __future__ import annotations

import json

import pytest

from retrograd.conversation import Conversation, ConversationEncoder, Sample
from retrograd_hookspecs import DataError, Message, TokenizerError, ToolCall

from . import standins
from .standins import StandInFormat, StandInTokenizer, template

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = ToolCall(name="weather", arguments={"city": "Köln"}, id="call00000")


CALL_TURN = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>'


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, **more: object) -> Message:
    return Message(role="assistant", content=text, **more)  # type: ignore[arg-type]


def encoder(name: str, tokenizer: StandInTokenizer, **variables: object) -> ConversationEncoder:
    bos = tokenizer.token_text(tokenizer.bos_id) if tokenizer.bos_id is not None else ""
    return ConversationEncoder(tokenizer, template(name, bos), StandInFormat(), variables)


def runs(sample: Sample, tokenizer: StandInTokenizer) -> list[tuple[bool, str]]:
    """The sample as text, cut where the mask changes."""
    found: list[tuple[bool, list[int]]] = []
    for token, trained in zip(sample.tokens, sample.trained, strict=True):
        if not found or found[-1][0] != trained:
            found.append((trained, []))
        found[-1][1].append(token)
    return [(trained, tokenizer.decode(ids)) for trained, ids in found]


def trained_texts(samples: tuple[Sample, ...], tokenizer: StandInTokenizer) -> list[list[str]]:
    return [[text for trained, text in runs(s, tokenizer) if trained] for s in samples]


def test_chatml_trains_turns_and_their_stop_token_only() -> None:
    tokenizer = standins.chatml()
    encoded = encoder("smollm2", tokenizer).encode(
        Conversation(messages=(user("Hi"), assistant("Hello world"), user("Bye"), assistant("\n\nSee you")))
    )
    assert len(encoded.samples) == 1
    assert runs(encoded.samples[0], tokenizer) == [
        (
            False,
            "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "Hello world<|im_end|>"),
        (False, "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"),
        (True, "\n\nSee you<|im_end|>"),
    ]
    assert encoded.remarks == frozenset()


def test_tokens_never_merge_across_the_start_of_a_turn() -> None:
    tokenizer = standins.chatml()
    # As one text "\n" + "\n\n" would be the single token "\n\n\n"; a rollout samples "\n\n" after "\n".
    encoded = encoder("smollm2", tokenizer).encode(Conversation(messages=(user("Hi"), assistant("\n\nx"))))
    sample = encoded.samples[0]
    start = sample.trained.index(True)
    prompt = encoder("smollm2", tokenizer).prompt(Conversation(messages=(user("Hi"),)))
    assert list(sample.tokens[:start]) == prompt
    assert list(sample.tokens[start:]) == [*tokenizer.encode("\n\nx"), tokenizer.id("<|im_end|>")]
    whole = tokenizer.encode(tokenizer.decode(sample.tokens), special=True)
    assert whole != list(sample.tokens)


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        ("smollm2", standins.chatml()),
        ("qwen2.5", standins.chatml()),
        ("llama3", standins.llama3()),
        ("gemma", standins.gemma()),
        ("mistral", standins.mistral()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tokens_are_those_of_a_rollout(name: str, tokenizer: StandInTokenizer) -> None:
    """An independent loop: prompt, sampled turn, framing of the next prompt, sampled turn."""
    turns = ["Hello.", "hello world\nagain", "x"]
    messages: list[Message] = []
    chat = encoder(name, tokenizer)
    bos = [tokenizer.bos_id] if tokenizer.adds_bos else []
    bos_text = tokenizer.token_text(tokenizer.bos_id) if tokenizer.bos_id is not None else ""
    rendered = template(name, bos_text)
    tokens: list[int] = []
    text = ""
    for turn in turns:
        messages.append(user("Hello world"))
        prompt = rendered.render(messages, add_generation_prompt=True)
        assert prompt.startswith(text)
        piece = prompt[len(text) :]
        if not tokens:
            tokens = [*bos, *tokenizer.encode(piece.removeprefix(bos_text), special=True)]
        else:
            tokens += tokenizer.encode(piece, special=True)
        messages.append(assistant(turn))
        written = rendered.render(messages)[len(prompt) :]
        sampled = written[: next(written.index(s) for s in chat.pieces.stop_texts if s in written)]
        stop = next(s for s in chat.pieces.stop_texts if written.startswith(s, len(sampled)))
        # The model continues the prompt: its tokens carry no space that is not in the text.
        ids = (
            tokenizer.encode("]" + sampled)[1:] if name != "mistral" else tokenizer.encode("]" + sampled)[2:]
        )
        assert tokenizer.decode(ids) == sampled
        tokens += [*ids, tokenizer.id(stop)]
        text = prompt + sampled + stop
    encoded = chat.encode(Conversation(messages=tuple(messages)))
    assert len(encoded.samples) == 1
    assert list(encoded.samples[0].tokens) == tokens
    assert tokens.count(tokenizer.bos_id) == (1 if tokenizer.bos_id is not None else 0)


def test_one_bos_where_template_or_tokenizer_or_both_write_it() -> None:
    conversation = Conversation(messages=(user("Hi"), assistant("Hello")))
    for writes in (True, False):
        for adds in (True, False):
            tokenizer = standins.llama3()
            tokenizer.adds_bos = adds
            chat = ConversationEncoder(
                tokenizer, template("llama3", "<|begin_of_text|>" if writes else ""), StandInFormat()
            )
            tokens = chat.encode(conversation).samples[0].tokens
            assert tokens.count(tokenizer.bos_id) == (1 if writes or adds else 0)


def test_trimmed_content_is_reported_and_trained_as_written() -> None:
    tokenizer = standins.llama3()
    encoded = encoder("llama3", tokenizer).encode(Conversation(messages=(user("Hi"), assistant(" Hello \n"))))
    assert encoded.remarks == {"stripped"}
    assert trained_texts(encoded.samples, tokenizer) == [["Hello<|eot_id|>"]]


def test_template_that_drops_a_message_is_reported() -> None:
    tokenizer = standins.chatml()
    source = template("smollm2").source.replace(
        "m['content']", "(m['content'] if m['role'] != 'system' else '')"
    )
    chat = ConversationEncoder(tokenizer, standins.StandInTemplate(source), StandInFormat())
    system = Message(role="system", content="Speak Dutch")
    assert chat.encode(Conversation(messages=(system, user("Hi"), assistant("Dag")))).remarks == {"dropped"}


def test_refusal_of_the_template_is_a_tokenizer_error() -> None:
    chat = encoder("gemma", standins.gemma())
    with pytest.raises(TokenizerError, match="System role not supported"):
        chat.encode(Conversation(messages=(Message(role="system", content="x"), user("Hi"), assistant("y"))))


def test_rewritten_history_splits_the_record() -> None:
    tokenizer = standins.chatml()
    first = "<think>\nEasy.\n</think>\n\nHello"
    second = "<think>\nAgain.\n</think>\n\nBye"
    encoded = encoder("qwen3", tokenizer).encode(
        Conversation(messages=(user("Hi"), assistant(first), user("Bye"), assistant(second)))
    )
    assert encoded.remarks == {"split"}
    head = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [runs(s, tokenizer) for s in encoded.samples] == [
        [(False, head), (True, first + "<|im_end|>")],
        [
            (False, head + "Hello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"),
            (True, second + "<|im_end|>"),
        ],
    ]


def test_thought_closed_by_the_generation_prompt_is_not_trained() -> None:
    tokenizer = standins.chatml()
    conversation = Conversation(messages=(user("Hi"), assistant("Hello")))
    closed = encoder("qwen3", tokenizer, enable_thinking=False).encode(conversation)
    assert runs(closed.samples[0], tokenizer) == [
        (False, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (True, "Hello<|im_end|>"),
    ]
    # With thinking left on, the model itself samples the empty thought.
    thinking = encoder("qwen3", tokenizer).encode(conversation)
    assert trained_texts(thinking.samples, tokenizer) == [["<think>\n\n</think>\n\nHello<|im_end|>"]]


@pytest.mark.parametrize("answer", ["Hello", "<b>Hello</b>"])
def test_opening_that_the_template_takes_out_of_turns(answer: str) -> None:
    tokenizer = standins.r1()
    chat = encoder("r1", tokenizer)
    encoded = chat.encode(Conversation(messages=(user("Hi"), assistant(f"<think>\nEasy.</think>\n{answer}"))))
    assert runs(encoded.samples[0], tokenizer) == [
        (False, "<bos><User>Hi<Assistant><think>\n"),
        (True, f"Easy.</think>\n{answer}<eos>"),
    ]
    with pytest.raises(DataError, match=r"does not continue.*raw = true"):
        chat.encode(Conversation(messages=(user("Hi"), assistant(answer))))


def test_raw_turn_keeps_its_exact_text() -> None:
    tokenizer = standins.llama3()
    raw = "  Hello \n"
    encoded = encoder("llama3", tokenizer).encode(
        Conversation(messages=(user("Hi"), assistant(raw, raw=True), user("x"), assistant("Bye")))
    )
    assert trained_texts(encoded.samples, tokenizer) == [[raw + "<|eot_id|>"], ["Bye<|eot_id|>"]]
    assert "split" in encoded.remarks


def test_stop_token_inside_a_turn_is_refused() -> None:
    chat = encoder("smollm2", standins.chatml())
    with pytest.raises(DataError, match=r"messages\[1\].*<\|im_end\|>"):
        chat.encode(Conversation(messages=(user("Hi"), assistant("a<|im_end|>b"))))
    call = ToolCall(name="weather", arguments={"city": "<|im_end|>"}, id="1")
    with pytest.raises(DataError, match=r"messages\[1\].*<\|im_end\|>"):
        encoder("qwen2.5", standins.chatml()).encode(
            Conversation(messages=(user("Hi"), assistant("", tool_calls=(call,))), tools=(WEATHER,))
        )


def test_special_token_in_a_user_message_is_noted() -> None:
    chat = encoder("smollm2", standins.chatml())
    assert "special" in chat.encode(Conversation(messages=(user("<|im_end|>"), assistant("x")))).remarks


def test_template_without_a_stop_token_is_refused() -> None:
    source = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chat = ConversationEncoder(standins.chatml(), standins.StandInTemplate(source), StandInFormat())
    with pytest.raises(DataError, match="would not learn to stop"):
        chat.encode(Conversation(messages=(user("Hi"), assistant("Hello"))))


def tool_conversation(**observation: object) -> Conversation:
    return Conversation(
        messages=(
            user("Rain?"),
            assistant("I look.", tool_calls=(CALL,)),
            Message(role="tool", content="dry", tool_call_id=CALL.id, name="weather", **observation),  # type: ignore[arg-type]
            assistant("It is dry."),
        ),
        tools=(WEATHER,),
    )


def test_native_tools_are_written_by_the_template() -> None:
    tokenizer = standins.chatml()
    encoded = encoder("qwen2.5", tokenizer).encode(tool_conversation())
    assert runs(encoded.samples[0], tokenizer) == [
        (
            False,
            f"<|im_start|>system\n{json.dumps(WEATHER)}\n<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            True,
            CALL_TURN,
        ),
        (
            False,
            "\n<|im_start|>user\n<tool_response>\ndry\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "It is dry.<|im_end|>"),
    ]
    assert encoded.remarks == frozenset()


def test_failed_observation_begins_with_error() -> None:
    tokenizer = standins.chatml()
    for name in ("qwen2.5", "smollm2"):
        sample = encoder(name, tokenizer).encode(tool_conversation(is_error=True)).samples[0]
        assert "<tool_response>\nERROR: dry\n</tool_response>" in tokenizer.decode(sample.tokens)


def test_tools_go_into_the_system_prompt_where_the_template_has_none() -> None:
    tokenizer = standins.chatml()
    chat = encoder("smollm2", tokenizer)
    assert not chat.support.tools
    encoded = chat.encode(tool_conversation())
    found = runs(encoded.samples[0], tokenizer)
    assert encoded.remarks == {"tools as text"}
    assert found[0][1].startswith("<|im_start|>system\n")
    assert json.dumps(WEATHER) in found[0][1]
    assert "<tool_call>" in found[0][1]
    assert found[1] == (
        True,
        CALL_TURN,
    )
    assert "<|im_start|>user\n<tool_response>\ndry\n</tool_response><|im_end|>" in found[2][1]


def test_tools_go_into_the_first_user_message_without_a_system_role() -> None:
    tokenizer = standins.gemma()
    encoded = encoder("gemma", tokenizer).encode(tool_conversation())
    text = tokenizer.decode(encoded.samples[0].tokens)
    assert text.startswith("<bos><start_of_turn>user\nThese functions")
    assert text.index(json.dumps(WEATHER)) < text.index("Rain?") < text.index("<end_of_turn>")


def test_raw_call_equals_the_structured_one_and_is_not_written_twice() -> None:
    tokenizer = standins.chatml()
    for name in ("qwen2.5", "smollm2"):
        chat = encoder(name, tokenizer)
        structured = tool_conversation()
        text = f"I look.\n{StandInFormat().format_calls((CALL,))}"
        raw = Conversation(
            messages=(
                structured.messages[0],
                assistant(text, raw=True, tool_calls=(CALL,)),
                *structured.messages[2:],
            ),
            tools=structured.tools,
        )
        assert chat.encode(raw).samples == chat.encode(structured).samples


def test_call_that_the_format_does_not_read_back_is_noted() -> None:
    class Deaf(StandInFormat):
        def parse(self, text: str):  # type: ignore[no-untyped-def]
            return super().parse("")

    chat = ConversationEncoder(standins.chatml(), template("qwen2.5"), Deaf())
    assert chat.encode(tool_conversation()).remarks == {"unread call"}
