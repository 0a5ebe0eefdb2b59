"""Small random models: valid GGUFs of every supported architecture that stock llama.cpp loads too.

For tests. The weights are random but scaled as in a trained network, so that logits are well spread,
gradients flow through every tensor, and a few steps of training visibly lower the loss. The same
arguments give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd.gguf.formats import FILE_TYPES, block_format
from retrograd.gguf.writer import TensorPlan, write_gguf

from .quants import random_weights
from .vocabulary import CHATML_TEMPLATE, GEMMA_TEMPLATE, byte_level_vocabulary, sentencepiece_vocabulary

ARCHITECTURES = ("llama", "gemma3", "qwen2", "qwen3")


@attrs.frozen(kw_only=True)
class TinyModel:
    """Shape of a tiny model. Zero or None means the default of the architecture."""

    architecture: str = "llama"
    format: str = "F32"
    """ggml type of the 2-D weights; the widths must be multiples of its block size (K-quants: 256)."""
    formats: Mapping[str, str] = attrs.field(factory=dict)
    """Tensor-name patterns (`blk.*.ffn_down.weight`) to a type of their own; the first match counts."""
    seed: int = 0
    embedding_length: int = 64
    feed_forward_length: int = 128
    block_count: int = 0
    """Default 2; gemma3: 7, so that one layer (the sixth) has full attention."""
    head_count: int = 4
    head_count_kv: int = 2
    head_length: int = 0
    """Default embedding_length / head_count; qwen3 and gemma3: 32, so that it differs from that."""
    context_length: int = 512
    sliding_window: int = 8
    """gemma3 only."""
    rope_base: float = 0.0
    """Default 10000; gemma3 and qwen3: 1000000."""
    rope_factors: bool = False
    """llama only: adds `rope_freqs.weight`, as Llama 3.1 and later have it."""
    tied_head: bool | None = None
    """Default True for llama and gemma3, False for the others; gemma3 has no untied head."""
    chat_template: str | None = None
    """Default: ChatML, or Gemma's turns; "" leaves it out."""
    metadata: Mapping[str, Any] = attrs.field(factory=dict)
    """Metadata to add or replace; None removes a key."""

    def resolved(self) -> TinyModel:
        """The same with every default filled in. Raises ValueError for an unknown architecture."""
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture {self.architecture!r} is not one of {', '.join(ARCHITECTURES)}")
        gemma = self.architecture == "gemma3"
        wide_heads = self.architecture in ("gemma3", "qwen3")
        if gemma and self.tied_head is False:
            raise ValueError("gemma3 always shares its output head with the embedding")
        return attrs.evolve(
            self,
            block_count=self.block_count or (7 if gemma else 2),
            head_length=self.head_length or (32 if wide_heads else self.embedding_length // self.head_count),
            rope_base=self.rope_base or (1e6 if wide_heads else 1e4),
            tied_head=self.architecture in ("llama", "gemma3") if self.tied_head is None else self.tied_head,
            chat_template=(GEMMA_TEMPLATE if gemma else CHATML_TEMPLATE)
            if self.chat_template is None
            else self.chat_template,
        )


def write_tiny_model(path: Path, spec: TinyModel | None = None, **overrides: Any) -> Path:
    """Write the model that `spec`, with `overrides` of its fields, describes. Returns `path`.

    Raises ValueError for an unknown architecture, `ModelError` if a width does not fit the format.
    """
    model = attrs.evolve(spec or TinyModel(), **overrides).resolved()
    vocabulary = (
        sentencepiece_vocabulary()
        if model.architecture == "gemma3"
        else byte_level_vocabulary(model.architecture)
    )
    vocabulary_size = len(vocabulary["tokenizer.ggml.tokens"])
    metadata = _metadata(model, vocabulary_size) | vocabulary
    if model.chat_template:
        metadata["tokenizer.chat_template"] = model.chat_template
    metadata.update(model.metadata)
    rng = np.random.default_rng(model.seed)
    tensors = [_tensor(model, rng, *entry) for entry in _tensors(model, vocabulary_size)]
    write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)
    return path


