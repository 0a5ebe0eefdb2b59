"""Asks stock llama.cpp for token ids, for any vocabulary: to record and to check expected values."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from retrograd.gguf.writer import TensorPlan, write_gguf

SCRIPT = Path(__file__).with_name("tokenize.mjs")
_WIDTH = 32
_NORMS = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
_PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@attrs.frozen(kw_only=True)
class StockTokens:
    """llama.cpp's answers: of the model, and for each string."""

    model: dict[str, Any]
    strings: list[dict[str, Any]]


def write_vocabulary_model(path: Path, vocabulary: Mapping[str, Any]) -> Path:
    """Write the smallest model that llama.cpp loads around the tokenizer metadata `vocabulary`."""
    count = len(vocabulary["tokenizer.ggml.tokens"])
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": _WIDTH,
        "llama.block_count": 1,
        "llama.feed_forward_length": _WIDTH,
        "llama.attention.head_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **vocabulary,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (count, _WIDTH)}
    shapes |= {name: (_WIDTH,) for name in _NORMS}
    shapes |= {f"blk.0.{name}": (_WIDTH, _WIDTH) for name in _PROJECTIONS}
    tensors = [
        (TensorPlan(name=f"{name}.weight", shape=shape, format="F32"), np.zeros(shape, np.float32))
        for name, shape in shapes.items()
    ]
    write_gguf(path, metadata, tensors)
    return path


def stock_tokens(node_directory: Path, model: Path, strings: Sequence[str], *, vocabulary_size: int = 0) -> StockTokens:
    """Tokenise `strings` with the llama.cpp installed in `node_directory` (see tokenize.mjs).

    `vocabulary_size`: how many ids to ask whether they end a generation.
    """
    lines = "".join(json.dumps(text) + "\n" for text in strings)
    done = subprocess.run(
        ["node", str(SCRIPT), str(model), str(vocabulary_size)],
        input=lines.encode(),
        stdout=subprocess.PIPE,
        cwd=node_directory,
        check=True,
    )
    head, *answers = (json.loads(line) for line in done.stdout.splitlines())
    if len(answers) != len(strings):
        raise RuntimeError(f"llama.cpp answered {len(answers)} of {len(strings)} strings for {model}")
    return StockTokens(model=head, strings=answers)
