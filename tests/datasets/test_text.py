"""Plain text: every token trained once, windows of the context length."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from retrograd.testing.datasets import check_dataset
from retrograd_hookspecs import DataError
from retrograd_plugins.datasets.text import TextDataset

from . import standins


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("ctx", [2, 3, 7, 16, 17, 1000])
def test_every_token_but_the_first_is_trained_exactly_once(tmp_path: Path, ctx: int) -> None:
    text = "Hello world.\nüber\n\n" * 3
    tokenizer = standins.llama3()
    windows = TextDataset(tokenizer).load(write(tmp_path, text), ctx=ctx)
    stream = tokenizer.encode(text, bos=True)
    assert stream[0] == tokenizer.bos_id
    assert [t for w in windows for t in w.tokens[w.trained]] == stream[1:]
    assert all(2 <= w.tokens.size <= ctx for w in windows)
    assert all(w.tokens.size == ctx for w in windows[:-1])
    for before, after in itertools.pairwise(windows):
        assert after.tokens[0] == before.tokens[-1]
        assert not after.trained[0]


def test_origin_is_the_line_on_which_a_window_begins(tmp_path: Path) -> None:
    windows = TextDataset(standins.chatml()).load(write(tmp_path, "ab\ncd\nef\n"), ctx=4)
    assert [w.origin.rsplit(":", 1)[1] for w in windows] == ["1", "2", "3"]


def test_contract(tmp_path: Path) -> None:
    check_dataset(TextDataset(standins.chatml()), write(tmp_path, "Hello world\n" * 20), bad_line=b"\xff")


def test_names_of_special_tokens_are_text(tmp_path: Path) -> None:
    tokenizer = standins.chatml()
    data = TextDataset(tokenizer)
    (window,) = data.load(write(tmp_path, "a<|endoftext|>b"), ctx=100)
    assert tokenizer.id("<|endoftext|>") not in window.tokens
    assert any("'<|endoftext|>' 1 times" in note for note in data.notes())


def test_eos_ends_the_stream_where_the_model_asks_for_it(tmp_path: Path) -> None:
    tokenizer = standins.chatml()
    tokenizer.adds_eos = True
    (window,) = TextDataset(tokenizer).load(write(tmp_path, "abc"), ctx=100)
    assert window.tokens[-1] == tokenizer.eos_id
    assert window.trained[-1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "holds 0 tokens"),
        (b"x", "holds 1 tokens"),
        (b"ok\nok\n\xe9", r"corpus\.txt:3: byte 0xE9 is not UTF-8"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        TextDataset(standins.chatml()).load(write(tmp_path, content), ctx=16)
    with pytest.raises(DataError, match="cannot be read"):
        TextDataset(standins.chatml()).load(tmp_path, ctx=16)


def test_byte_order_mark_is_not_trained(tmp_path: Path) -> None:
    data = TextDataset(standins.chatml())
    (plain,) = data.load(write(tmp_path, "abc"), ctx=16)
    (marked,) = data.load(write(tmp_path, b"\xef\xbb\xbfabc"), ctx=16)
    assert np.array_equal(plain.tokens, marked.tokens)
