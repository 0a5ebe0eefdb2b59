"""`qwen3`: dense Qwen3. Heads of q and k are normalised before RoPE, which rotates halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import ArchitectureSpec, BlockStyle, Component, ModelFile, hookimpl

from ._decoder import common_fields, component
from ._metadata import Metadata


class Qwen3:
    """Pre-norm blocks, SiLU, grouped queries, QK norm."""

    def describe(self, file: ModelFile) -> ArchitectureSpec:
        """Read the description."""
        metadata = Metadata(file)
        fields = common_fields(metadata)
        style = BlockStyle(
            rope_base=metadata.number("rope.freq_base", 10000.0), rope_scale=metadata.rope_scale()
        )
        return ArchitectureSpec(
            **fields, blocks=(style,) * fields["block_count"], rope_interleaved=False, qk_norm=True
        )


@hookimpl
def retrograd_architectures() -> Sequence[Component[Any, Any]]:
    """Offer `qwen3`."""
    return [component("qwen3", Qwen3, "Dense Qwen3.", "Yang et al. 2025 (Qwen3 technical report)")]
