"""Plain text: one stream of tokens cut into windows of the context length; every token is trained.

A window begins with the last token of the one before it, as context only, so every token of the stream but
the first is trained exactly once. The last window may be short. BOS (and EOS) stand at the ends of the
stream where the model asks for them. Text is text: names of special tokens in it are not special.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrograd_hookspecs import (
    AuditFinding,
    BuildContext,
    Component,
    DataError,
    Dataset,
    NoConfig,
    Problem,
    TokenExample,
    Tokenizer,
    TokenizerError,
    hookimpl,
)


class TextDataset:
    """Reads a UTF-8 text file."""

    turns = False

    def findings(self) -> Sequence[AuditFinding]:
        """Text has no template."""
        return ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._notes: list[str] = []

    def load(self, path: Path, *, ctx: int) -> Sequence[TokenExample]:
        """Windows of at most `ctx` tokens in order; their origin is the line on which they begin.

        Raises: `DataError` if the file cannot be read, is not UTF-8, or holds fewer than two tokens.
        """
        import numpy as np

        if ctx < 2:
            raise _refused(str(path), f"training.ctx is {ctx}: a window needs at least 2 tokens")
        text = _read(path)
        try:
            ids = self._tokenizer.encode(text, bos=True)
        except TokenizerError as error:
            raise _refused(str(path), f"the tokenizer cannot write it: {error}") from error
        if self._tokenizer.adds_eos and self._tokenizer.eos_id is not None:
            ids.append(self._tokenizer.eos_id)
        if len(ids) < 2:
            raise _refused(str(path), f"holds {len(ids)} tokens: there is nothing to train on")
        tokens = np.array(ids, np.int32)
        examples = []
        line = 1
        for start in range(0, len(ids) - 1, ctx - 1):
            window = tokens[start : start + ctx].copy()
            trained = np.ones(window.size, np.bool_)
            trained[0] = False
            examples.append(TokenExample(tokens=window, trained=trained, origin=f"{path}:{line}"))
            line += self._tokenizer.decode_bytes(ids[start : start + ctx - 1]).count(b"\n")
        self._notes = [
            f"{len(ids)} tokens in {len(examples)} windows of up to {ctx};"
            f" {sum(int(e.trained.sum()) for e in examples)} are trained",
            *self._names_of_special_tokens(text),
        ]
        return examples

    def notes(self) -> Sequence[str]:
        """Counts, and names of special tokens in the text; filled by `load`."""
        return list(self._notes)

    def _names_of_special_tokens(self, text: str) -> list[str]:
        special = {*self._tokenizer.stop_ids, self._tokenizer.bos_id} - {None}
        names = {self._tokenizer.token_text(i) for i in special if i is not None}
        return [
            f"the text holds {name!r} {text.count(name)} times; it is trained as text, not as that token"
            for name in sorted(names)
            if name and name in text
        ]


def _read(path: Path) -> str:
    from retrograd.records import read_bytes

    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _refused(
            f"{path}:{line}", f"byte 0x{data[error.start]:02X} is not UTF-8", "save the file as UTF-8"
        ) from None


def _refused(where: str, message: str, hint: str = "") -> DataError:
    return DataError([Problem(where=where, message=message, hint=hint)])


def _build(config: NoConfig, context: BuildContext) -> Dataset:
    return TextDataset(context.service("tokenizer"))


@hookimpl
def retrograd_datasets() -> list[Component[NoConfig, Dataset]]:
    """`text`."""
    return [
        Component(
            name="text",
            config=NoConfig,
            build=_build,
            summary="Plain text in windows of the context length; every token is trained.",
            needs=("tokenizer",),
        )
    ]