def _metadata(model: TinyModel, vocabulary_size: int) -> dict[str, Any]:
    prefix = model.architecture
    out: dict[str, Any] = {
        "general.architecture": model.architecture,
        "general.type": "model",
        "general.name": f"tiny {model.architecture}",
        "general.file_type": FILE_TYPES.get(model.format.upper(), 0),
        "general.quantization_version": 2,
        f"{prefix}.block_count": model.block_count,
        f"{prefix}.context_length": model.context_length,
        f"{prefix}.embedding_length": model.embedding_length,
        f"{prefix}.feed_forward_length": model.feed_forward_length,
        f"{prefix}.attention.head_count": model.head_count,
        f"{prefix}.attention.head_count_kv": model.head_count_kv,
        f"{prefix}.attention.layer_norm_rms_epsilon": 1e-6 if model.architecture == "gemma3" else 1e-5,
        f"{prefix}.rope.freq_base": model.rope_base,
        f"{prefix}.vocab_size": vocabulary_size,
    }
    if model.architecture == "llama":
        out["llama.rope.dimension_count"] = model.head_length
    if model.head_length * model.head_count != model.embedding_length:
        out[f"{prefix}.attention.key_length"] = model.head_length
        out[f"{prefix}.attention.value_length"] = model.head_length
    if model.architecture == "gemma3":
        out["gemma3.attention.sliding_window"] = model.sliding_window
    return out


Initialiser = Callable[[np.random.Generator, tuple[int, ...]], npt.NDArray[np.float32]]


def _tensors(
    model: TinyModel, vocabulary_size: int
) -> list[tuple[str, tuple[int, ...], float, Initialiser | None]]:
    """Name, row-major shape, standard deviation (matrices) and initialiser (vectors), in file order."""
    width, hidden = model.embedding_length, model.feed_forward_length
    queries, keys = model.head_count * model.head_length, model.head_count_kv * model.head_length
    gemma, qwen2, qwen3 = (model.architecture == name for name in ("gemma3", "qwen2", "qwen3"))
    out: list[tuple[str, tuple[int, ...], float, Initialiser | None]] = [
        # With a tied head, logits get a standard deviation of about 2.4. Gemma scales its embeddings by
        # sqrt(width): they are smaller there and the last norm larger, else a token only predicts itself.
        ("token_embd.weight", (vocabulary_size, width), (0.6 if gemma else 2.4) * width**-0.5, None),
        ("output_norm.weight", (width,), 0.0, _large_norm if gemma else _norm),
    ]
    if not model.tied_head:
        out.append(("output.weight", (vocabulary_size, width), 2.4 * width**-0.5, None))
    if model.rope_factors:
        out.append(("rope_freqs.weight", (model.head_length // 2,), 0.0, _rope_factors))
    for index in range(model.block_count):
        block: list[tuple[str, tuple[int, ...], float, Initialiser | None]] = [
            ("attn_norm.weight", (width,), 0.0, _norm),
            ("attn_q.weight", (queries, width), width**-0.5, None),
            ("attn_k.weight", (keys, width), width**-0.5, None),
            ("attn_v.weight", (keys, width), width**-0.5, None),
            ("attn_output.weight", (width, queries), queries**-0.5, None),
            ("ffn_norm.weight", (width,), 0.0, _norm),
            ("ffn_gate.weight", (hidden, width), width**-0.5, None),
            ("ffn_up.weight", (hidden, width), width**-0.5, None),
            ("ffn_down.weight", (width, hidden), hidden**-0.5, None),
        ]
        if qwen2:
            block += [
                (f"attn_{part}.bias", (size,), 0.0, _bias)
                for part, size in zip("qkv", (queries, keys, keys), strict=True)
            ]
        if qwen3 or gemma:
            block += [(f"attn_{part}_norm.weight", (model.head_length,), 0.0, _norm) for part in "qk"]
        if gemma:
            block += [
                (f"{name}.weight", (width,), 0.0, _norm) for name in ("post_attention_norm", "post_ffw_norm")
            ]
        out += [(f"blk.{index}.{name}", shape, scale, start) for name, shape, scale, start in block]
    return out


def _tensor(
    model: TinyModel,
    rng: np.random.Generator,
    name: str,
    shape: tuple[int, ...],
    deviation: float,
    initialiser: Initialiser | None,
) -> tuple[TensorPlan, npt.NDArray[Any]]:
    if initialiser is not None:
        return TensorPlan(name=name, shape=shape, format="F32"), initialiser(rng, shape)
    patterns = (kind for pattern, kind in model.formats.items() if fnmatchcase(name, pattern))
    kind = block_format(next(patterns, model.format)).name
    rows, columns = shape
    return TensorPlan(name=name, shape=shape, format=kind), random_weights(
        rng, rows, columns, kind, deviation
    )


def _norm(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return (1.0 + 0.1 * rng.standard_normal(shape)).astype(np.float32)


def _large_norm(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return np.float32(4.0) * _norm(rng, shape)


def _bias(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return (0.2 * rng.standard_normal(shape)).astype(np.float32)


def _rope_factors(_rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    # Like Llama 3: high frequencies as they are, a ramp, low frequencies slowed down eightfold.
    return np.interp(np.linspace(0, 1, shape[0]), [0.4, 0.8], [1.0, 8.0]).astype(np.float32)
