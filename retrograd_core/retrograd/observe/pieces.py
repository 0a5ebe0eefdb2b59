"""The text of each token of a sequence."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import cache

from retrograd_hookspecs import Tokenizer

Decode = Callable[[Sequence[int]], list[str]]
"""Token ids to one text a token."""


def piece_decoder(tokenizer: Tokenizer) -> Decode:
    """A function from token ids to their texts, which join to the text of the whole.

    A character whose bytes lie in several tokens is in the text of the token that completes it; the texts of
    the others are empty. Bytes that are not UTF-8 become U+FFFD.
    """

    @cache
    def token_bytes(token_id: int) -> bytes:
        # A tokenizer may take a space off the first token of a text, so look at what follows one.
        return tokenizer.decode_bytes([token_id, token_id])[len(tokenizer.decode_bytes([token_id])) :]

    def decode(ids: Sequence[int]) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        texts = [decoder.decode(token_bytes(int(token_id))) for token_id in ids]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    return decode
