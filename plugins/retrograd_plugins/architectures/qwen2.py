"""`qwen2`: Qwen2 and Qwen2.5. Biases on Q, K and V; RoPE rotates halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import ArchitectureSpec, BlockStyle, Component, ModelFile, hookimpl

from ._decoder import common_fields, component
from ._metadata import Metadata


class Qwen2:
    """Pre-norm blocks, SiLU, grouped queries, biases on Q, K and V."""

    def describe(self, file: ModelFile) -> ArchitectureSpec:
        """Read the description."""
        metadata = Metadata(file)
        fields = common_fields(metadata)
        style = BlockStyle(
            rope_base=metadata.number("rope.freq_base", 10000.0), rope_scale=metadata.rope_scale()
        )
        return ArchitectureSpec(
            **fields, blocks=(style,) * fields["block_count"], rope_interleaved=False, qkv_bias=True
        )


@hookimpl
def retrograd_architectures() -> Sequence[Component[Any, Any]]:
    """Offer `qwen2`."""
    return [component("qwen2", Qwen2, "Qwen2 and Qwen2.5.", "Yang et al. 2024 (Qwen2 technical report)")]
