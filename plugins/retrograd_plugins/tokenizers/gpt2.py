"""Byte-level byte-pair encoding (`tokenizer.ggml.model = "gpt2"`): Llama 3, Qwen, SmolLM, Mistral's tekken, …

Source: Radford et al. 2019, section 2.2 (byte-level BPE); Sennrich et al. 2016, section 3.2 (merging);
pre-tokenizers and corner cases as in llama.cpp v0.5.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd_hookspecs import BuildContext, Component, NoConfig, TokenizerError, hookimpl

from ._base import VocabularyTokenizer
from ._merging import merge_symbols
from ._pretokenizers import PreTokenizer, family
from ._vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary

_DEFAULT_BOS_AND_EOS = 11


class Gpt2Tokenizer(VocabularyTokenizer):
    """Byte-level BPE from the metadata of a GGUF (`tokenizer.ggml.*`).

    Deviation from llama.cpp: `decode` never removes spaces before punctuation (its
    `clean_up_tokenization_spaces`), because the exact text of a sampled turn is needed.

    Raises `TokenizerError` for an unknown `tokenizer.ggml.pre`, missing merges, or a damaged vocabulary.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        pre = family(metadata.get("tokenizer.ggml.pre"))
        merges = metadata.get("tokenizer.ggml.merges")
        if merges is None:
            raise TokenizerError(
                "the model has no tokenizer.ggml.merges, which byte-pair encoding needs: convert it again"
            )
        default = _DEFAULT_BOS_AND_EOS
        super().__init__(
            Vocabulary(metadata, bos=default if pre.has_bos else None, eos=default, adds_bos=pre.adds_bos)
        )
        # "left right"; of a merge that is listed twice the first counts.
        self._ranks = {str(merge): rank for rank, merge in reversed(list(enumerate(merges)))}
        self._ignore_merges = pre.ignore_merges
        self._pre_tokenizer = PreTokenizer(pre.expressions)
        symbols = byte_symbols()
        self._symbols = str.maketrans(dict(enumerate(symbols)))
        self._bytes = {symbol: byte for byte, symbol in enumerate(symbols)}

    def _encode_plain(self, text: str, first: bool, ids: list[int]) -> None:
        for word in self._pre_tokenizer.split(text):
            ids.extend(self._cached(word))

    def _encode_word(self, word: str) -> list[int]:
        vocabulary = self._vocabulary.ids
        symbols = word.encode().decode("latin-1").translate(self._symbols)
        if self._ignore_merges and symbols in vocabulary:
            return [vocabulary[symbols]]
        ids: list[int] = []
        for symbol in merge_symbols(list(symbols), self._rank):
            if symbol in vocabulary:
                ids.append(vocabulary[symbol])
            else:
                # As in llama.cpp, bytes that the vocabulary lacks stay out: SmolLM2 has no token for some.
                ids.extend(vocabulary[part] for part in symbol if part.isascii() and part in vocabulary)
        return ids

    def _rank(self, left: str, right: str) -> int | None:
        return self._ranks.get(f"{left} {right}")

    def _decode_token(self, token_id: int) -> bytes:
        text, kind = self._vocabulary.tokens[token_id], self._vocabulary.kinds[token_id]
        if kind & (CONTROL | UNKNOWN | USER_DEFINED):
            return text.encode()
        if kind & NORMAL:
            # A character that stands for no byte can only be meant literally.
            return b"".join(
                bytes([self._bytes[symbol]]) if symbol in self._bytes else symbol.encode() for symbol in text
            )
        return bytes([int(text[3:5], 16)]) if kind & BYTE else b""


def byte_symbols() -> list[str]:
    """The printable character for each byte: itself where Latin-1 shows it, else the next one from U+0100."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in shown)
    moved = {byte: chr(0x100 + index) for index, byte in enumerate(hidden)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]


def build(config: NoConfig, context: BuildContext) -> Gpt2Tokenizer:
    return Gpt2Tokenizer(context.service("model_file").metadata)


@hookimpl
def retrograd_tokenizers() -> list[Component[NoConfig, Gpt2Tokenizer]]:
    return [
        Component(
            name="gpt2",
            config=NoConfig,
            build=build,
            summary="Byte-level byte-pair encoding with the pre-tokenizers that llama.cpp knows",
            source="Radford et al. 2019, section 2.2; Sennrich et al. 2016, section 3.2; llama.cpp v0.5.0",
            needs=("model_file",),
        )
    ]
