"""`llama`: Llama 2 and 3, Mistral, SmolLM2 and everything else that is stored under this name.

Rows of Q and K are permuted in these files, so RoPE rotates adjacent pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import ArchitectureSpec, BlockStyle, Component, ModelFile, hookimpl

from ._decoder import common_fields, component, rope_factors
from ._metadata import Metadata


class Llama:
    """Pre-norm blocks, SiLU, grouped queries."""

    def describe(self, file: ModelFile) -> ArchitectureSpec:
        """Read the description. A sliding window (Mistral 7B v0.1) holds for every block."""
        metadata = Metadata(file)
        fields = common_fields(metadata)
        window = metadata.optional("attention.sliding_window")
        style = BlockStyle(
            window=metadata.integer("attention.sliding_window") if window else 0,
            rope_base=metadata.number("rope.freq_base", 10000.0),
            rope_scale=metadata.rope_scale(),
            rope_factors=rope_factors(metadata),
        )
        return ArchitectureSpec(
            **fields,
            blocks=(style,) * fields["block_count"],
            rope_interleaved=True,
            qkv_bias=metadata.has("blk.0.attn_q.bias"),
        )


@hookimpl
def retrograd_architectures() -> Sequence[Component[Any, Any]]:
    """Offer `llama`."""
    return [
        component(
            "llama", Llama, "Llama 2 and 3, Mistral, SmolLM2.", "Touvron et al. 2023; Grattafiori et al. 2024"
        )
    ]
