"""Damaged vocabularies are refused; roles of tokens follow llama.cpp's rules."""

from __future__ import annotations

from typing import Any

import pytest

from retrograd.testing.tokenizers import check_tokenizer
from retrograd.testing.vocabulary import byte_level_vocabulary, sentencepiece_vocabulary
from retrograd_hookspecs import TokenizerError
from retrograd_plugins.tokenizers._vocabulary import CONTROL, NORMAL, USER_DEFINED, Vocabulary
from retrograd_plugins.tokenizers.gpt2 import Gpt2Tokenizer
from retrograd_plugins.tokenizers.llama import LlamaTokenizer

CHARACTERS = [chr(code) for code in range(0x21, 0x7F)]


def vocabulary(tokens: list[str], **more: Any) -> Vocabulary:
    metadata = {"tokenizer.ggml.tokens": [*tokens, *CHARACTERS], **more}
    return Vocabulary(metadata, bos=1, eos=2, adds_bos=False)


def stops(tokens: list[str], **more: Any) -> set[str]:
    found = vocabulary(tokens, **more)
    return {found.tokens[token] for token in found.stop_ids}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_contract_of_byte_level(architecture: str) -> None:
    check_tokenizer(Gpt2Tokenizer(byte_level_vocabulary(architecture)))


def test_contract_of_sentencepiece() -> None:
    check_tokenizer(LlamaTokenizer(sentencepiece_vocabulary()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "'klingon' is not a pre-tokenizer.*qwen2"),
        ({"tokenizer.ggml.pre": None}, "no tokenizer.ggml.pre"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "'a' twice, at 0 and 2"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries for"),
        ({"tokenizer.ggml.eos_token_id": 999_999}, "eos_token_id = 999999 is outside the vocabulary"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}
            | {"tokenizer.ggml.pre": "glm4"},
            "add_bos_token is true, but tokenizer.ggml.bos_token_id is not set",
        ),
    ],
)
def test_damaged_metadata_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Gpt2Tokenizer(byte_level_vocabulary("qwen2") | change)


def test_scores_too_short_are_refused() -> None:
    with pytest.raises(TokenizerError, match="scores has 3 entries"):
        LlamaTokenizer(sentencepiece_vocabulary() | {"tokenizer.ggml.scores": [0.0] * 3})


def test_a_character_without_bytes_is_refused() -> None:
    tokens = ["<unk>", "<s>", "</s>", *CHARACTERS]
    tokenizer = LlamaTokenizer({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    with pytest.raises(TokenizerError, match="neither 'é' nor the byte token <0xC3>"):
        tokenizer.encode("é")


def test_stop_tokens_by_text() -> None:
    assert stops(["x0", "<s>", "</s>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|im_start|>"]) == {
        "</s>",
        "<|im_end|>",
        "<end_of_turn>",
        "<|eot_id|>",
    }
    assert stops(["x0", "<s>", "<eos>", "<|eom_id|>", "<|file_sep|>", "[PAD]"]) == {
        *("<eos>", "<|eom_id|>", "<|file_sep|>", "[PAD]"),
    }


def test_stop_tokens_declared() -> None:
    declared = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eos_token_id": 3}
    assert stops(["w0", "x0", "y0", "z0"], **declared) == {"w0", "z0"}


def test_harmony_ends_messages_within_a_turn() -> None:
    tokens = ["<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|message|>", "<|channel|>"]
    found = vocabulary(tokens, **{"tokenizer.ggml.token_type": [3] * len(tokens) + [1] * len(CHARACTERS)})
    assert {found.tokens[token] for token in found.stop_ids} == {"<|return|>", "<|call|>"}
    assert found.kinds[found.ids["<|end|>"]] == USER_DEFINED
    assert found.kinds[found.ids["<|start|>"]] == USER_DEFINED


def test_gemma_4_has_s_as_a_tag() -> None:
    assert stops(["x0", "<bos>", "<eos>", "</s>", "<|tool_response>"]) == {"<eos>", "<|tool_response>"}


def test_tokens_that_look_like_control_tokens_are() -> None:
    found = vocabulary(["x0", "<s>", "</s>", "<|im_end|>", "<|fim_prefix|>", "<other>"])
    controls = {found.tokens[token] for token, kind in enumerate(found.kinds) if kind & CONTROL}
    assert controls == {"</s>", "<|im_end|>", "<|fim_prefix|>"}
    assert found.kinds[found.ids["<other>"]] == NORMAL


def test_empty_entries_get_a_name_of_their_own() -> None:
    found = vocabulary(["", "<s>", "</s>", ""])
    assert found.ids["[EMPTY_0]"] == 0
    assert found.ids["[EMPTY_3]"] == 3
    assert found.tokens[3] == ""


def test_longest_special_token_first() -> None:
    types = {"tokenizer.ggml.token_type": [3, 3, 3, 4, 4] + [1] * len(CHARACTERS)}
    found = vocabulary(["<a>", "<s>", "</s>", "ab", "abc"], **types)
    assert found.fragments("xabcab<a>", False) == ["x", 4, 3, "<a>"]
    assert found.fragments("xabcab<a>", True) == ["x", 4, 3, 0]
    assert found.fragments("", True) == []
