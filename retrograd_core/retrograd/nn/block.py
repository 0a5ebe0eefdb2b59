"""A decoder block."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import KernelTable

from .attention import Attention, KeyValueStore
from .batch import PassBatch
from .kept import KeptArrays
from .mlp import GatedMLP
from .norm import RMSNorm
from .workspace import Scope


class DecoderBlock:
    """mid = x + post(attention(norm(x))); out = mid + post(mlp(norm(mid))).

    `post` is an RMSNorm in gemma's blocks and nothing elsewhere. Normalised inputs are recomputed in the
    backward pass, not kept.
    """

    def __init__(
        self,
        *,
        attention_norm: RMSNorm,
        attention: Attention,
        post_attention_norm: RMSNorm | None,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
        post_mlp_norm: RMSNorm | None,
        kernels: KernelTable,
        scratch: Scope,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.post_mlp_norm = post_mlp_norm
        self._add = kernels.get("add")
        self._scratch = scratch
        self._kept = KeptArrays(kernels, scratch)

    def forward(self, x: Any, out: Any, batch: PassBatch, keep: Scope, store: KeyValueStore | None) -> None:
        """x (T, E) to out (T, E)."""
        tokens, width = x.shape
        normed = self._scratch.rows("block.normed", tokens, width)
        kept = self._kept
        mid = kept.fresh("mid", keep, tokens, width)

        self.attention_norm.forward(x, normed, keep.rows("attention_norm.rstd", tokens))
        if self.post_attention_norm is None:
            self.attention.forward(normed, mid, batch, keep, store)
        else:
            attended = kept.fresh("attended", keep, tokens, width)
            self.attention.forward(normed, attended, batch, keep, store)
            self.post_attention_norm.forward(attended, mid, keep.rows("post_attention_norm.rstd", tokens))
            kept.save("attended", attended, keep)
        self._add(x, mid)
        kept.save("mid", mid, keep)

        self.mlp_norm.forward(mid, normed, keep.rows("mlp_norm.rstd", tokens))
        if self.post_mlp_norm is None:
            self.mlp.forward(normed, out, keep)
        else:
            fed = kept.fresh("fed", keep, tokens, width)
            self.mlp.forward(normed, fed, keep)
            self.post_mlp_norm.forward(fed, out, keep.rows("post_mlp_norm.rstd", tokens))
            kept.save("fed", fed, keep)
        self._add(mid, out)

    def backward(self, grad: Any, x: Any, batch: PassBatch, keep: Scope, store: KeyValueStore | None) -> None:
        """`grad` (T, E) holds the gradient by the block's output, and afterwards that by its input x."""
        tokens, width = x.shape
        normed = self._scratch.rows("block.normed", tokens, width)
        dnormed = self._scratch.rows("block.dnormed", tokens, width)
        dbranch = grad if self.post_mlp_norm is None else self._scratch.rows("block.dbranch", tokens, width)
        mid = self._kept.load("mid", keep, tokens, width)

        if self.post_mlp_norm is not None:
            fed, rstd = (
                self._kept.load("fed", keep, tokens, width),
                keep.rows("post_mlp_norm.rstd", tokens),
            )
            self.post_mlp_norm.backward(grad, fed, rstd, dbranch)
        rstd = keep.rows("mlp_norm.rstd", tokens)
        self.mlp_norm.forward(mid, normed, rstd)
        self.mlp.backward(dbranch, normed, dnormed, keep)
        self.mlp_norm.backward(dnormed, mid, rstd, grad, accumulate=True)

        if self.post_attention_norm is not None:
            attended, rstd = (
                self._kept.load("attended", keep, tokens, width),
                keep.rows("post_attention_norm.rstd", tokens),
            )
            self.post_attention_norm.backward(grad, attended, rstd, dbranch)
        rstd = keep.rows("attention_norm.rstd", tokens)
        self.attention_norm.forward(x, normed, rstd)
        self.attention.backward(dbranch, normed, dnormed, batch, keep, store)
        self.attention_norm.backward(dnormed, x, rstd, grad, accumulate=True)
