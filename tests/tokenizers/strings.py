"""Random strings that tokenizers disagree on: scripts, marks, digits, white space, emoji, controls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_SPACES = "      \t\n\n\r\v\f\u0085\u00a0\u1680\u2003\u200a\u2028\u202f\u205f\u3000"
_NUMBERS = "0123456789" * 4 + "½²Ⅷ٣५௩〇㊿𝟘①"
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~" * 2 + "«»“”‘’—…。，、！？：；·¿§¶।۔؟،_‿"
_SYMBOLS = "€£¥©®™°±×÷∑√∞≠♠☃→│█"
_LETTERS = (
    *("abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "äöüßéèñçøåæœÿÑÉ"),
    *("абвгдеёжзАБВЯ", "αβγδεΑΒΩς", "אבגדהש", "ابتثجحمن", "हिन्दीकखगा", "ไทยกขคงจ"),
    *(
        "中文字漢字学習龥",
        "ひらがなカタカナー",
        "한국어가나다",
        "ĀāſıİKΩꝏ",
        "𐐀𐐨𝔘𝕌",
        "𠀀𪛖𫝀𬺰",
        "ᏣᎳᎩꭰ",
        "ǅǈʰˢªº",
    ),
    "\ua7d7\U0001df00\u0870\U00031350",
)
_MARKS = "\u0301\u0308\u0327\u20dd\u0483\u093f\u094d\u0e35\u3099\ufe0f\u0330"
_EMOJI = (
    *("😀", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f3f3\ufe0f\u200d\U0001f308"),
    *("🇺🇸", "1\ufe0f\u20e3", "\u2764\ufe0f", "\U0001f9d1\U0001f3ff\u200d\U0001f680", "\U0001fae8"),
)
_CONTROLS = "\x00\x01\x04\x06\x13\x16\x1b\x7f\u0080\u009f\u00ad\u200b\u200d\u200e\u2060\ufeff"
_UNUSUAL = _CONTROLS + "\ufffd\ue000\uffff\U000f0000"
_WORDS = (
    "'s",
    "'S",
    "'re",
    "'LL",
    "'vE",
    "'d",
    "'x",
    "don't",
    " the",
    " I'M",
    "camelCase",
    "HTTPServer",
    "_x1",
)
_CODE = (
    "def f(x):\n    return x\n",
    "for(;;){}\r\n",
    "a+=1;",
    "</p>\n",
    "IMGIMGABZ",
    "<sentinel:12>",
    "\n\n\n",
)
_SPECIAL = (
    "<|im_end|>",
    "<|im_start|>",
    "<s>",
    "</s>",
    "<bos>",
    "<eos>",
    "<unk>",
    "<tool>",
    "<tool>x",
    "  ",
    "ab<",
)


def random_strings(seed: int, count: int) -> list[str]:
    """`count` strings of up to some sixty characters, and a few long runs; no surrogates."""
    rng = random.Random(seed)
    makers: Sequence[Callable[[random.Random], str]] = (
        lambda r: _run(r, r.choice(_LETTERS), 8),
        lambda r: _run(r, r.choice(_LETTERS), 8),
        lambda r: " " + _run(r, r.choice(_LETTERS[:5]), 6),
        lambda r: _run(r, _NUMBERS, 9),
        lambda r: _run(r, _SPACES, 5),
        lambda r: r.choice(_SPACES) * r.randint(1, 6),
        lambda r: _run(r, _PUNCTUATION, 4),
        lambda r: _run(r, _SYMBOLS, 3),
        lambda r: r.choice(r.choice(_LETTERS)) + _run(r, _MARKS, 3),
        lambda r: r.choice(_EMOJI),
        lambda r: r.choice(_UNUSUAL),
        lambda r: r.choice(_WORDS),
        lambda r: r.choice(_CODE),
        lambda r: r.choice(_SPECIAL),
        lambda r: _any_character(r),
    )
    strings = ["".join(rng.choice(makers)(rng) for _ in range(rng.randint(1, 12))) for _ in range(count - 4)]
    return [*strings, " " * 1500 + "x", "7" * 130, "\t" * 70 + "\n", "ab" * 200]


def _run(rng: random.Random, characters: str, longest: int) -> str:
    return "".join(rng.choice(characters) for _ in range(rng.randint(1, longest)))


def _any_character(rng: random.Random) -> str:
    """Any code point but a surrogate, the planes with assigned characters more often."""
    code = rng.randrange(rng.choice((0x3100, 0x11000, 0x20000, 0x32400, 0x110000)))
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)
