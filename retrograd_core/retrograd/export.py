"""An adapter merged into its base: a GGUF that runs alone, and how far it is from base plus adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from retrograd_hookspecs import ConfigError, ModelError, Problem

from .answers import with_adapter
from .assembly import Assembly, assemble
from .config import Document
from .divergence import PROBE_TEXT, Divergence, divergence
from .gguf.adapter import read_adapter
from .gguf.merge import MergeFormat, merge_adapter
from .gguf.writer import atomic_file
from .ollama import modelfile as modelfile_text
from .progress import Reporter, size

MAX_COMPARED_TOKENS = 512
"""Tokens of the text that the two models are compared on."""


def export_model(
    document: Document,
    *,
    adapter: Path,
    out: Path,
    dtype: str,
    text: Path | None,
    compare: bool,
    modelfile: bool,
    reporter: Reporter,
) -> list[str]:
    """Write the merged model; returns lines for the user.

    Raises: `ConfigError` if a file is missing, `ModelError` if adapter and base do not fit or the result
    cannot be written.
    """
    probe = _read_text(text) if text else PROBE_TEXT
    tuned = assemble(with_adapter(document, adapter), algorithm=False)
    base = tuned.services.get("model_file")
    reporter.message(f"merging {adapter} into {base.path} as {dtype.upper()}")
    report = merge_adapter(base, read_adapter(adapter), out, dtype=cast(MergeFormat, dtype))
    lines = [f"wrote {report.path} ({size(report.bytes)}, {report.merged} matrices merged)"]
    lines += [f"note: {note}" for note in report.notes]
    if compare:
        merged = assemble(
            document.with_value("model.path", str(out.absolute()), where="--out"), algorithm=False
        )
        found = compare_models(tuned, merged, probe)
        lines.append(f"base with adapter against the merged file: {found}")
    if modelfile:
        path = out.with_name(f"{out.stem}.Modelfile")
        tokenizer = tuned.services.get("tokenizer")
        content = modelfile_text(
            base,
            out.name,
            num_ctx=base.get("context_length"),
            stops=[tokenizer.token_text(token) for token in sorted(tokenizer.stop_ids)],
            template=tuned.services.get("template"),
        )
        with atomic_file(path) as file:
            file.write(content.encode())
        lines.append(f"wrote {path}: `ollama create NAME -f {path}`")
    return lines


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError([Problem(where="--text", message=f"cannot read {path}: {reason}")]) from error


def compare_models(first: Assembly, second: Assembly, text: str) -> Divergence:
    """KL(first ‖ second) over the first tokens of a text."""
    tokens = first.services.get("tokenizer").encode(text, bos=True)[:MAX_COMPARED_TOKENS]
    if len(tokens) < 2:
        raise ModelError("the text to compare on has fewer than two tokens")
    ids = np.array(tokens, np.int32)
    logits: list[Any] = [np.array(side.services.get("engine").logits(ids)) for side in (first, second)]
    return divergence(*logits)
