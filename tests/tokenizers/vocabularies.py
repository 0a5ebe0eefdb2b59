"""Vocabularies made for comparisons with llama.cpp, and the smallest model it loads around one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from retrograd.gguf.writer import TensorPlan, write_gguf
from retrograd_plugins.tokenizers.gpt2 import byte_symbols

_WIDTH = 32
_NORMS = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
_PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
SPECIALS = ("<s>", "<|im_start|>", "<|im_end|>", "<unk>", "<tool>", "<tool>x", "  ", "\n\n")
"""Control tokens, then from the fifth on user-defined ones; some contain or follow on others."""


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
    shapes |= dict.fromkeys(_NORMS, (_WIDTH,))
    shapes |= {f"blk.0.{name}": (_WIDTH, _WIDTH) for name in _PROJECTIONS}
    tensors = [
        (TensorPlan(name=f"{name}.weight", shape=shape, format="F16"), np.zeros(shape, np.float16))
        if len(shape) > 1
        else (TensorPlan(name=f"{name}.weight", shape=shape, format="F32"), np.zeros(shape, np.float32))
        for name, shape in shapes.items()
    ]
    write_gguf(path, metadata, tensors)
    return path


def pairs_vocabulary(pre: str = "default", *, bytes_missing: frozenset[int] = frozenset()) -> dict[str, Any]:
    """A byte-level BPE that shows where words end: one pair of bytes in five merges, in random order.

    Some triples merge, too, so that merges follow on merges; tokens of `bytes_missing` are left out.
    """
    rng = random.Random(0)
    symbols = byte_symbols()
    pairs = rng.sample([(left, right) for left in symbols for right in symbols], 13_000)
    triples = [(left + right, rng.choice(symbols)) for left, right in rng.sample(pairs, 2000)]
    merges = [*pairs, *triples]
    rng.shuffle(merges)
    ordinary = [symbol for byte, symbol in enumerate(symbols) if byte not in bytes_missing]
    ordinary += dict.fromkeys(left + right for left, right in merges)
    tokens = [*ordinary, *SPECIALS]
    types = [1] * len(ordinary) + [3, 3, 3, 2] + [4] * (len(SPECIALS) - 4)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


def pieces_vocabulary(seed: int, **metadata: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary with few distinct scores, so that ties decide often."""
    rng = random.Random(seed)
    letters = [*"abcdeхцé日本▁.!<>s", "👩", "\u0301"]
    pieces = dict.fromkeys(letters)
    while len(pieces) < 400:
        piece = "".join(rng.choice(list(pieces)) for _ in range(2))
        if len(piece) < 9:
            pieces[piece] = None
    specials = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|endoftext|>"]
    added = ["  ", "\n", "\n\n", "ab<"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    ordinary = [piece for piece in pieces if piece not in (*specials, *added)]
    tokens = [*specials, *added, *byte_tokens, *ordinary]
    types = [2, 3, 3, 3, 3] + [4] * len(added) + [6] * 256 + [1] * len(ordinary)
    scores = [0.0] * (len(tokens) - len(ordinary)) + [float(-rng.randrange(6)) for _ in ordinary]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **metadata,
    }
