"""What the metadata of all supported decoders have in common."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import Component, NoConfig

from ._metadata import Metadata

UNSUPPORTED = {
    "expert_count": "a mixture of experts",
    "attention.clamp_kqv": "clamping of q, k and v",
    "attention.scale": "a scale of attention scores of its own",
    "embedding_scale": "a scale of the embeddings of its own",
    "residual_scale": "a scale of the residual stream",
    "logit_scale": "a scale of the logits",
}


def common_fields(metadata: Metadata) -> dict[str, Any]:
    """Fields of `ArchitectureSpec` that are read in the same way for every architecture.

    What the modules cannot compute is refused by name.
    """
    for key, reason in UNSUPPORTED.items():
        metadata.refuse(key, reason)
    if metadata.optional("attention.causal") is False:
        raise metadata.error("attention.causal", False, "a causal decoder")
    width = metadata.integer("embedding_length")
    heads = metadata.integer("attention.head_count")
    kv_heads = metadata.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise metadata.error("attention.head_count_kv", kv_heads, f"a divisor of the {heads} query heads")
    size = metadata.integer("attention.key_length", width // heads)
    value_size = metadata.integer("attention.value_length", size)
    if value_size != size:
        raise metadata.error(
            "attention.value_length",
            value_size,
            f"equal to {metadata.file.architecture}.attention.key_length ({size})",
        )
    rotated = metadata.integer("rope.dimension_count", size)
    if rotated > size or rotated % 2:
        raise metadata.error("rope.dimension_count", rotated, f"an even number up to the head size {size}")
    return {
        "embedding_length": width,
        "block_count": metadata.integer("block_count"),
        "feed_forward_length": metadata.integer("feed_forward_length"),
        "head_count": heads,
        "head_count_kv": kv_heads,
        "head_length": size,
        "vocabulary_size": metadata.vocabulary_size(),
        "context_length": metadata.integer("context_length"),
        "norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_dimensions": rotated,
        "tied_head": not metadata.has("output.weight"),
    }


def rope_factors(metadata: Metadata) -> tuple[float, ...]:
    """Per-frequency divisors of `rope_freqs.weight`, empty if the model has none."""
    if not metadata.has("rope_freqs.weight"):
        return ()
    return tuple(float(value) for value in metadata.file.vector("rope_freqs.weight"))


def component(name: str, architecture: type[Any], summary: str, source: str) -> Component[Any, Any]:
    """The component of an architecture without keys of its own."""
    return Component(
        name=name,
        config=NoConfig,
        build=lambda config, context: architecture(),
        summary=summary,
        source=source,
    )
