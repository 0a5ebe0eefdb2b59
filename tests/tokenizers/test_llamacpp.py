"""Every tokenizer gives the token ids of stock llama.cpp, on strings made to find differences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from retrograd.gguf.reader import open_model
from retrograd_plugins.tokenizers._base import VocabularyTokenizer
from retrograd_plugins.tokenizers._pretokenizers import FAMILIES
from retrograd_plugins.tokenizers._unicode import CharacterClasses
from retrograd_plugins.tokenizers.gpt2 import Gpt2Tokenizer, byte_symbols
from retrograd_plugins.tokenizers.llama import LlamaTokenizer
from tests.llamacpp.llamacpp import LlamaCpp

from .strings import random_strings
from .vocabularies import pairs_vocabulary, pieces_vocabulary, write_vocabulary_model


def assert_same_tokens(
    llamacpp: LlamaCpp, model: Path, tokenizer: VocabularyTokenizer, strings: list[str]
) -> None:
    for special in (False, True):
        expected = llamacpp.tokenize(model, strings, special=special)
        for text, ids in zip(strings, expected, strict=True):
            assert tokenizer.encode(text, special=special) == ids, (special, text)


def metadata_of(path: Path) -> Mapping[str, Any]:
    return open_model(path).metadata


@pytest.mark.parametrize("seed", [1, 2])
def test_smollm2_random_strings(llamacpp: LlamaCpp, smollm2_path: Path, seed: int) -> None:
    tokenizer = Gpt2Tokenizer(metadata_of(smollm2_path))
    assert_same_tokens(llamacpp, smollm2_path, tokenizer, random_strings(seed, 1000))


@pytest.mark.parametrize("seed", [1, 2])
def test_gemma3_random_strings(llamacpp: LlamaCpp, gemma3_path: Path, seed: int) -> None:
    tokenizer = LlamaTokenizer(metadata_of(gemma3_path))
    assert_same_tokens(llamacpp, gemma3_path, tokenizer, random_strings(seed, 1000))


def test_stop_tokens_of_real_models(llamacpp: LlamaCpp, smollm2_path: Path, gemma3_path: Path) -> None:
    smollm2, gemma3 = Gpt2Tokenizer(metadata_of(smollm2_path)), LlamaTokenizer(metadata_of(gemma3_path))
    assert smollm2.stop_ids == llamacpp.end_of_generation(smollm2_path, smollm2.vocabulary_size)
    assert gemma3.stop_ids == llamacpp.end_of_generation(gemma3_path, gemma3.vocabulary_size)


@pytest.fixture(scope="module")
def pairs() -> dict[str, Any]:
    return pairs_vocabulary()


@pytest.mark.parametrize("pre", sorted(FAMILIES))
def test_pre_family(llamacpp: LlamaCpp, tmp_path: Path, pairs: dict[str, Any], pre: str) -> None:
    vocabulary = pairs | {"tokenizer.ggml.pre": pre}
    model = write_vocabulary_model(tmp_path / "model.gguf", vocabulary)
    tokenizer = Gpt2Tokenizer(vocabulary)
    assert_same_tokens(llamacpp, model, tokenizer, random_strings(3, 250))
    assert llamacpp.info(model)["addsBos"] == tokenizer.adds_bos


def test_unknown_pre_is_unknown_there_too(llamacpp: LlamaCpp, tmp_path: Path, pairs: dict[str, Any]) -> None:
    vocabulary = pairs | {"tokenizer.ggml.pre": "no-such-pre"}
    model = write_vocabulary_model(tmp_path / "model.gguf", vocabulary)
    with pytest.raises(AssertionError):
        llamacpp.tokenize(model, ["x"])


def test_missing_bytes(llamacpp: LlamaCpp, tmp_path: Path) -> None:
    missing = frozenset(b"aQ7 \n\x04") | frozenset(range(0xC3, 0xD2))
    vocabulary = pairs_vocabulary("smollm", bytes_missing=missing)
    model = write_vocabulary_model(tmp_path / "model.gguf", vocabulary)
    assert_same_tokens(llamacpp, model, Gpt2Tokenizer(vocabulary), random_strings(4, 300))


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sentencepiece_ties(llamacpp: LlamaCpp, tmp_path: Path, prefix: bool, seed: int) -> None:
    vocabulary = pieces_vocabulary(seed, **{"tokenizer.ggml.add_space_prefix": prefix})
    model = write_vocabulary_model(tmp_path / "model.gguf", vocabulary)
    tokenizer = LlamaTokenizer(vocabulary)
    strings = random_strings(5, 200)
    assert_same_tokens(llamacpp, model, tokenizer, strings)
    ids = [tokenizer.encode(text, special=True) for text in strings]
    assert [tokenizer.decode(row) for row in ids] == llamacpp.detokenize(model, ids)
    plain = [tokenizer.decode(row, special=False) for row in ids]
    assert plain == llamacpp.detokenize(model, ids, special=False)


def test_phi3_special_tokens_swallow_spaces(llamacpp: LlamaCpp, tmp_path: Path) -> None:
    vocabulary = pieces_vocabulary(7, **{"general.name": "Phi-3 mini"})
    model = write_vocabulary_model(tmp_path / "model.gguf", vocabulary)
    assert_same_tokens(llamacpp, model, LlamaTokenizer(vocabulary), random_strings(6, 300))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pre", "context", "joined"),
    [
        ("gpt-2", "x", "L"),
        ("gpt-2", "1", "N"),
        ("gpt-2", "!", "PSMO"),
        ("falcon", "!", "P"),
        ("deepseek-v3", "!", "PS"),
        ("deepseek-v3", "x", "LM"),
    ],
)
def test_class_of_every_character(
    llamacpp: LlamaCpp, tmp_path: Path, pre: str, context: str, joined: str
) -> None:
    """Whether llama.cpp keeps a character in one word with `context` tells its class."""
    merges = [f"{context} {symbol}" for symbol in byte_symbols()]
    tokens = [*byte_symbols(), *(merge.replace(" ", "") for merge in merges)]
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
    }
    model = write_vocabulary_model(tmp_path / "model.gguf", vocabulary)
    # Beyond the third plane only the tags of plane 14 are assigned.
    codes = [*range(0x80, 0xD800), *range(0xE000, 0x33480), *range(0xE0000, 0xE0200), 0xF0000, 0x10FFFF]
    # deepseek-v3 cuts before and after CJK first.
    cut = {code for code in codes if 0x3040 <= code <= 0x30FF or 0x4E00 <= code <= 0x9FA5}
    classes = CharacterClasses()
    for start in range(0, len(codes), 100_000):
        part = codes[start : start + 100_000]
        rows = llamacpp.tokenize(model, [context + chr(code) for code in part])
        for code, ids in zip(part, rows, strict=True):
            if pre == "deepseek-v3" and code in cut:
                continue
            together = len(ids) == len(chr(code).encode())
            assert together == (classes.name(code) in joined), f"U+{code:04X}"
