"""Projections of one input with their adapters: the ops `project` and `project_backward`.

An adapter is more of the same product. Forward, x is converted once for all weights and all a;
hidden = x · aᵀ is another panel of columns, and hidden · bᵀ continues the sums of x · Wᵀ where they stand.
Backward, each dout is converted once, and dx is one sum over all weights and adapters.

Source: Hu et al. 2021, equation 3, and its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import attrs
import numpy as np

from retrograd_hookspecs import KernelError, LowRank, QuantMatrix

from ._decode import FORMATS, decoder
from ._gemm import CHUNK_TOKENS, DECODED, PANEL, PRODUCT_TOKENS, WeightOps
from ._gemm_kernels import Product, Variant
from ._gemm_workspace import Floats, Workspace, check, round_up
from ._project_drivers import project_backward_parallel, project_parallel
from ._project_parts import STEP
from ._rows_kinds import BLOCK

SLICE_VALUES = 8 << 20
"""Converted activations of a call, to bound the scratch; longer passes go through in slices of tokens."""
SLICE_TOKENS = 512
"""Fewest tokens of a slice: decoding the weights once more costs little beside so many."""


@attrs.define(kw_only=True)
class Sizes:
    """Sizes and addresses of one call, in the order in which the drivers read them.

    Strides are in float32 elements, places in the scratch of a thread in bytes.
    """

    tokens: int
    columns: int
    width: int
    per_float: int
    a_step: int
    token_block: int
    block: int
    """Tokens of a task of the first region."""
    panel: int
    chunk: int
    depth: int
    threads: int
    x: int
    dx: int = 0
    sub_stride: int = 0
    accumulate: int = 0
    turned_stride: int = 0
    """Between the rows of converted transposes (rank, tokens)."""
    scratch: int = 0
    thread_bytes: int = 0
    panel_at: int = 0
    spare_at: int = 0
    result_at: int = 0
    piece: int = DECODED
    a: int = 0
    """Converted x."""
    a_stride: int = 0


@attrs.define(kw_only=True)
class Job:
    """One projection, in the order in which the drivers read it."""

    rows: int
    row_bytes: int
    block_values: int
    block_bytes: int
    unpack: int
    decode: int
    data: int
    """Address of the weight; 0 leaves its product out."""
    tasks: int = 0
    """Forward the panels and chunks of out; backward the panels of db."""
    out: int
    """Forward out, backward dout."""
    rank: int = 0
    """0 without an adapter."""
    a: int = 0
    b: int = 0
    packed: int = 0
    """Room for the packed a (forward) or b (backward)."""
    packed_stride: int = 0
    hidden: int = 0
    left: int = 0
    """Room for the converted dout."""
    left_stride: int = 0
    low: int = 0
    """Room for converted scale · hidden, backward scale · dout · b."""
    low_stride: int = 0
    turned: int = 0
    """Room for the transpose of that."""
    turned_hidden: int = 0
    da: int = 0
    db: int = 0


_SIZES, _JOB = (attrgetter(*(field.name for field in attrs.fields(one))) for one in (Sizes, Job))
"""Many times faster than `attrs.astuple`, which shows where tokens are decoded one by one."""


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
        self._address = 0

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
        product = variant.forward
        panel = max(variant.width, PANEL // variant.width * variant.width)
        panels = sum(-(-weight.rows // panel) for weight in weights)
        sizes = self._sizes(variant, product, x, weights[0].columns, panel, panels, adapters)
        arena = Arena()
        columns, tokens = sizes.columns, round_up(sizes.tokens, sizes.token_block)
        a_at = arena.take(tokens * sizes.a_stride)
        jobs = []
        for weight, adapter, out in zip(weights, adapters, outs, strict=True):
            job = self._job(weight, out, few)
            job.tasks = -(-weight.rows // panel) * -(-sizes.tokens // sizes.chunk)
            if adapter is not None:
                _adapt(job, adapter)
                job.packed_stride = round_up(columns, STEP) * variant.width // product.weights_per_float
                job.packed = arena.take(-(-job.rank // variant.width) * job.packed_stride)
                job.low_stride = product.activation_stride(job.rank)
                job.low = arena.take(tokens * job.low_stride)
            elif few:
                job.tasks = 0
            jobs.append(job)
        self._run(project_parallel, product, sizes, jobs, adapters, arena, variant.width * DECODED, a_at)

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
        product = variant.precise_gradient if precise else variant.gradient
        step = max(variant.width, *(FORMATS[weight.format].values for weight in weights))
        panel = max(step, PANEL // step * step)
        while panel // 2 >= step and -(-weights[0].columns // panel) < 4 * self._threads:
            panel //= 2
        panels = -(-weights[0].columns // panel)
        sizes = self._sizes(variant, product, x, weights[0].columns, panel, panels, adapters)
        sizes.dx, sizes.accumulate = dx.ctypes.data, int(accumulate)
        sizes.turned_stride = product.activation_stride(sizes.tokens)
        arena = Arena()
        tokens = round_up(sizes.tokens, sizes.token_block)
        jobs = []
        for weight, adapter, dout in zip(weights, adapters, douts, strict=True):
            job = self._job(weight, dout, False)
            job.left_stride = product.activation_stride(weight.rows)
            job.left = arena.take(tokens * job.left_stride)
            if adapter is not None:
                _adapt(job, adapter)
                job.da, job.db = adapter.da.ctypes.data, adapter.db.ctypes.data
                job.tasks = -(-weight.rows // panel)
                job.packed_stride = round_up(weight.rows, STEP) * variant.width // product.weights_per_float
                job.packed = arena.take(-(-job.rank // variant.width) * job.packed_stride)
                job.low_stride = product.activation_stride(job.rank)
                job.low = arena.take(tokens * job.low_stride)
                turned = round_up(job.rank, sizes.token_block) * sizes.turned_stride
                job.turned, job.turned_hidden = arena.take(turned), arena.take(turned)
            jobs.append(job)
        widest = max(panel, *(round_up(job.rank, variant.width) for job in jobs))
        self._run(project_backward_parallel, product, sizes, jobs, adapters, arena, STEP * widest)

    def _sizes(
        self,
        variant: Variant,
        product: Product,
        x: Floats,
        columns: int,
        panel: int,
        panels: int,
        adapters: Sequence[LowRank | None],
    ) -> Sizes:
        tokens = x.shape[0]
        parts = min(-(-3 * self._threads // panels), max(1, tokens // CHUNK_TOKENS))
        ranks = [one.a.shape[0] for one in adapters if one is not None]
        deepest = max(product.depth, *(round_up(rank, STEP) for rank in ranks), STEP)
        return Sizes(
            tokens=tokens,
            columns=columns,
            width=variant.width,
            per_float=product.weights_per_float,
            a_step=product.activation_step,
            token_block=variant.token_block,
            block=variant.token_block * max(1, STEP // variant.token_block),
            panel=panel,
            chunk=round_up(-(-tokens // parts), variant.token_block),
            depth=product.depth,
            threads=self._threads,
            x=x.ctypes.data,
            sub_stride=deepest * variant.width // product.weights_per_float,
            a_stride=product.activation_stride(columns),
        )

    def _job(self, weight: QuantMatrix, out: Floats, few: bool) -> Job:
        ops = self._weights(weight.format)
        layout = ops.format
        unpack, decode = ops.entries()
        data = ops.weight_bytes(weight)
        return Job(
            rows=weight.rows,
            row_bytes=weight.data.shape[1],
            block_values=layout.values,
            block_bytes=layout.bytes,
            unpack=unpack if weight.columns % BLOCK == 0 else 0,
            decode=decode,
            data=0 if few else data.ctypes.data,
            out=out.ctypes.data,
        )

    def _run(
        self,
        driver: Callable[..., None],
        product: Product,
        sizes: Sizes,
        jobs: Sequence[Job],
        adapters: Sequence[LowRank | None],
        arena: Arena,
        decoded: int,
        a_at: int = 0,
    ) -> None:
        """Lay the scratch out, turn places into addresses, and run."""
        if self._copy is None:
            self._copy = decoder(FORMATS["F32"])
        rank = max(job.rank for job in jobs)
        thread = Arena()
        thread.take(decoded)
        sizes.panel_at = thread.take(max(sizes.panel // sizes.width * sizes.sub_stride, sizes.block * rank))
        sizes.spare_at = thread.take(sizes.token_block * sizes.width)
        sizes.result_at = thread.take(rank * sizes.panel)
        sizes.thread_bytes = 4 * thread.floats
        kept = self._workspace.activations(arena.floats)
        scratch = self._workspace.scratch(thread.floats * sizes.threads)
        base, sizes.scratch = kept.ctypes.data, scratch.ctypes.data
        sizes.a = base + a_at
        for job in jobs:
            for place in ("packed", "left", "low", "turned", "turned_hidden"):
                setattr(job, place, base + getattr(job, place))
        driver(
            product.convert.address,
            product.pack.address,
            product.multiply.address,
            self._copy.address,
            np.array(_SIZES(sizes), np.int64),
            np.array([_JOB(job) for job in jobs], np.int64),
            np.array([one.scale if one is not None else 0.0 for one in adapters], np.float32),
            self._workspace.counter,
        )


class Arena:
    """Hands out parts of a buffer that begin on cache lines."""

    def __init__(self) -> None:
        self.floats = 0

    def take(self, floats: int) -> int:
        """Offset in bytes of a part of `floats` float32."""
        start = self.floats
        self.floats += round_up(floats, 16)
        return 4 * start


def _adapt(job: Job, adapter: LowRank) -> None:
    job.rank = adapter.a.shape[0]
    job.a, job.b, job.hidden = (one.ctypes.data for one in (adapter.a, adapter.b, adapter.hidden))


def _check_adapter(adapter: LowRank, weight: QuantMatrix, tokens: int) -> None:
    rank = adapter.a.shape[0]
    if rank == 0:
        raise KernelError(f"the adapter of {weight.name!r} has rank 0; detach it instead")
    check("a", adapter.a, (rank, weight.columns), weight)
    check("b", adapter.b, (weight.rows, rank), weight)
    check("hidden", adapter.hidden, (tokens, rank), weight, written=True)
