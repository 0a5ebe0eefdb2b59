"""Constrained decoding with llguidance: an Earley parser over lexemes that are derivatives of expressions.

The vocabulary is given as texts: a special token is the bytes that it is decoded to, as the chat formats read
it, so a grammar needs not know how a tag is tokenised. Stop tokens have no text; they are allowed where the
grammar accepts. Any tokenisation of a text is allowed.

Source: llguidance, https://github.com/guidance-ai/llguidance (docs/syntax.md, docs/json_schema.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrograd.token_pieces import bytes_behind
from retrograd_hookspecs import (
    BuildContext,
    Component,
    GrammarEngine,
    NoConfig,
    RolloutError,
    TokenConstraint,
    Tokenizer,
    hookimpl,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MARK = b"\xff"
"""What llguidance begins special tokens with; in texts another byte that no UTF-8 has stands for it."""
_END = b"<|end|>"


class _Vocabulary:
    """What `llguidance.TokenizerWrapper` asks for. The last token ends a text; it is none of the model's."""

    bos_token_id = None

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.tokens = [*texts, _END]
        self.eos_token_id = len(texts)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        """Only asked for grammars that force tokens; those here do not."""
        raise RolloutError("a grammar of constrained decoding must not force tokens: set no_forcing")


class LlguidanceEngine:
    """Implements `retrograd_hookspecs.GrammarEngine` for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        texts = [_text(tokenizer, token) for token in range(tokenizer.vocabulary_size)]
        self._readable = np.array([bool(text) for text in texts])
        self._stops = np.array(sorted(tokenizer.stop_ids), np.int64)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(texts)))

    def compile(self, grammar: str) -> Callable[[], TokenConstraint]:
        """Makers of constraints. Raises `RolloutError` for what llguidance cannot read or hold."""
        from llguidance import LLMatcher

        options = '%llguidance { "no_forcing": true }\n'
        first = LLMatcher(self._tokenizer, options + grammar, log_level=0)
        if first.is_error():
            raise RolloutError(_reason(first))
        return lambda: LlguidanceConstraint(first.deep_copy(), self._readable, self._stops)


class LlguidanceConstraint:
    """Implements `retrograd_hookspecs.TokenConstraint`: one text in the making.

    Args:
        readable: bool (V,), True for tokens with a text.
        stops: ids of stop tokens.
    """

    def __init__(self, matcher: LLMatcher, readable: npt.NDArray[np.bool_], stops: Any) -> None:
        self.problem = ""
        self._matcher = matcher
        self._readable = readable
        self._stops = stops

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """The mask of the next token; None where every text may follow, and the end."""
        if self.problem:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._readable.size, bitorder="little").astype(np.bool_)
        ends = self._matcher.is_accepting()
        if self._failed():
            return None
        if ends and np.array_equal(mask, self._readable):
            return None
        mask[self._stops] = ends
        if not mask.any():
            self.problem = "the grammar lets no token of the vocabulary follow"
            return None
        return mask

    def advance(self, token: int) -> None:
        """A token without text, stop tokens among them, changes nothing."""
        if not self.problem and self._readable[token]:
            self._matcher.consume_token(token)
            self._failed()

    def _failed(self) -> bool:
        if self._matcher.is_error():
            self.problem = _reason(self._matcher)
        return bool(self.problem)


def _text(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token in the midst of a text, none for a stop token."""
    if token in tokenizer.stop_ids:
        return b""
    return bytes_behind(tokenizer, token, [token]).replace(_MARK, b"\xfe")


def _reason(matcher: LLMatcher) -> str:
    """The first line of an error, without the state of the parser."""
    return matcher.get_error().partition("\n")[0].strip()


def _build(config: NoConfig, context: BuildContext) -> GrammarEngine:
    return LlguidanceEngine(context.service("tokenizer"))


@hookimpl
def retrograd_constraints() -> list[Component[NoConfig, GrammarEngine]]:
    """`llguidance`."""
    return [
        Component(
            name="llguidance",
            config=NoConfig,
            build=_build,
            summary="Grammars of tool calls, with llguidance.",
            source="https://github.com/guidance-ai/llguidance",
            needs=("tokenizer",),
            extra="constrained",
            requires=("llguidance",),
        )
    ]
