"""What the tokenizers of all vocabulary kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from retrograd_hookspecs import TokenizerError

from ._vocabulary import Vocabulary

_CACHED_WORDS = 1 << 16


class VocabularyTokenizer(ABC):
    """Implements `retrograd_hookspecs.Tokenizer` over a `Vocabulary` and an encoding of plain text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.vocabulary_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.adds_bos = vocabulary.adds_bos
        self.adds_eos = vocabulary.adds_eos
        self.stop_ids = vocabulary.stop_ids
        self._pieces: dict[int, bytes] = {}
        self._words: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Token ids, as llama.cpp gives them. `special`: names of special tokens in the text become those
        tokens. `bos`: put BOS first where the model asks for it. EOS is never added; `adds_eos` tells of it.

        Raises `TokenizerError` for a lone surrogate, and for a character that this vocabulary cannot
        write, not even byte by byte.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text holds a lone surrogate, U+{ord(text[error.start]):04X} at character {error.start}:"
                " it is not valid Unicode; replace or remove it"
            ) from None
        ids: list[int] = []
        if bos and self.adds_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        first = True
        for fragment in self._vocabulary.fragments(text, special):
            if isinstance(fragment, int):
                ids.append(fragment)
                first = True
            else:
                self._encode_plain(fragment, first, ids)
                first = False
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Text; bytes that are not UTF-8 become U+FFFD. `special=False` leaves special tokens out."""
        return self.decode_bytes(ids, special=special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int], *, special: bool = True) -> bytes:
        """The exact bytes. `special=False` leaves control and unknown tokens out."""
        return b"".join([self._piece(token_id, special) for token_id in ids])

    def token_text(self, token_id: int) -> str:
        """The vocabulary entry as stored."""
        return self._vocabulary.tokens[self._checked(token_id)]

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocabulary_size:
            raise TokenizerError(
                f"token id {token_id} is outside the vocabulary of {self.vocabulary_size} tokens:"
                " the tokens belong to another model"
            )
        return token_id

    def _piece(self, token_id: int, special: bool) -> bytes:
        try:
            piece = self._pieces[token_id]
        except KeyError:
            piece = self._pieces[token_id] = self._decode_token(self._checked(token_id))
        return b"" if not special and self._vocabulary.is_special(token_id) else piece

    def _cached(self, word: str) -> tuple[int, ...]:
        """Ids of one word, remembered: a text repeats most of its words."""
        ids = self._words.get(word)
        if ids is None:
            ids = tuple(self._encode_word(word))
            if len(self._words) >= _CACHED_WORDS:
                self._words.clear()
            self._words[word] = ids
        return ids

    @abstractmethod
    def _encode_plain(self, text: str, first: bool, ids: list[int]) -> None:
        """Append the ids of text without special tokens; `first`: nothing or a special token is before it."""

    @abstractmethod
    def _encode_word(self, word: str) -> list[int]:
        """Ids of a part of the text whose neighbours do not matter."""

    @abstractmethod
    def _decode_token(self, token_id: int) -> bytes:
        """The bytes a token stands for."""
