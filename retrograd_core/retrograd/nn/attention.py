"""Multi-head attention with rotary positions, grouped queries, windows and soft caps."""

from __future__ import annotations

from typing import Any

import attrs

from retrograd_hookspecs import ArchitectureSpec, BlockStyle, KernelTable

from .batch import PassBatch
from .kept import KeptArrays
from .kv_cache import KVCache, KVGradients
from .norm import RMSNorm
from .projection import Projection, ProjectionGroup
from .rope import RopeTable
from .workspace import Scope


@attrs.frozen(eq=False, kw_only=True)
class KeyValueStore:
    """What passes with cached runs need: the cache, and in training the gradients by it."""

    cache: KVCache
    gradients: KVGradients | None = None


class Attention:
    """out = output(attend(rope(norm(q(x))), rope(norm(k(x))), v(x))).

    H query heads, G key/value heads, head size D. `q_norm` and `k_norm` are present with `spec.qk_norm`.

    Source: Vaswani et al. 2017, equation 1; Ainslie et al. 2023 (grouped queries); Su et al. 2021 (RoPE).
    """

    def __init__(
        self,
        *,
        block: int,
        spec: ArchitectureSpec,
        style: BlockStyle,
        q: Projection,
        k: Projection,
        v: Projection,
        output: Projection,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        rope_table: RopeTable,
        kernels: KernelTable,
        scratch: Scope,
    ) -> None:
        self.q, self.k, self.v, self.output = q, k, v, output
        self._inputs = ProjectionGroup((q, k, v), kernels)
        # The gradient by a value is a sum over all queries that see it, in which the errors that rounded
        # weights make alike for all tokens add up, while the rest may nearly cancel.
        self._output = ProjectionGroup((output,), kernels, precise_gradient=True)
        self.q_norm, self.k_norm = q_norm, k_norm
        self._block = block
        self._heads, self._kv_heads, self._size = spec.head_count, spec.head_count_kv, spec.head_length
        self._kept_width = 2 * (self._heads + self._kv_heads) * self._size
        self.window = style.window
        self._scale = spec.attention_scale or spec.head_length**-0.5
        self._softcap = spec.attention_softcap
        self._interleaved = spec.rope_interleaved
        self.rope_table = rope_table
        self._scratch = scratch
        self._kept = KeptArrays(kernels, scratch)
        self._rope = kernels.get("rope")
        self._attend = kernels.get("attention")
        self._attend_backward = kernels.get("attention_backward")

    def forward(self, x: Any, out: Any, batch: PassBatch, keep: Scope, store: KeyValueStore | None) -> None:
        """x (T, E) to out (T, E); keeps q, k, v, the heads' outputs and their logsumexp."""
        tokens = batch.length
        kept = self._kept.fresh("attention", keep, tokens, self._kept_width)
        raw_q, raw_k, v, heads = self._parts(kept)
        self._inputs.forward(x, [_flat(raw_q), _flat(raw_k), _flat(v)], keep)
        q, k = self._normalised(raw_q, raw_k, tokens, keep)
        self._rotate(q, k, batch, inverse=False)
        keys, values = self._keys_values(k, v, batch, store)
        lse = keep.rows("lse", tokens, self._heads)
        self._attend(q, keys, values, batch.segments, self._scale, self.window, self._softcap, heads, lse)
        self._output.forward(_flat(heads), [out], keep)
        self._kept.save("attention", kept, keep)

    def backward(
        self, dout: Any, x: Any, dx: Any, batch: PassBatch, keep: Scope, store: KeyValueStore | None
    ) -> None:
        """Overwrites dx (T, E)."""
        tokens = batch.length
        raw_q, raw_k, v, heads = self._parts(self._kept.load("attention", keep, tokens, self._kept_width))
        lse = keep.rows("lse", tokens, self._heads)
        dheads = self._scratch.rows("attention.dheads", tokens, self._heads, self._size)
        self._output.backward([dout], _flat(heads), _flat(dheads), keep)
        q, k = raw_q, raw_k
        if self.q_norm is not None:
            # Kept before the norm, so that norm and rotation are done again instead of stored.
            q, k = self._normalised(raw_q, raw_k, tokens, keep)
            self._rotate(q, k, batch, inverse=False)
        dq = self._scratch.rows("attention.dq", tokens, self._heads, self._size)
        dk, dv = (
            self._scratch.rows(f"attention.{name}", tokens, self._kv_heads, self._size)
            for name in ("dk", "dv")
        )
        self._attend_gradients(dheads, q, k, v, heads, lse, dq, dk, dv, batch, store)
        self._rotate(dq, dk, batch, inverse=True)
        if self.q_norm is not None and self.k_norm is not None:
            self._norm_backward(self.q_norm, "q", dq, raw_q, q, keep)
            self._norm_backward(self.k_norm, "k", dk, raw_k, k, keep)
            dq, dk = q, k
        self._inputs.backward([_flat(dq), _flat(dk), _flat(dv)], x, dx, keep)

    def _parts(self, kept: Any) -> list[Any]:
        """q, k, v and the heads' outputs, (T, heads, D) each, one after another in the array that is kept: in
        16 bits it is written and read in one go."""
        tokens, flat = kept.shape[0], kept.reshape(-1)
        parts, start = [], 0
        for heads in (self._heads, self._kv_heads, self._kv_heads, self._heads):
            stop = start + tokens * heads * self._size
            parts.append(flat[start:stop].reshape(tokens, heads, self._size))
            start = stop
        return parts

    def _normalised(self, q: Any, k: Any, tokens: int, keep: Scope) -> tuple[Any, Any]:
        """q and k themselves, or their norms in scratch arrays."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        normed_q = self._scratch.rows("attention.q", tokens, self._heads, self._size)
        normed_k = self._scratch.rows("attention.k", tokens, self._kv_heads, self._size)
        self.q_norm.forward(
            _per_head(q), _per_head(normed_q), keep.rows("q_norm.rstd", tokens, self._heads).reshape(-1)
        )
        self.k_norm.forward(
            _per_head(k), _per_head(normed_k), keep.rows("k_norm.rstd", tokens, self._kv_heads).reshape(-1)
        )
        return normed_q, normed_k

    def _norm_backward(self, norm: RMSNorm, name: str, dout: Any, x: Any, dx: Any, keep: Scope) -> None:
        rstd = keep.rows(f"{name}_norm.rstd", x.shape[0], x.shape[1]).reshape(-1)
        norm.backward(_per_head(dout), _per_head(x), rstd, _per_head(dx))

    def _rotate(self, q: Any, k: Any, batch: PassBatch, *, inverse: bool) -> None:
        cos, sin = self.rope_table.tables(batch.max_position + 1)
        self._rope(q, batch.positions, cos, sin, self._interleaved, inverse)
        self._rope(k, batch.positions, cos, sin, self._interleaved, inverse)

    def _keys_values(self, k: Any, v: Any, batch: PassBatch, store: KeyValueStore | None) -> tuple[Any, Any]:
        if not batch.uses_cache or store is None:
            return k, v
        return store.cache.extend(self._block, k, v, batch)

    def _attend_gradients(
        self,
        dheads: Any,
        q: Any,
        k: Any,
        v: Any,
        heads: Any,
        lse: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        batch: PassBatch,
        store: KeyValueStore | None,
    ) -> None:
        """dq, dk, dv of the pass's own tokens; the gradients of cached rows stay in the store."""
        keys, values = self._keys_values(k, v, batch, store)
        cached = store is not None and store.gradients is not None and batch.uses_cache
        if cached:
            dkeys, dvalues = store.gradients.of(self._block, batch)  # type: ignore[union-attr]
        else:
            dkeys, dvalues = dk, dv
            dkeys[...] = 0
            dvalues[...] = 0
        self._attend_backward(
            dheads,
            q,
            keys,
            values,
            heads,
            lse,
            batch.segments,
            self._scale,
            self.window,
            self._softcap,
            dq,
            dkeys,
            dvalues,
        )
        if cached:
            store.gradients.take(self._block, batch, dk, dv)  # type: ignore[union-attr]


def _flat(heads: Any) -> Any:
    """(T, heads, D) as (T, heads · D)."""
    return heads.reshape(heads.shape[0], -1)


def _per_head(heads: Any) -> Any:
    """(T, heads, D) as (T · heads, D)."""
    return heads.reshape(-1, heads.shape[2])
