"""The vocabulary of a GGUF as llama.cpp understands it: kinds of tokens, special ids, what ends a turn.

Source: llama.cpp v0.5.0, `llama_vocab`. It corrects some kinds by a token's text; so does this, because
the kind decides which texts become special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrograd_hookspecs import TokenizerError

# Bits, as a token may be of a declared kind and control by its text.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE, OTHER = 1, 2, 4, 8, 16, 32
_KINDS = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 6: BYTE}

_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
_END_OF_GENERATION = (
    *_END_OF_TURN,
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
)
# Fill-in-the-middle tokens count as control; padding, repository and file separator also end a generation.
_FILL_IN = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>"),
        *("<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>"),
        *("<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>"),
        *("<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_FILL_IN_ENDS = ("fim_pad", "fim_rep", "fim_sep")
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_C_SPACES = " \t\n\v\f\r"


class Vocabulary:
    """Tokens with their kinds and roles.

    `bos` and `eos` are the ids that the tokenizer model takes where the file names none; `adds_bos` and
    `adds_eos` its defaults. Raises `TokenizerError` for metadata that llama.cpp would refuse, too.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        *,
        bos: int | None,
        eos: int | None,
        adds_bos: bool,
        adds_eos: bool = False,
    ) -> None:
        self._metadata = metadata
        self.tokens: list[str] = list(self._list("tokens"))
        # llama.cpp gives empty entries a name, so that no two are equal.
        names = [text or f"[EMPTY_{token}]" for token, text in enumerate(self.tokens)]
        self.ids: dict[str, int] = dict(zip(names, range(len(names)), strict=True))
        if len(self.ids) != len(names):
            first = next(token for token, text in enumerate(names) if self.ids[text] != token)
            raise TokenizerError(
                f"tokenizer.ggml.tokens holds {names[first]!r} twice, at {first} and"
                f" {self.ids[names[first]]}: the file is damaged or was written by a broken converter"
            )
        kinds = metadata.get("tokenizer.ggml.token_type")
        self.kinds: list[int] = (
            [NORMAL] * len(names)
            if kinds is None
            else [_KINDS.get(int(kind), OTHER) for kind in self._sized("token_type", kinds)]
        )
        self.bos_id = self._id("bos", bos)
        self.eos_id = self._id("eos", eos)
        self.adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
        self.adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", adds_eos))
        for role, wanted, token_id in (
            ("bos", self.adds_bos, self.bos_id),
            ("eos", self.adds_eos, self.eos_id),
        ):
            if wanted and token_id is None:
                raise TokenizerError(
                    f"tokenizer.ggml.add_{role}_token is true, but tokenizer.ggml.{role}_token_id is not set"
                )
        self.stop_ids = self._stop_ids()
        self._special = SpecialTokens(self, UNKNOWN | CONTROL | USER_DEFINED)
        self._user_defined = SpecialTokens(self, USER_DEFINED)

    def scores(self) -> list[float]:
        """`tokenizer.ggml.scores`; zeros where the file has none."""
        scores = self._metadata.get("tokenizer.ggml.scores")
        if scores is None:
            return [0.0] * len(self.tokens)
        return [float(score) for score in self._sized("scores", scores)]

    def is_special(self, token_id: int) -> bool:
        """True for control and unknown tokens, which `special=False` leaves out of texts."""
        return bool(self.kinds[token_id] & (CONTROL | UNKNOWN))

    def fragments(self, text: str, special: bool) -> list[str | int]:
        """The text cut at special tokens. Those the user of the vocabulary defined are always found, control
        and unknown tokens only with `special`."""
        return (self._special if special else self._user_defined).cut(text)

    def _list(self, key: str) -> Sequence[Any]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None or isinstance(value, str) or not len(value):
            raise TokenizerError(
                f"the model has no tokenizer.ggml.{key}: it holds no vocabulary to tokenise with"
            )
        return value  # type: ignore[no-any-return]

    def _sized(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        if len(values) < len(self.tokens):
            raise TokenizerError(
                f"tokenizer.ggml.{key} has {len(values)} entries for {len(self.tokens)} tokens;"
                " the file is damaged"
            )
        return values[: len(self.tokens)]

    def _id(self, role: str, default: int | None = None) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        value = self._metadata.get(key)
        if value is None:
            return default if default is not None and default < len(self.tokens) else None
        if not 0 <= int(value) < len(self.tokens):
            raise TokenizerError(f"{key} = {value} is outside the vocabulary of {len(self.tokens)} tokens")
        return int(value)

    def _stop_ids(self) -> frozenset[int]:
        """End-of-generation tokens, from the declared ids and from the texts of well-known ones."""
        kinds = self.kinds
        stops: set[int] = set()
        for role, texts in {"eot": _END_OF_TURN, "eom": ("<|eom_id|>",), **_FILL_IN}.items():
            token_id = self._id(role)
            if token_id is None:
                # Which of several llama.cpp picks depends on its hash table; the first is as good.
                token_id = min((self.ids[text] for text in texts if text in self.ids), default=None)
                if token_id is not None:
                    kinds[token_id] |= CONTROL
            if token_id is not None and role in ("eot", "eom", *_FILL_IN_ENDS):
                stops.add(token_id)
        for text in _END_OF_GENERATION:
            if text in self.ids:
                stops.add(self.ids[text])
                kinds[self.ids[text]] |= CONTROL
        for text in _ALWAYS_SHOWN:
            if text in self.ids:
                kinds[self.ids[text]] = USER_DEFINED
        if self.eos_id is not None:
            stops.add(self.eos_id)
        stopping = {self.tokens[token_id] for token_id in stops}
        # Formats where <|end|> closes a message within a turn (gpt-oss, Solar), and where </s> is a tag.
        calls = bool({"<|call|>", "<|calls|>"} & stopping)
        if "<|end|>" in stopping and (
            ("<|return|>" in stopping and calls) or ("<|flush|>" in stopping and calls)
        ):
            self._unstop(stops, "<|end|>", USER_DEFINED)
        if "<|tool_response>" in stopping and "</s>" in stopping:
            self._unstop(stops, "</s>", NORMAL)
        return frozenset(stops)

    def _unstop(self, stops: set[int], text: str, kind: int) -> None:
        stops.discard(self.ids[text])
        self.kinds[self.ids[text]] = kind

    def strips(self) -> tuple[frozenset[int], frozenset[int]]:
        """Special tokens that swallow the white space before and after them; by model, as no GGUF says so."""
        pre = str(self._metadata.get("tokenizer.ggml.pre", ""))
        name = str(self._metadata.get("general.name", "")).lower()
        none: frozenset[int] = frozenset()
        if any(family in pre for family in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
            return self._named("<mask>"), none
        if "phi-3" in name or "phi3" in name:
            every = frozenset(
                token for token, kind in enumerate(self.kinds) if kind & (CONTROL | UNKNOWN | USER_DEFINED)
            )
            return none, (every | self._named("</s>")) - self._named("<unk>", "<s>", "<|endoftext|>")
        if "modern-bert" in name:
            return self._named("[MASK]"), none
        return none, none

    def _named(self, *texts: str) -> frozenset[int]:
        return frozenset(self.ids[text] for text in texts if text in self.ids)


class SpecialTokens:
    """Finds the special tokens of some kinds in a text: longest first, each everywhere."""

    def __init__(self, vocabulary: Vocabulary, kinds: int) -> None:
        hidden = (CONTROL | UNKNOWN) & ~kinds
        self._ids = {
            text: token_id
            for text, token_id in vocabulary.ids.items()
            if vocabulary.kinds[token_id] & kinds and not vocabulary.kinds[token_id] & hidden
        }
        self._texts = {token_id: text for text, token_id in self._ids.items()}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes) for first, sizes in lengths.items()}
        self._starts = re.compile("[" + "".join(map(re.escape, lengths)) + "]") if lengths else None
        self._strip_before, self._strip_after = vocabulary.strips()

    def cut(self, text: str) -> list[str | int]:
        """Texts and token ids in order."""
        fragments: list[str | int] = [text] if text else []
        for token_id in self._present(text):
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                else:
                    self._cut_at(fragment, token_id, cut)
            fragments = cut
        return fragments

    def _present(self, text: str) -> list[int]:
        """The tokens that occur in the text, in the order in which they are cut out."""
        if self._starts is None:
            return []
        found: set[int] = set()
        for match in self._starts.finditer(text):
            start = match.start()
            for length in self._lengths[match.group()]:
                token_id = self._ids.get(text[start : start + length])
                if token_id is not None:
                    found.add(token_id)
        return sorted(found, key=lambda token_id: (-len(self._texts[token_id].encode()), token_id))

    def _cut_at(self, text: str, token_id: int, out: list[str | int]) -> None:
        token = self._texts[token_id]
        start = 0
        while (found := text.find(token, start)) >= 0:
            before = text[start:found]
            if token_id in self._strip_before:
                before = before.rstrip(_C_SPACES)
            if before:
                out.append(before)
            out.append(token_id)
            start = found + len(token)
            if token_id in self._strip_after:
                start = len(text) - len(text[start:].lstrip(_C_SPACES))
        if start < len(text):
            out.append(text[start:])
