"""Tokens of a conversation piece by piece, as a rollout produces them.

A rollout tokenises the prompt, appends the tokens that the model samples, and tokenises only the framing
that follows. So tokens never merge across the ends of a turn, and a piece must be encoded as if it
followed what is there already.

Names of special tokens in the text become those tokens everywhere, in a message's content too: that is how
llama.cpp treats a rendered prompt, and templates and tool calls depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from retrograd_hookspecs import Tokenizer

_ANCHORS = ("\n", ":", "a", "]", "1")
"""Texts that a piece may be glued to while it is encoded; one that does not merge with it is used."""


@attrs.frozen(kw_only=True)
class Stop:
    """Where a turn ends in a text: characters [start, stop) are the text of token `token_id`."""

    start: int
    stop: int
    token_id: int


def text_behind(tokenizer: Tokenizer, previous: int | None, ids: Sequence[int]) -> str:
    """The text of tokens in the midst of a text, bytes that are not UTF-8 as U+FFFD."""
    return bytes_behind(tokenizer, previous, ids).decode("utf-8", "replace")


def bytes_behind(tokenizer: Tokenizer, previous: int | None, ids: Sequence[int]) -> bytes:
    """The bytes of tokens in the midst of a text: decoded alone, the first token of a text may lose the space
    that SentencePiece puts before texts."""
    if previous is None:
        return tokenizer.decode_bytes(ids)
    return tokenizer.decode_bytes([previous, *ids])[len(tokenizer.decode_bytes([previous])) :]


class PieceEncoder:
    """Encodes pieces of a conversation with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = {tokenizer.token_text(token_id): token_id for token_id in sorted(tokenizer.stop_ids)}
        self.stop_texts = {
            text: token_id
            for text, token_id in texts.items()
            if text and tokenizer.encode(text, special=True) == [token_id]
        }
        """Text of each stop token that a text can spell, with its id."""
        # SentencePiece vocabularies may put a space before a text; no other token of "a" starts with ▁.
        first = tokenizer.encode("a")[:1]
        self._puts_space_first = bool(first) and tokenizer.token_text(first[0]).startswith("\u2581")

    def prompt(self, text: str) -> list[int]:
        """Tokens of the start of a conversation, with exactly one BOS where the model asks for one.

        The template and the tokenizer may both want to write it; the template's counts.
        """
        ids = self._tokenizer.encode(text, special=True)
        bos = self._tokenizer.bos_id
        if self._tokenizer.adds_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def turn(self, text: str, previous: Sequence[int]) -> list[int]:
        """Tokens of sampled text that follows the tokens `previous`."""
        if not text:
            return []
        if not self._puts_space_first or not previous:
            return self._tokenizer.encode(text, special=True)
        # The tokenizer would put a space at the start of the piece, which is not there in a rollout: encode
        # it behind what precedes it, or else behind something that it does not merge with.
        for anchor in (self._tokenizer.decode(previous[-1:]), *_ANCHORS):
            head = self._tokenizer.encode(anchor, special=True)
            ids = self._tokenizer.encode(anchor + text, special=True)
            if ids[: len(head)] == head:
                return ids[len(head) :]
        return self._tokenizer.encode(text, special=True)

    def framing(self, text: str, stop_text: str) -> list[int]:
        """Tokens of the template's text that follows the stop token spelled `stop_text`."""
        # Encoded with the stop token before it, so that white space which that token swallows goes.
        ids = self._tokenizer.encode(stop_text + text, special=True)
        if ids[:1] == [self.stop_texts[stop_text]]:
            return ids[1:]
        return self._tokenizer.encode(text, special=True)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        return self._tokenizer.stop_ids

    def text(self, ids: Sequence[int], previous: int | None) -> str:
        """The text of sampled tokens that follow the token `previous`; see `text_behind`."""
        return text_behind(self._tokenizer, previous, ids)

    def find_stop(self, text: str) -> Stop | None:
        """The first stop token in `text`; of two at one place the longer."""
        best: Stop | None = None
        for stop_text, token_id in self.stop_texts.items():
            start = text.find(stop_text)
            if start < 0:
                continue
            found = Stop(start=start, stop=start + len(stop_text), token_id=token_id)
            if best is None or (found.start, -found.stop) < (best.start, -best.stop):
                best = found
        return best

    def special_text_in(self, text: str) -> str:
        """A stop token's or BOS's text that occurs in `text`, else ""."""
        stop = self.find_stop(text)
        if stop is not None:
            return text[stop.start : stop.stop]
        bos = self._tokenizer.bos_id
        if bos is not None and (name := self._tokenizer.token_text(bos)) and name in text:
            return name
        return ""
