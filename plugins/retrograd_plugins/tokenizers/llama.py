"""SentencePiece as llama.cpp runs it (`tokenizer.ggml.model = "llama"`): Llama 2, Mistral, Gemma, Phi 3, …

Neighbouring pieces are merged while their concatenation is a vocabulary entry, the entry with the highest
score first, the leftmost of equals; characters that are no entry are written as bytes `<0xNN>`.

Source: Kudo and Richardson 2018 (SentencePiece, BPE model type); llama.cpp v0.5.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add
from typing import Any

from retrograd_hookspecs import BuildContext, Component, NoConfig, TokenizerError, hookimpl

from ._base import VocabularyTokenizer
from ._merging import merge_symbols
from ._vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary

_SPACE = "\u2581"


class LlamaTokenizer(VocabularyTokenizer):
    """SentencePiece from the metadata of a GGUF (`tokenizer.ggml.*`).

    `tokenizer.ggml.remove_extra_whitespaces` has no effect, as in llama.cpp, which reads it for unigram
    models only. Raises `TokenizerError` for a damaged vocabulary.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(Vocabulary(metadata, bos=1, eos=2, adds_bos=True))
        self._space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        # llama.cpp compares the file's float32 scores; lower ranks merge first.
        self._ranks = {
            text: -score for text, score in zip(self._vocabulary.ids, self._vocabulary.scores(), strict=True)
        }
        self._inner_pairs: set[str] = set()
        for text in self._vocabulary.ids:
            self._inner_pairs.update(map(add, text, text[1:]))

    def decode_bytes(self, ids: Sequence[int], *, special: bool = True) -> bytes:
        """The exact bytes, but for the space that `encode` puts before a text where the model asks for it:
        it is taken off the first token, as llama.cpp does. `special=False` leaves special tokens out."""
        if not (self._space_prefix and ids):
            return super().decode_bytes(ids, special=special)
        return self._piece(ids[0], special).removeprefix(b" ") + super().decode_bytes(
            ids[1:], special=special
        )

    def _encode_plain(self, text: str, first: bool, ids: list[int]) -> None:
        if self._space_prefix and first:
            text = " " + text
        text = text.replace(" ", _SPACE)
        # No piece holds two characters that are neighbours in no vocabulary entry, so nothing ever merges
        # across such a place, and the parts can be encoded, and remembered, one by one.
        inner = self._inner_pairs
        start = 0
        for place, pair in enumerate(map(add, text, text[1:]), 1):
            if pair not in inner:
                ids.extend(self._cached(text[start:place]))
                start = place
        ids.extend(self._cached(text[start:]))

    def _encode_word(self, word: str) -> list[int]:
        vocabulary = self._vocabulary.ids
        ids: list[int] = []
        for piece in merge_symbols(list(word), self._rank):
            if piece in vocabulary:
                ids.append(vocabulary[piece])
            else:
                ids.extend(self._byte_id(byte, piece) for byte in piece.encode())
        return ids

    def _byte_id(self, byte: int, character: str) -> int:
        try:
            return self._vocabulary.ids[f"<0x{byte:02X}>"]
        except KeyError:
            raise TokenizerError(
                f"the vocabulary has neither {character!r} nor the byte token <0x{byte:02X}>:"
                " this text cannot be written with it"
            ) from None

    def _rank(self, left: str, right: str) -> float | None:
        return self._ranks.get(left + right)

    def _decode_token(self, token_id: int) -> bytes:
        text, kind = self._vocabulary.tokens[token_id], self._vocabulary.kinds[token_id]
        if kind & (CONTROL | UNKNOWN | USER_DEFINED):
            return text.encode()
        if kind & NORMAL:
            return text.replace(_SPACE, " ").encode()
        return bytes([int(text[3:5], 16)]) if kind & BYTE else b""


def build(config: NoConfig, context: BuildContext) -> LlamaTokenizer:
    return LlamaTokenizer(context.service("model_file").metadata)


@hookimpl
def retrograd_tokenizers() -> list[Component[NoConfig, LlamaTokenizer]]:
    return [
        Component(
            name="llama",
            config=NoConfig,
            build=build,
            summary="SentencePiece with scores and byte fallback",
            source="Kudo and Richardson 2018; llama.cpp v0.5.0",
            needs=("model_file",),
        )
    ]
