"""From the tensors of a GGUF to modules."""

from __future__ import annotations

from typing import Any

import numpy as np

from retrograd_hookspecs import ArchitectureSpec, Backend, KernelTable, ModelError, ModelFile, QuantMatrix

from .attention import Attention
from .block import DecoderBlock
from .embedding import Embedding
from .head import Head
from .mlp import GatedMLP
from .norm import RMSNorm
from .projection import Projection
from .rope import RopeTables
from .workspace import Scope

ROPE_FACTORS = "rope_freqs.weight"
"""Read by architectures into `BlockStyle.rope_factors`, so no module holds it."""


class ModuleBuilder:
    """Builds the modules of one model and remembers which tensors they took.

    Raises (all methods): `ModelError` for a tensor that is missing or has another shape than the
    metadata says.
    """

    def __init__(
        self, file: ModelFile, spec: ArchitectureSpec, kernels: KernelTable, backend: Backend, scratch: Scope
    ) -> None:
        self._file = file
        self._spec = spec
        self._kernels = kernels
        self._backend = backend
        self._scratch = scratch
        self._taken: set[str] = {ROPE_FACTORS}
        self.projections: dict[str, Projection] = {}
        """By tensor name, in file order of the blocks."""
        self.rope_tables = RopeTables(spec.rope_dimensions, backend)

    def embedding(self) -> Embedding:
        """The token embedding."""
        spec = self._spec
        weight = self._matrix("token_embd.weight", spec.vocabulary_size, spec.embedding_length)
        return Embedding(weight, spec.embedding_scale, self._kernels)

    def head(self) -> Head:
        """Final norm and output head."""
        spec = self._spec
        name = "token_embd.weight" if spec.tied_head else "output.weight"
        return Head(
            weight=self._matrix(name, spec.vocabulary_size, spec.embedding_length),
            norm=self._norm("output_norm", spec.embedding_length),
            softcap=spec.final_softcap,
            kernels=self._kernels,
            scratch=self._scratch,
        )

    def block(self, index: int) -> DecoderBlock:
        """Block `index`, from 0."""
        spec, prefix = self._spec, f"blk.{index}"
        width, size = spec.embedding_length, spec.head_length
        queries, keys = spec.head_count * size, spec.head_count_kv * size
        style = spec.blocks[index]
        attention = Attention(
            block=index,
            spec=spec,
            style=style,
            q=self._projection(f"{prefix}.attn_q", queries, width, bias=spec.qkv_bias),
            k=self._projection(f"{prefix}.attn_k", keys, width, bias=spec.qkv_bias),
            v=self._projection(f"{prefix}.attn_v", keys, width, bias=spec.qkv_bias),
            output=self._projection(f"{prefix}.attn_output", width, queries),
            q_norm=self._norm(f"{prefix}.attn_q_norm", size) if spec.qk_norm else None,
            k_norm=self._norm(f"{prefix}.attn_k_norm", size) if spec.qk_norm else None,
            rope_table=self.rope_tables.of(style),
            kernels=self._kernels,
            scratch=self._scratch,
        )
        mlp = GatedMLP(
            gate=self._projection(f"{prefix}.ffn_gate", spec.feed_forward_length, width),
            up=self._projection(f"{prefix}.ffn_up", spec.feed_forward_length, width),
            down=self._projection(f"{prefix}.ffn_down", width, spec.feed_forward_length),
            activation=spec.activation,
            kernels=self._kernels,
            scratch=self._scratch,
        )
        post = spec.post_norms
        return DecoderBlock(
            attention_norm=self._norm(f"{prefix}.attn_norm", width),
            attention=attention,
            post_attention_norm=self._norm(f"{prefix}.post_attention_norm", width) if post else None,
            mlp_norm=self._norm(f"{prefix}.ffn_norm", width),
            mlp=mlp,
            post_mlp_norm=self._norm(f"{prefix}.post_ffw_norm", width) if post else None,
            kernels=self._kernels,
            scratch=self._scratch,
        )

    def require_all_taken(self) -> None:
        """Refuse a file with tensors that no module reads: its results would be silently wrong."""
        unread = [name for name in self._file.tensors if name not in self._taken]
        if unread:
            shown = ", ".join(unread[:5]) + (f" and {len(unread) - 5} more" if len(unread) > 5 else "")
            raise ModelError(
                f"{self._file.path}: architecture {self._file.architecture!r} does not use the tensors"
                f" {shown}; a model of this kind would not be computed as it was trained"
            )

    def _projection(self, name: str, rows: int, columns: int, *, bias: bool = False) -> Projection:
        tensor = f"{name}.weight"
        weight = self._matrix(tensor, rows, columns)
        values = self._vector(f"{name}.bias", rows) if bias else None
        projection = Projection(name.rsplit(".", 1)[1], weight, values)
        self.projections[tensor] = projection
        return projection

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._vector(f"{name}.weight", size), self._spec.norm_epsilon, self._kernels)

    def _matrix(self, name: str, rows: int, columns: int) -> QuantMatrix:
        matrix = self._file.matrix(name)
        if matrix.shape != (rows, columns):
            raise ModelError(
                f"{self._file.path}: {name} is {matrix.rows} × {matrix.columns}, the metadata asks for"
                f" {rows} × {columns}; the file is damaged or of another kind of model"
            )
        self._taken.add(name)
        return self._backend.upload(matrix)

    def _vector(self, name: str, size: int) -> Any:
        vector = np.asarray(self._file.vector(name))
        if vector.shape != (size,):
            raise ModelError(
                f"{self._file.path}: {name} has {vector.size} values, the metadata asks for {size};"
                " the file is damaged or of another kind of model"
            )
        self._taken.add(name)
        return self._backend.from_host(vector.astype(self._backend.compute_dtype))
