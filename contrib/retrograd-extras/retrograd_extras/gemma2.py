"""Gemma 2, described over retrograd's shared modules.

Against Gemma 3: no QK norm, soft caps on the attention scores and the final logits, every second block
with a sliding window, one RoPE base.
"""

from __future__ import annotations

import math

from retrograd_hookspecs import (
    Architecture,
    ArchitectureSpec,
    BlockStyle,
    BuildContext,
    Component,
    ModelError,
    ModelFile,
    NoConfig,
    hookimpl,
)


class Gemma2:
    """Reads `gemma2.*` metadata."""

    def describe(self, file: ModelFile) -> ArchitectureSpec:
        """The description. `ModelError` names a key that is missing."""

        def need(key: str) -> float:
            value = file.get(key)
            if value is None:
                raise ModelError(f"{file.path}: the metadata key gemma2.{key} is missing")
            return float(value)

        width, heads = int(need("embedding_length")), int(need("attention.head_count"))
        head_length = int(file.get("attention.key_length", width // heads))
        blocks = int(need("block_count"))
        window = int(file.get("attention.sliding_window", 4096))
        base = float(file.get("rope.freq_base", 10000.0))
        # 27B scales queries by its width per head instead of its head size.
        scale = (width / heads) ** -0.5 if blocks == 46 else head_length**-0.5
        return ArchitectureSpec(
            embedding_length=width,
            block_count=blocks,
            feed_forward_length=int(need("feed_forward_length")),
            head_count=heads,
            head_count_kv=int(need("attention.head_count_kv")),
            head_length=head_length,
            vocabulary_size=file.tensors["token_embd.weight"].shape[0],
            context_length=int(need("context_length")),
            norm_epsilon=need("attention.layer_norm_rms_epsilon"),
            blocks=[
                BlockStyle(window=window if index % 2 == 0 else 0, rope_base=base) for index in range(blocks)
            ],
            rope_interleaved=False,
            rope_dimensions=head_length,
            activation="gelu_tanh",
            embedding_scale=math.sqrt(width),
            attention_scale=scale,
            attention_softcap=float(file.get("attn_logit_softcapping", 50.0)),
            final_softcap=float(file.get("final_logit_softcapping", 30.0)),
            post_norms=True,
            tied_head="output.weight" not in file.tensors,
        )


def _build(config: NoConfig, context: BuildContext) -> Architecture:
    return Gemma2()


@hookimpl
def retrograd_architectures() -> list[Component[NoConfig, Architecture]]:
    """`gemma2`."""
    return [Component(name="gemma2", config=NoConfig, build=_build, summary="Gemma 2.")]
