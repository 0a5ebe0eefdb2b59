"""Contract of a dataset: `check_dataset(dataset, path)` raises `AssertionError` where it is broken."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from retrograd_hookspecs import DataError, Dataset


def check_dataset(dataset: Dataset, path: Path, *, bad_line: bytes, ctx: int = 4096) -> None:
    """Check what every dataset promises, on the well-formed file `path`.

    Loading is repeatable; arrays have the documented types, something is trained in each example and never
    its first token; nothing is longer than `ctx`; `bad_line`, put after the file's own lines, is refused with
    its number; a missing file is refused.
    """
    examples = dataset.load(path, ctx=ctx)
    assert examples, "no examples in a well-formed file"
    for example in examples:
        assert example.tokens.dtype == np.int32
        assert example.tokens.ndim == 1
        assert example.trained.dtype == np.bool_
        assert example.trained.shape == example.tokens.shape
        assert 2 <= example.tokens.size <= ctx
        assert not example.trained[0], f"{example.origin}: the first token has nothing to be predicted from"
        assert example.trained.any(), f"{example.origin}: nothing is trained"
        assert re.fullmatch(re.escape(str(path)) + r":\d+", example.origin), example.origin
    assert dataset.notes(), "notes() tells the counts after load()"
    again = dataset.load(path, ctx=ctx)
    assert len(again) == len(examples), "loading twice gives other examples"
    for first, second in zip(examples, again, strict=True):
        assert np.array_equal(first.tokens, second.tokens)
        assert np.array_equal(first.trained, second.trained)
    _check_short_context(dataset, path)
    with TemporaryDirectory() as directory:
        bad = Path(directory) / path.name
        content = path.read_bytes()
        content += b"" if content.endswith(b"\n") else b"\n"
        bad.write_bytes(content + bad_line + b"\n")
        line = content.count(b"\n") + 1
        _refused(dataset, bad, f"{bad}:{line}")
        _refused(dataset, Path(directory) / "missing", str(Path(directory) / "missing"))


def _check_short_context(dataset: Dataset, path: Path) -> None:
    """With 2 tokens of context a dataset makes smaller examples or refuses; it never cuts silently."""
    error = _error_of(dataset, path, ctx=2)
    if error is not None:
        assert str(path) in str(error), f"the refusal does not name the file: {error}"
        return
    examples = dataset.load(path, ctx=2)
    assert all(example.tokens.size <= 2 for example in examples), "an example is longer than ctx"


def _refused(dataset: Dataset, path: Path, where: str) -> None:
    error = _error_of(dataset, path, ctx=4096)
    assert error is not None, f"{path} was accepted"
    assert any(problem.where == where for problem in error.problems), f"{where} is not named: {error}"


def _error_of(dataset: Dataset, path: Path, ctx: int) -> DataError | None:
    try:
        dataset.load(path, ctx=ctx)
    except DataError as error:
        return error
    return None
