"""How each `tokenizer.ggml.pre` family cuts text into words before byte-pair merging.

llama.cpp does not run the regexes of `tokenizer.json`: it runs adapted ones, one after the other, each
inside the pieces of the one before, with the C++ library's ECMAScript engine on text whose characters
outside ASCII have been replaced by their Unicode class. That differs visibly from an engine that knows
Unicode (U+0085, combining marks, characters newer than the engine), so the same is done here: an
expression with `\\p{…}` runs on the text of classes (`_unicode.CharacterClasses`), any other on the text.

Names and expressions are those of llama.cpp v0.5.0; the tests compare every family in `FAMILIES` with it.
Left out: `tiny_aya` and `cohere2moe`, whose expression looks ahead for a word boundary, which C++ libraries
do differently, so that llama.cpp's own tokens depend on its build; and vocabularies that are not byte-level
(`gemma4`, `sarvam-moe`, `whitespace`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import attrs

from retrograd_hookspecs import TokenizerError

from ._unicode import CLASS_MARKS, WHITE_SPACE, CharacterClasses

# ASCII members of each class, as the inside of a bracket expression.
_ASCII_MEMBERS = {
    "N": "0-9",
    "L": "A-Za-z",
    "P": r"!-#%-*,-/:-;?-@\[-\]_{}",
    "M": "",
    "S": r"$+<->\^`|~",
}
# llama.cpp knows general classes only, so every kind of letter is a letter.
_CLASS_NAMES = dict.fromkeys(("Lu", "Ll", "Lt", "Lm", "Lo"), "L") | {name: name for name in "LNPMS"}

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
_DIGITS3 = r"\p{N}{1,3}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = f"{_CONTRACTIONS}|{_WORD}|{_DIGITS3}|{_SYMBOLS}|{_LINES}"
_JAIS2 = (
    f"{_CONTRACTIONS}|{_WORD}|{_DIGITS3}|{_SYMBOLS}" + r"|\s*[\r\n]+|"
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}"
)
_QWEN2 = f"{_CONTRACTIONS}|{_WORD}|" + r"\p{N}" + f"|{_SYMBOLS}|{_LINES}"
_QWEN35 = (
    f"{_CONTRACTIONS}|" + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _LINES
)
_UFAKZEKA = f"{_WORD}|" + r"\p{N}" + f"|{_SYMBOLS}|{_LINES}"
_MINICPM5 = f"{_CONTRACTIONS}|{_WORD}|" + r"\p{N}+" + f"|{_SYMBOLS}|{_LINES}"
_SEED_CODER = f"{_CONTRACTIONS}|{_WORD}|" + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _LINES
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|" + f"{_WORD}|" + r"\p{N}" + f"|{_SYMBOLS}" + r"|\s*[\r\n]|"
) + _SPACES
_EXAONE_MOE = (
    f"{_CONTRACTIONS}|" + r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|" + _SPACES
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _LINES
)
_SPARK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+|[\r\n]|" + _SPACES
)


def _cased_words(marks: str, suffix: str) -> str:
    """Words with capitals first, then small letters; letters without case are both.

    Differs in writing from llama.cpp, which says "a letter, and not a-z" with a lookahead.
    """
    upper, lower = rf"[\p{{LetterNotLower}}{marks}]", rf"[\p{{LetterNotUpper}}{marks}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"


def _word_kinds(suffix: str) -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"


_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = _cased_words("", "") + r"|\p{N}" + f"|{_SYMBOLS_SLASH}|{_LINES}"
_GPT4O = _cased_words("", _CONTRACTIONS + "?") + f"|{_DIGITS3}|{_SYMBOLS_SLASH}|{_LINES}"
_GRANITE_MULTI = _cased_words(r"\p{M}", _CONTRACTIONS + "?") + f"|{_DIGITS3}|{_SYMBOLS_SLASH}|{_LINES}"
_YOUTU = _word_kinds(_CONTRACTIONS + "?") + r"|\p{N}" + f"|{_SYMBOLS_SLASH}|{_LINES}"
# Han is a subset of the letters here; llama.cpp has code instead of an expression for this family.
_KIMI = (
    r"\p{Han}+|[^\r\n\p{L}\p{N}]?\p{LetterNotHan}+(?:'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL]))?"
    f"|{_DIGITS3}|{_SYMBOLS}|{_LINES}"
)
# Groups of three digits from the right. As in llama.cpp, what precedes stays with the first group; the
# next expression separates it.
_AFMOE_DIGITS = r"[^\p{N}]*(?:\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3})"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_AFMOE_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
_DEEPSEEK_SYMBOLS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_YOUTU_ASIAN = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _CJK
)


@attrs.frozen(kw_only=True)
class PreFamily:
    """One value of `tokenizer.ggml.pre`: expressions in order, and what else the value implies."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a vocabulary entry becomes that token, whatever the merges say."""
    adds_bos: bool = False
    """Default of `tokenizer.ggml.add_bos_token`."""
    has_bos: bool = True
    """False where the family's default BOS is none."""


