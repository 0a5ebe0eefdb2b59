"""Contract of tokenizers: `check_tokenizer` for a plugin's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from retrograd_hookspecs import Tokenizer, TokenizerError

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  two  spaces \n\n and\tlines\r\n",
    "def f(x):\n    return {'a': x ** 2}  # ½ of it",
    "Größe, été, naïve, Ελλάδα, Привет, שלום, مرحبا, हिन्दी, ไทย",
    "中文字符 ひらがな カタカナ 한국어 𠀀",
    "e\u0301 n\u0303 \u200d 👩\u200d👩\u200d👧 🇺🇸 1\ufe0f\u20e3",
    "3.14159 1,000,000 2024-01-31 ½ Ⅷ ٣",
    "a" * 300,
)


def check_tokenizer(tokenizer: Tokenizer, texts: Sequence[str] = TEXTS) -> None:
    """Raises AssertionError where a `Tokenizer` breaks its contract.

    `texts` are strings that the vocabulary can write: they come back from `decode`. Special tokens appear
    only where they are asked for, BOS only where the model wants it.
    """
    everything = range(tokenizer.vocabulary_size)
    assert tokenizer.stop_ids, "no token ends a turn"
    assert all(token in everything for token in tokenizer.stop_ids), "a stop token is outside the vocabulary"
    assert tokenizer.eos_id is None or tokenizer.eos_id in tokenizer.stop_ids, "EOS does not end a turn"
    assert not tokenizer.adds_bos or tokenizer.bos_id is not None, "BOS is asked for, but there is none"
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == tokenizer.encode(text), f"{text!r} has other tokens the second time"
        assert all(token in everything for token in ids), f"{text!r} has a token outside the vocabulary"
        decoded = tokenizer.decode(ids)
        assert decoded == text, f"{text!r} came back as {decoded!r}"
        assert tokenizer.decode_bytes(ids) == text.encode(), f"the bytes of {text!r} differ"
        first = [tokenizer.bos_id] if tokenizer.adds_bos else []
        assert tokenizer.encode(text, bos=True) == first + ids, f"{text!r} has the wrong tokens with BOS"
    for token in tokenizer.stop_ids:
        _check_special(tokenizer, token)
    for bad in (-1, tokenizer.vocabulary_size):
        assert _refuses(tokenizer.decode, [bad]), f"decode did not refuse the token id {bad}"
        assert _refuses(tokenizer.token_text, bad), f"token_text did not refuse the token id {bad}"
    assert _refuses(tokenizer.encode, "a\ud800"), "a lone surrogate was not refused"


def _check_special(tokenizer: Tokenizer, token: int) -> None:
    name = tokenizer.token_text(token)
    assert tokenizer.encode(name, special=True) == [token], f"{name!r} is not found as a special token"
    assert tokenizer.encode(name) != [token], f"{name!r} is a special token where none is asked for"
    assert tokenizer.decode([token]) == name, f"{name!r} is not shown"
    assert tokenizer.decode([token], special=False) == "", f"{name!r} is shown where specials are left out"


def _refuses(method: Callable[[Any], object], argument: Any) -> bool:
    try:
        method(argument)
    except TokenizerError:
        return True
    return False
