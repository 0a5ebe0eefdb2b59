"""Reference products with stored weights, and the embedding lookup, for every format `gguf` can expand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from retrograd_hookspecs import (
    ANY_FORMAT,
    BuildContext,
    Component,
    KernelError,
    KernelImpl,
    NoConfig,
    QuantMatrix,
    hookimpl,
)

from ._rows import Array, product_by_rows

if TYPE_CHECKING:
    from ._weights import WeightCache


@attrs.frozen
class WeightOps:
    """The ops that read a stored weight W (N, K)."""

    cache: WeightCache

    def matmul(self, x: Array, w: QuantMatrix, out: Array) -> None:
        """out (T, N) = x (T, K) · Wᵀ."""
        out[...] = product_by_rows(x, self.cache.get(w).T)

    def matmul_input_grad(self, dout: Array, w: QuantMatrix, dx: Array, accumulate: bool) -> None:
        """dx (T, K) = dout (T, N) · W, or adds to dx."""
        product = product_by_rows(dout, self.cache.get(w))
        if accumulate:
            dx += product
        else:
            dx[...] = product

    def embedding(self, ids: Array, w: QuantMatrix, scale: float, out: Array) -> None:
        """out (T, K) = scale · W[ids], ids int32 (T,).

        Raises:
            KernelError: an id is not a row of W.
        """
        from ._weights import expand

        if ids.size and not (ids.min() >= 0 and ids.max() < w.rows):
            raise KernelError(
                f"token ids range over [{ids.min()}, {ids.max()}] but {w.name!r} has {w.rows} rows:"
                " the tokenizer does not belong to the model"
            )
        out[...] = scale * expand(attrs.evolve(w, data=w.data[ids]))


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """The ops, sharing one cache of expanded weights."""
    from ._weights import WeightCache

    ops = WeightOps(WeightCache())
    return [
        KernelImpl(op="matmul", format=ANY_FORMAT, fn=ops.matmul, variant="reference"),
        KernelImpl(op="matmul_input_grad", format=ANY_FORMAT, fn=ops.matmul_input_grad, variant="reference"),
        KernelImpl(op="embedding", format=ANY_FORMAT, fn=ops.embedding, variant="reference"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `reference.matmul`."""
    return [
        Component(
            name="reference.matmul",
            config=NoConfig,
            build=build,
            summary="Products with weights of any format, expanded to float64.",
            needs=("backend",),
        )
    ]
