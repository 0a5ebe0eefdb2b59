"""Words, independent of llama.cpp being there; the comparison with it is in test_llamacpp."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from retrograd_plugins.tokenizers._merging import merge_symbols
from retrograd_plugins.tokenizers._pretokenizers import FAMILIES, PreTokenizer
from retrograd_plugins.tokenizers._unicode import CharacterClasses

from .strings import random_strings


def words(pre: str, text: str) -> list[str]:
    return PreTokenizer(FAMILIES[pre].expressions).split(text)


@pytest.mark.parametrize("pre", sorted(FAMILIES))
def test_words_are_the_text_cut_in_pieces(pre: str) -> None:
    pre_tokenizer = PreTokenizer(FAMILIES[pre].expressions)
    for text in ["", *random_strings(11, 60)]:
        pieces = pre_tokenizer.split(text)
        assert "".join(pieces) == text
        assert all(pieces)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'm 123 x  y\n", ["I", "'m", " 123", " x", " ", " y", "\n"]),
        ("smollm", "I'm 123", ["I", "'m", " ", "1", "2", "3"]),
        ("llama-bpe", "I'M 12345 (ok)\n\n x", ["I", "'M", " ", "123", "45", " (", "ok", ")\n\n", " x"]),
        ("qwen2", "it's 42!\n", ["it", "'s", " ", "4", "2", "!\n"]),
        ("tekken", "camelCase HTTPServer", ["camel", "Case", " HTTPServer"]),
        ("deepseek-v3", "a中文b 12345", ["a", "中文", "b", " ", "123", "45"]),
        ("afmoe", "1234567", ["1", "234", "567"]),
        ("superbpe", "1234567", ["1", "234", "567"]),
        ("kimi-k2", "don't 中文 ok", ["don't", " ", "中文", " ok"]),
        ("bloom", "Hello, big world", ["Hello", ",", " big", " world"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
    ],
)
def test_words(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


@pytest.mark.parametrize("pre", ["gpt-4o", "tekken", "qwen35", "exaone-moe", "deepseek-v3", "youtu"])
@pytest.mark.parametrize("text", ["A" * 100_000, "a" * 100_000, "中" * 100_000, " " * 100_000, "A " * 50_000])
def test_long_runs_take_linear_time(pre: str, text: str) -> None:
    assert "".join(words(pre, text)) == text


def test_classes_agree_with_python_where_it_knows_the_character() -> None:
    # Characters assigned after Unicode 15.1 are unassigned here, whatever Python has.
    classes = CharacterClasses()
    older = tuple(map(int, unicodedata.unidata_version.split("."))) <= (15, 1, 0)
    spaces = {0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
    for code in range(0x80, sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category in ("Cn", "Cs") or (not older and classes.name(code) == "O"):
            continue
        expected = "Z" if code in spaces else category[0] if category[0] in "LNPMS" else "O"
        assert classes.name(code) == expected, f"U+{code:04X}"


def test_merging_prefers_low_ranks_then_the_left() -> None:
    ranks = {("a", "b"): 1, ("b", "c"): 0, ("a", "a"): 2, ("aa", "a"): 3}

    def rank(left: str, right: str) -> int | None:
        return ranks.get((left, right))

    assert merge_symbols(list("abc"), rank) == ["a", "bc"]
    assert merge_symbols(list("ab"), rank) == ["ab"]
    assert merge_symbols(list("aaaaa"), rank) == ["aa", "aaa"]
    assert merge_symbols([], rank) == []
    assert merge_symbols(["x"], rank) == ["x"]
