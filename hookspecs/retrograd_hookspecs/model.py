"""Model files and architectures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from .kernels import QuantMatrix

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@attrs.frozen(kw_only=True)
class TensorInfo:
    """A tensor of a GGUF. `shape` is row-major (numpy order), `format` the ggml type name."""

    name: str
    shape: tuple[int, ...]
    format: str
    bytes: int


class ModelFile(Protocol):
    """A GGUF, memory-mapped."""

    path: Path
    metadata: Mapping[str, Any]
    """All key-value pairs as Python values; arrays as lists (tokens as `str`)."""
    architecture: str
    """`general.architecture`."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By name, in file order."""

    def get(self, key: str, default: Any = None) -> Any:
        """`metadata["{architecture}.{key}"]`, or `default`."""

    def matrix(self, name: str) -> QuantMatrix:
        """A 2-D weight as stored; `ModelError` if it is missing or not 2-D."""

    def vector(self, name: str) -> Any:
        """A 1-D weight dequantised to float32; `ModelError` if it is missing."""

    def fingerprint(self) -> str:
        """Hex SHA-256 that identifies content: metadata, tensor table and data."""


@attrs.frozen(kw_only=True)
class BlockStyle:
    """How one decoder block differs from its siblings; see `ArchitectureSpec`."""

    window: int = 0
    """Sliding window in tokens; 0 for full attention."""
    rope_base: float = 10000.0
    rope_scale: float = 1.0
    """Linear scaling: positions are divided by it."""
    rope_factors: tuple[float, ...] = ()
    """Per-frequency divisors (`rope_freqs.weight`: Llama 3); empty for none."""


@attrs.frozen(kw_only=True)
class ArchitectureSpec:
    """A decoder-only transformer, described over the shared modules of `retrograd.nn`.

    Tensor names follow ggml's conventions: `token_embd`, `blk.N.attn_q`, `blk.N.ffn_gate`,
    `output_norm`, `output`.
    """

    embedding_length: int
    block_count: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    head_length: int
    vocabulary_size: int
    context_length: int
    norm_epsilon: float
    blocks: Sequence[BlockStyle]
    """One per block."""
    rope_interleaved: bool
    """True where GGUF rows are permuted so that RoPE rotates adjacent pairs (llama)."""
    rope_dimensions: int
    activation: str = "silu"
    """"silu" or "gelu_tanh"."""
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    """Factor on q·k; 0 means head_length ** -0.5."""
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    qk_norm: bool = False
    """RMSNorm over each head of q and k before RoPE."""
    qkv_bias: bool = False
    post_norms: bool = False
    """RMSNorm on the output of attention and of the MLP, before the residual addition."""
    tied_head: bool = True
    """The output head shares `token_embd.weight`."""


class Architecture(Protocol):
    """`build` of an `architectures` component gives this; its name is `general.architecture`."""

    def describe(self, file: ModelFile) -> ArchitectureSpec:
        """Read the description from metadata. `ModelError` names a key that is missing or unsupported."""


@attrs.frozen(kw_only=True)
class BlockLayout:
    """A block of a format: `values` values lie in `bytes` bytes."""

    type_id: int
    """The number that stands for the format in the tensor table of a GGUF."""
    values: int
    bytes: int


class Quant(Protocol):
    """One or several block formats of weights. A row is a whole number of blocks."""

    @property
    def formats(self) -> Mapping[str, BlockLayout]:
        """Upper-case type name to layout, of every format that tensors of a GGUF may have. Cheap: every run
        asks for it."""

    @property
    def readable(self) -> frozenset[str]:
        """Those of `formats` that `dequantise` can read: those of weights."""

    @property
    def writable(self) -> frozenset[str]:
        """Those of `readable` that `quantise` can write."""

    def dequantise(self, data: npt.NDArray[np.uint8], format: str) -> npt.NDArray[np.float32]:
        """Packed rows, uint8 (..., row bytes), to float32 (..., K), a new array. `ModelError` for a format
        that is not `readable`."""

    def quantise(self, values: npt.NDArray[np.floating[Any]], format: str) -> npt.NDArray[np.uint8]:
        """Values (..., K) to packed rows, uint8 (..., row bytes), a new array. `ModelError` for a format that
        is not `writable`, and for rows that are not whole blocks."""


class ModelSource(Protocol):
    """Resolves locators of one scheme (`package:`, `pypi:`, `hf:`) to a local GGUF."""

    def resolve(self, locator: str) -> Path:
        """Path of the file, fetched if needed. `ModelError` says what was looked up and how to mend it."""
