"""`gemma3`: Gemma 3 text models.

Embeddings are scaled by sqrt(width); norm weights in the file already hold the +1; attention and MLP
outputs are normalised before they are added; heads of q and k are normalised before RoPE, which rotates
halves. Five of six blocks see a sliding window and have a RoPE base of their own; the scaling of positions in
larger models concerns the other blocks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import ArchitectureSpec, BlockStyle, Component, ModelFile, hookimpl

from ._decoder import common_fields, component
from ._metadata import Metadata

BLOCKS_OF_27B = 62
"""The 27B model scales queries by (width / heads)^-0.5 instead of (head size)^-0.5."""


class Gemma3:
    """Blocks with norms before and after, tanh-approximated GELU, QK norm, sliding windows."""

    def describe(self, file: ModelFile) -> ArchitectureSpec:
        """Read the description."""
        metadata = Metadata(file)
        fields = common_fields(metadata)
        width, count = fields["embedding_length"], fields["block_count"]
        local = BlockStyle(
            window=metadata.integer("attention.sliding_window"),
            rope_base=metadata.number("rope.freq_base_swa", 10000.0),
        )
        everywhere = BlockStyle(
            rope_base=metadata.number("rope.freq_base", 1000000.0), rope_scale=metadata.rope_scale()
        )
        softcap = metadata.optional("final_logit_softcapping")
        attention_softcap = metadata.optional("attn_logit_softcapping")
        return ArchitectureSpec(
            **fields,
            blocks=tuple(local if slides else everywhere for slides in _sliding(metadata, count)),
            rope_interleaved=False,
            activation="gelu_tanh",
            embedding_scale=width**0.5,
            attention_scale=(width / fields["head_count"]) ** -0.5 if count == BLOCKS_OF_27B else 0.0,
            attention_softcap=metadata.number("attn_logit_softcapping") if attention_softcap else 0.0,
            final_softcap=metadata.number("final_logit_softcapping") if softcap else 0.0,
            qk_norm=True,
            post_norms=True,
        )


def _sliding(metadata: Metadata, count: int) -> list[bool]:
    """For each block, whether it sees a window only: a period (every n-th block sees everything) or a
    list of booleans."""
    key = "attention.sliding_window_pattern"
    pattern = metadata.optional(key)
    if isinstance(pattern, list):
        if len(pattern) != count:
            raise metadata.error(key, pattern, f"a list of {count} entries, one a block")
        return [bool(entry) for entry in pattern]
    period = metadata.integer(key, 6)
    return [(index + 1) % period != 0 for index in range(count)]


@hookimpl
def retrograd_architectures() -> Sequence[Component[Any, Any]]:
    """Offer `gemma3`."""
    return [component("gemma3", Gemma3, "Gemma 3 text models.", "Gemma Team 2025 (Gemma 3 technical report)")]