def _families() -> dict[str, PreFamily]:
    digit, digits = r"\p{N}", r"\p{N}+"
    symbols = r"[\p{P}\$\+<=>\^~\|]+"
    symbols_and_backtick = r"[\p{P}\$\+<=>\^~\|`]+"
    three_digits = "[0-9][0-9][0-9]"
    table: list[tuple[tuple[str, ...], PreFamily]] = [
        (("default",), PreFamily(expressions=(symbols, _GPT2, digits, three_digits))),
        (("falcon",), PreFamily(expressions=(symbols_and_backtick, _GPT2, three_digits))),
        (
            (
                *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum", "gigachat"),
                *("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code"),
                *("a.x-4.0", "roberta-bpe", "modern-bert", "granite-docling"),
            ),
            PreFamily(expressions=(_GPT2,)),
        ),
        (
            ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
            PreFamily(expressions=(digit, _GPT2)),
        ),
        (
            (
                *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
                *("lfm2", "jina-v5-nano"),
            ),
            PreFamily(expressions=(_LLAMA3,), ignore_merges=True, adds_bos=True),
        ),
        (("dbrx", "smaug-bpe"), PreFamily(expressions=(_LLAMA3,))),
        (("chatglm-bpe", "glm4"), PreFamily(expressions=(_LLAMA3,), has_bos=False)),
        (("jais-2",), PreFamily(expressions=(_JAIS2,))),
        (
            (
                *("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2"),
                *("solar-open", "kormo", "f2llmv2"),
            ),
            PreFamily(expressions=(_QWEN2,)),
        ),
        (("qwen35",), PreFamily(expressions=(_QWEN35,))),
        (("ufakzeka",), PreFamily(expressions=(_UFAKZEKA,))),
        (("minicpm5",), PreFamily(expressions=(_DIGITS3, _MINICPM5), ignore_merges=True)),
        (("laguna",), PreFamily(expressions=("[^\n]+|[\n]+", _QWEN2))),
        (("seed-coder",), PreFamily(expressions=(_SEED_CODER,))),
        (("bailingmoe", "bailingmoe2", "llada-moe"), PreFamily(expressions=(_BAILING,))),
        (("exaone-moe",), PreFamily(expressions=(_EXAONE_MOE,))),
        (
            ("deepseek-llm",),
            PreFamily(
                expressions=("[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_SYMBOLS, r"\s+$", _DEEPSEEK_CJK, digits)
            ),
        ),
        (
            ("deepseek-coder",),
            PreFamily(expressions=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, digit)),
        ),
        (
            ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
            PreFamily(expressions=(_DIGITS3, _CJK, _DEEPSEEK3)),
        ),
        (("spark2_5",), PreFamily(expressions=(_DIGITS3, _CJK, _SPARK, digit))),
        (("afmoe",), PreFamily(expressions=(_AFMOE_DIGITS, _AFMOE_ASIAN, _DEEPSEEK3))),
        (("youtu",), PreFamily(expressions=(_YOUTU_ASIAN, _YOUTU), ignore_merges=True)),
        (("kimi-k2",), PreFamily(expressions=(_KIMI,))),
        (("bloom", "poro-chat", "gpt3-finnish"), PreFamily(expressions=(_BLOOM,))),
        (("viking",), PreFamily(expressions=(_BLOOM, digit))),
        (("tekken",), PreFamily(expressions=(_TEKKEN,), ignore_merges=True, adds_bos=True)),
        (("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), PreFamily(expressions=(_GPT4O,))),
        (("granite-embed-multi-97m",), PreFamily(expressions=(_GRANITE_MULTI,), ignore_merges=True)),
        (("superbpe",), PreFamily(expressions=(digits, r"(?=(\d{3})+(?!\d))"))),
        (
            ("chameleon",),
            PreFamily(
                expressions=(
                    "<sentinel:[0-9]+>",
                    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                    "([\t\n]|    |  )",
                    digit,
                    r"[\p{P}!-/:-@\[-`{-~]",
                    _GPT2,
                ),
                adds_bos=True,
            ),
        ),
    ]
    return {name: family for names, family in table for name in names}


FAMILIES: Mapping[str, PreFamily] = _families()


def family(pre: str | None) -> PreFamily:
    """The family named by `tokenizer.ggml.pre`. Raises `TokenizerError` for an unknown name or none.

    llama.cpp takes "default" for a file without the key, and warns that quality suffers.
    """
    if not pre:
        raise TokenizerError(
            "the model has no tokenizer.ggml.pre, so how its text is cut into words is unknown: convert it"
            " again with a current llama.cpp, or set the key to the model's family"
        )
    try:
        return FAMILIES[pre]
    except KeyError:
        raise TokenizerError(
            f"tokenizer.ggml.pre = {pre!r} is not a pre-tokenizer that retrograd reproduces; with another one"
            f" it would train on tokens that llama.cpp does not read. Known: {', '.join(sorted(FAMILIES))}"
        ) from None


class PreTokenizer:
    """Cuts text into the words of one family."""

    def __init__(self, expressions: tuple[str, ...]) -> None:
        self._stages = [(_compile(expression), r"\p{" in expression) for expression in expressions]
        self._classes = CharacterClasses()

    def split(self, text: str) -> list[str]:
        """The words, in order; put together they are `text`."""
        if not text:
            return []
        if text.isascii():
            by_class = by_character = text
        else:
            by_class, by_character = text.translate(self._classes), text.translate(WHITE_SPACE)
        spans = [(0, len(text))]
        for regex, on_classes in self._stages:
            source = by_class if on_classes else by_character
            spans = [piece for span in spans for piece in _cut(regex, source, span)]
        return [text[start:end] for start, end in spans]


def _cut(regex: re.Pattern[str], source: str, span: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The matches inside a span and what lies between them; neither sees beyond the span."""
    start, end = span
    for match in regex.finditer(source, start, end):
        first, last = match.span()
        if first > start:
            yield start, first
        if last > first:
            yield first, last
        start = last
    if start < end:
        yield start, end


def _compile(expression: str) -> re.Pattern[str]:
    r"""The Python regex of an expression in llama.cpp's notation: `\p{L}` becomes a set of class marks."""
    parts: list[str] = []
    inside = False
    for token in re.findall(r"\\p\{\w+\}|\\.|.", expression, re.DOTALL):
        if token.startswith(r"\p{"):
            members = _members(token[3:-1])
            parts.append(members if inside else f"[{members}]")
            continue
        inside = token == "[" or (inside and token != "]")
        # ECMAScript's $ is the very end; Python's also stands before a last line feed.
        parts.append(r"\Z" if token == "$" and not inside else token)
    return re.compile("".join(parts), re.ASCII)


def _members(name: str) -> str:
    """What stands for a class inside a bracket expression: marks, and the members in ASCII."""
    letters = CLASS_MARKS["L"] + CLASS_MARKS["HL"]
    special = {
        "Han": CLASS_MARKS["HL"] + CLASS_MARKS["HO"],
        "LetterNotHan": CLASS_MARKS["L"] + _ASCII_MEMBERS["L"],
        "LetterNotLower": letters + "A-Z",
        "LetterNotUpper": letters + "a-z",
    }
    if name in special:
        return special[name]
    kind = _CLASS_NAMES[name]
    return (letters if kind == "L" else CLASS_MARKS[kind]) + _ASCII_MEMBERS[kind]
