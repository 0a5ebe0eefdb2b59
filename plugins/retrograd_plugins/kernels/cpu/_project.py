"""Projections of one input with their adapters: the ops `project` and `project_backward`.

An adapter is more of the same product. Forward, x is converted once for all weights and all a;
hidden = x · aᵀ is another panel of columns, and hidden · bᵀ continues the sums of x · Wᵀ where they stand.
Backward, each dout is converted once, and dx is one sum over all weights and adapters.

Source: Hu et al. 2021, equation 3, and its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import KernelError, LowRank, QuantMatrix

from ._decode import FORMATS, decoder
from ._gemm import KEPT_PLANS, PRODUCT_TOKENS, WeightOps
from ._gemm_kernels import Product, Variant
from ._gemm_workspace import Floats, Workspace, check
from ._project_drivers import project_backward_parallel, project_parallel
from ._project_layout import SIZE_OF, Layout, Operand, backward_layout, forward_layout
from ._project_parts import DA, DATA, DB, HIDDEN, OUT, A, B

SLICE_VALUES = 8 << 20
"""Converted activations of a call, to bound the scratch; longer passes go through in slices of tokens."""
SLICE_TOKENS = 512
"""Fewest tokens of a slice: decoding the weights once more costs little beside so many."""


class ProjectOps:
    """The ops on one instruction set, for weights of all formats that have a decoder."""

    def __init__(
        self,
        weights: Callable[[str], WeightOps],
        load_variant: Callable[[], Variant],
        threads: int,
        workspace: Workspace,
    ) -> None:
        self._weights = weights
        self._load_variant = load_variant
        self._threads = threads
        self._workspace = workspace
        self._copy: Any = None
        self._layouts: dict[Any, Layout] = {}

    def project(
        self,
        x: Floats,
        weights: Sequence[QuantMatrix],
        adapters: Sequence[LowRank | None],
        outs: Sequence[Floats],
    ) -> None:
        """out (T, N) = x (T, K) · Wᵀ, plus scale · hidden · bᵀ and hidden (T, r) = x · aᵀ, for each weight.

        Raises:
            KernelError: shapes, types or layout do not fit.
        """
        tokens, columns = x.shape[0], weights[0].columns
        for weight, adapter, out in zip(weights, adapters, outs, strict=True):
            check("x", x, (tokens, columns), weight)
            check("out", out, (tokens, weight.rows), weight, written=True)
            if adapter is not None:
                _check_adapter(adapter, weight, tokens)
        if not any(adapters) and (tokens <= PRODUCT_TOKENS or len(weights) == 1):
            for weight, out in zip(weights, outs, strict=True):
                self._weights(weight.format).matmul(x, weight, out)
            return
        kept = [self._weights(weight.format) for weight in weights]
        # So few tokens are multiplied while the weights are unpacked; the adapter is added to the same sums.
        few = tokens <= PRODUCT_TOKENS
        if few:
            for ops, weight, out in zip(kept, weights, outs, strict=True):
                ops.matmul(x, weight, out)
        step = max(SLICE_TOKENS, SLICE_VALUES // columns)
        if tokens <= step:
            with self._workspace.lock:
                self._forward(x, weights, adapters, outs, few)
            return
        with self._workspace.lock:
            for first in range(0, tokens, step):
                part = slice(first, min(tokens, first + step))
                lows = [one and attrs.evolve(one, hidden=one.hidden[part]) for one in adapters]
                self._forward(x[part], weights, lows, [out[part] for out in outs], few)

    def project_backward(
        self,
        douts: Sequence[Floats],
        x: Floats,
        weights: Sequence[QuantMatrix],
        adapters: Sequence[LowRank | None],
        dx: Floats,
        accumulate: bool,
        precise: bool = False,
    ) -> None:
        """dx (T, K) = the sum of dout · W + scale · dout · b · a, or adds to it; adds to each da and db.

        Raises:
            KernelError: shapes, types or layout do not fit.
        """
        tokens, columns = x.shape[0], weights[0].columns
        check("x", x, (tokens, columns), weights[0])
        for weight, adapter, dout in zip(weights, adapters, douts, strict=True):
            check("dx", dx, (tokens, columns), weight, written=True)
            check("dout", dout, (tokens, weight.rows), weight)
            if adapter is not None:
                _check_adapter(adapter, weight, tokens)
                check("da", adapter.da, adapter.a.shape, weight, written=True)
                check("db", adapter.db, adapter.b.shape, weight, written=True)
        step = max(SLICE_TOKENS, SLICE_VALUES // sum(weight.rows for weight in weights))
        with self._workspace.lock:
            for first in range(0, tokens, step):
                part = slice(first, min(tokens, first + step))
                lows = [one and attrs.evolve(one, hidden=one.hidden[part]) for one in adapters]
                parts = [dout[part] for dout in douts]
                self._backward(parts, x[part], weights, lows, dx[part], bool(accumulate), precise)

    def _forward(
        self,
        x: Floats,
        weights: Sequence[QuantMatrix],
        adapters: Sequence[LowRank | None],
        outs: Sequence[Floats],
        few: bool,
    ) -> None:
        variant = self._load_variant()
        layout = self._layout("few" if few else "forward", x, weights, adapters, forward_layout, few)
        layout.place(self._workspace)
        layout.sizes[SIZE_OF["x"]] = x.ctypes.data
        self._address_jobs(layout.jobs, weights, adapters, outs, few)
        self._run(project_parallel, variant.forward, layout, adapters)

    def _backward(
        self,
        douts: Sequence[Floats],
        x: Floats,
        weights: Sequence[QuantMatrix],
        adapters: Sequence[LowRank | None],
        dx: Floats,
        accumulate: bool,
        precise: bool,
    ) -> None:
        variant = self._load_variant()
        kind = "precise" if precise else "gradient"
        layout = self._layout(kind, x, weights, adapters, backward_layout, precise)
        layout.place(self._workspace)
        sizes = layout.sizes
        sizes[SIZE_OF["x"]], sizes[SIZE_OF["dx"]] = x.ctypes.data, dx.ctypes.data
        sizes[SIZE_OF["accumulate"]] = int(accumulate)
        self._address_jobs(layout.jobs, weights, adapters, douts, False)
        for job, adapter in zip(layout.jobs, adapters, strict=True):
            if adapter is not None:
                job[DA], job[DB] = adapter.da.ctypes.data, adapter.db.ctypes.data
        product = variant.precise_gradient if precise else variant.gradient
        self._run(project_backward_parallel, product, layout, adapters)

    def _layout(
        self,
        kind: str,
        x: Floats,
        weights: Sequence[QuantMatrix],
        adapters: Sequence[LowRank | None],
        make: Callable[..., Layout],
        flag: bool,
    ) -> Layout:
        """The layout for these shapes; kept for the next call with them."""
        ranks = [0 if one is None else one.a.shape[0] for one in adapters]
        shapes = tuple(
            (weight.format, weight.data.shape, rank) for weight, rank in zip(weights, ranks, strict=True)
        )
        key = (kind, x.shape, shapes)
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= KEPT_PLANS:
                self._layouts.clear()
            operands = [
                Operand(ops=self._weights(format), rows=data[0], row_bytes=data[1], rank=rank)
                for format, data, rank in shapes
            ]
            found = make(self._load_variant(), operands, *x.shape, flag, self._threads)
            self._layouts[key] = found
        return found

    def _address_jobs(
        self,
        jobs: npt.NDArray[np.int64],
        weights: Sequence[QuantMatrix],
        adapters: Sequence[LowRank | None],
        outs: Sequence[Floats],
        few: bool,
    ) -> None:
        for job, weight, adapter, out in zip(jobs, weights, adapters, outs, strict=True):
            job[DATA] = 0 if few else self._weights(weight.format).weight_bytes(weight).ctypes.data
            job[OUT] = out.ctypes.data
            if adapter is not None:
                job[A], job[B] = adapter.a.ctypes.data, adapter.b.ctypes.data
                job[HIDDEN] = adapter.hidden.ctypes.data

    def _run(
        self,
        driver: Callable[..., None],
        product: Product,
        layout: Layout,
        adapters: Sequence[LowRank | None],
    ) -> None:
        if self._copy is None:
            self._copy = decoder(FORMATS["F32"])
        driver(
            product.convert.address,
            product.pack.address,
            product.multiply.address,
            self._copy.address,
            layout.sizes,
            layout.jobs,
            np.array([one.scale if one is not None else 0.0 for one in adapters], np.float32),
            self._workspace.counter,
        )


def _check_adapter(adapter: LowRank, weight: QuantMatrix, tokens: int) -> None:
    rank = adapter.a.shape[0]
    if rank == 0:
        raise KernelError(f"the adapter of {weight.name!r} has rank 0; detach it instead")
    check("a", adapter.a, (rank, weight.columns), weight)
    check("b", adapter.b, (weight.rows, rank), weight)
    check("hidden", adapter.hidden, (tokens, rank), weight, written=True)
