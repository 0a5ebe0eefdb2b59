"""Any conversation, on the product's own tokenizers: text and mask come back exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.conversation import Conversation, ConversationEncoder
from retrograd.testing.vocabulary import byte_level_vocabulary, sentencepiece_vocabulary
from retrograd_hookspecs import Message, Role, Tokenizer
from retrograd_plugins.tokenizers.gpt2 import Gpt2Tokenizer
from retrograd_plugins.tokenizers.llama import LlamaTokenizer

from .standins import StandInFormat, template


@cache
def byte_level() -> Tokenizer:
    return Gpt2Tokenizer(byte_level_vocabulary("qwen2"))


@cache
def byte_level_with_bos() -> Tokenizer:
    return Gpt2Tokenizer(byte_level_vocabulary("llama"))


@cache
def sentencepiece() -> Tokenizer:
    return LlamaTokenizer(sentencepiece_vocabulary())


@cache
def sentencepiece_with_space() -> Tokenizer:
    return LlamaTokenizer({**sentencepiece_vocabulary(), "tokenizer.ggml.add_space_prefix": True})


CASES: list[tuple[str, Callable[[], Tokenizer]]] = [
    ("smollm2", byte_level),
    ("smollm2", byte_level_with_bos),
    ("qwen2.5", byte_level),
    ("gemma", sentencepiece),
]
# Without surrogates, control characters and the brackets of special tokens.
ALPHABET = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<>⟦⟧\u2581")
CONTENT = st.text(ALPHABET | st.sampled_from("\n a.1"), min_size=1, max_size=40).filter(
    lambda text: text == text.strip() != ""
)
TURNS = st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3)


@cache
def encoder(name: str, make: Callable[[], Tokenizer]) -> ConversationEncoder:
    return ConversationEncoder(make(), template(name, bos_text(make())), StandInFormat())


def bos_text(tokenizer: Tokenizer) -> str:
    return tokenizer.token_text(tokenizer.bos_id) if tokenizer.adds_bos and tokenizer.bos_id else ""


def conversation(turns: list[tuple[str, str]]) -> Conversation:
    roles: tuple[Role, Role] = ("user", "assistant")
    return Conversation(
        messages=tuple(
            Message(role=role, content=content)
            for turn in turns
            for role, content in zip(roles, turn, strict=True)
        )
    )


def rendered(name: str, tokenizer: Tokenizer, messages: Sequence[Message], stop: str) -> str:
    """The template's text up to the last stop token, BOS first where the model asks for it."""
    bos = bos_text(tokenizer)
    text = template(name, bos).render(messages)
    text = text if text.startswith(bos) else bos + text
    return text[: text.rindex(stop) + len(stop)]


@pytest.mark.parametrize(("name", "make"), CASES)
@settings(max_examples=40, deadline=None)
@given(turns=TURNS)
def test_text_and_mask_come_back(
    name: str, make: Callable[[], Tokenizer], turns: list[tuple[str, str]]
) -> None:
    tokenizer, chat = make(), encoder(name, make)
    given_conversation = conversation(turns)
    encoded = chat.encode(given_conversation)
    assert encoded.remarks == frozenset()
    (sample,) = encoded.samples
    stop = "<end_of_turn>" if name == "gemma" else "<|im_end|>"
    assert tokenizer.decode(sample.tokens) == rendered(name, tokenizer, given_conversation.messages, stop)
    trained: list[list[int]] = [[]]
    for token, flag in zip(sample.tokens, sample.trained, strict=True):
        if flag:
            trained[-1].append(token)
            if token == chat.pieces.stop_texts[stop]:
                trained.append([])
    assert trained.pop() == []
    assert [tokenizer.decode(ids[:-1]) for ids in trained] == [answer for _, answer in turns]


@settings(max_examples=40, deadline=None)
@given(turns=TURNS)
def test_space_before_pieces_is_that_of_the_whole_text(turns: list[tuple[str, str]]) -> None:
    """A tokenizer that puts a space before texts puts none before a turn that is only a piece of one."""
    tokenizer, chat = sentencepiece_with_space(), encoder("gemma", sentencepiece_with_space)
    given_conversation = conversation(turns)
    (sample,) = chat.encode(given_conversation).samples
    whole = rendered("gemma", tokenizer, given_conversation.messages, "<end_of_turn>")
    assert list(sample.tokens) == tokenizer.encode(whole, special=True)
