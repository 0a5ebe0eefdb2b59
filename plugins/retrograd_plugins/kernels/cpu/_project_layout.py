"""Where things lie in a call of `project` or `project_backward`: made once for each shape.

What a call adds are addresses of arrays: tokens are decoded one by one, and a pass of a few hundred has
hundreds of calls, so that laying out anew what never changes would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import attrs
import numpy as np

from ._gemm import DECODED, WeightOps
from ._gemm_blocks import task_blocks, widest_panel
from ._gemm_kernels import Product, Variant
from ._gemm_workspace import Workspace, round_up
from ._project_parts import LEFT, LOW, PACKED, STEP, TURNED, TURNED_HIDDEN
from ._rows_kinds import BLOCK

PLACES = [PACKED, LEFT, LOW, TURNED, TURNED_HIDDEN]


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
    x: int = 0
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
    low_at: int = 0
    """The packed part of b (backward a) that continues a panel."""
    low_sub: int = 0
    """Between its sub-panels."""
    ranks: int = 0
    """Forward the sum of all ranks."""
    factors: int = 0
    """Forward the packed rows of all a."""
    factors_stride: int = 0


@attrs.define(kw_only=True)
class Job:
    """One projection, in the order in which the drivers read it."""

    rows: int
    row_bytes: int
    block_values: int
    block_bytes: int
    unpack: int
    decode: int
    data: int = 0
    """Address of the weight; 0 leaves its product out."""
    tasks: int = 0
    """Forward the panels and chunks of out; backward the panels of db."""
    out: int = 0
    """Forward out, backward dout."""
    rank: int = 0
    """0 without an adapter."""
    a: int = 0
    b: int = 0
    packed: int = 0
    """Backward, room for the packed b."""
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
SIZE_OF = {field.name: place for place, field in enumerate(attrs.fields(Sizes))}
"""Places of the fields of `Sizes` in their array."""


@attrs.frozen(kw_only=True)
class Operand:
    """What the layout needs to know of one projection."""

    ops: WeightOps
    rows: int
    row_bytes: int
    rank: int
    """0 without an adapter."""


class Layout:
    """The arrays of sizes and jobs of one shape, with all but the addresses of a call's arrays filled in."""

    def __init__(
        self, sizes: Sizes, jobs: Sequence[Job], arena: Arena, thread: Arena, a_at: int, factors_at: int
    ) -> None:
        self.sizes = np.array(_SIZES(sizes), np.int64)
        self.jobs = np.array([_JOB(job) for job in jobs], np.int64)
        self._floats, self._thread_floats = arena.floats, thread.floats * sizes.threads
        self._a_at, self._factors_at = a_at, factors_at
        self._offsets = self.jobs[:, PLACES]
        self._base = 0

    def place(self, workspace: Workspace) -> None:
        """Turn places in the scratch into addresses; `workspace.lock` is held."""
        base = workspace.activations(self._floats).ctypes.data
        scratch = workspace.scratch(self._thread_floats).ctypes.data
        self.sizes[SIZE_OF["scratch"]] = scratch
        if base != self._base:
            self._base = base
            self.sizes[SIZE_OF["a"]] = base + self._a_at
            self.sizes[SIZE_OF["factors"]] = base + self._factors_at
            self.jobs[:, PLACES] = base + self._offsets


class Arena:
    """Hands out parts of a buffer that begin on cache lines."""

    def __init__(self) -> None:
        self.floats = 0

    def take(self, floats: int) -> int:
        """Offset in bytes of a part of `floats` float32."""
        start = self.floats
        self.floats += round_up(floats, 16)
        return 4 * start


def forward_layout(
    variant: Variant, operands: Sequence[Operand], tokens: int, columns: int, few: bool, threads: int
) -> Layout:
    """Of `project`; with `few` only the adapters, which add to products made elsewhere."""
    product = variant.forward
    panel, chunk = task_blocks(
        tuple(one.rows for one in operands),
        tokens,
        step=variant.width,
        widest=widest_panel(product, columns, variant.width, variant.width),
        token_block=variant.token_block,
        threads=threads,
        decoding=product.decoding,
    )
    sizes = _sizes(variant, product, operands, tokens, columns, panel, chunk, threads, columns)
    arena = Arena()
    padded = round_up(tokens, sizes.token_block)
    a_at = arena.take(padded * sizes.a_stride)
    sizes.ranks = sum(one.rank for one in operands)
    sizes.factors_stride = round_up(columns, STEP) * variant.width // product.weights_per_float
    factors_at = arena.take(-(-sizes.ranks // variant.width) * sizes.factors_stride)
    jobs = []
    for one in operands:
        job = _job(one, columns)
        job.tasks = -(-one.rows // panel) * -(-tokens // chunk)
        if one.rank:
            job.low_stride = product.activation_stride(one.rank)
            job.low = arena.take(padded * job.low_stride)
        elif few:
            job.tasks = 0
        jobs.append(job)
    return _layout(sizes, jobs, arena, variant.width * DECODED, a_at, factors_at)


def backward_layout(
    variant: Variant, operands: Sequence[Operand], tokens: int, columns: int, precise: bool, threads: int
) -> Layout:
    """Of `project_backward`."""
    product = variant.precise_gradient if precise else variant.gradient
    step = max(variant.width, *(one.ops.format.values for one in operands))
    panel, chunk = task_blocks(
        (columns,),
        tokens,
        step=step,
        widest=widest_panel(product, max(one.rows for one in operands), step, variant.width),
        token_block=variant.token_block,
        threads=threads,
        decoding=product.decoding,
    )
    deepest = max(tokens, *(one.rows for one in operands))
    sizes = _sizes(variant, product, operands, tokens, columns, panel, chunk, threads, deepest)
    sizes.turned_stride = product.activation_stride(tokens)
    arena = Arena()
    padded = round_up(tokens, sizes.token_block)
    jobs = []
    for one in operands:
        job = _job(one, columns)
        job.left_stride = product.activation_stride(one.rows)
        job.left = arena.take(padded * job.left_stride)
        if one.rank:
            job.tasks = -(-one.rows // panel)
            job.packed_stride = round_up(one.rows, STEP) * variant.width // product.weights_per_float
            job.packed = arena.take(-(-one.rank // variant.width) * job.packed_stride)
            job.low_stride = product.activation_stride(one.rank)
            job.low = arena.take(padded * job.low_stride)
            turned = round_up(one.rank, sizes.token_block) * sizes.turned_stride
            job.turned, job.turned_hidden = arena.take(turned), arena.take(turned)
        jobs.append(job)
    widest = max(panel, *(round_up(job.rank, variant.width) for job in jobs))
    return _layout(sizes, jobs, arena, STEP * widest)


def _sizes(
    variant: Variant,
    product: Product,
    operands: Sequence[Operand],
    tokens: int,
    columns: int,
    panel: int,
    chunk: int,
    threads: int,
    deepest: int,
) -> Sizes:
    """`deepest` is the longest sum: sub-panels follow each other closely, so that they spread over the sets
    of the second cache."""
    ranks = max(one.rank for one in operands)
    return Sizes(
        tokens=tokens,
        columns=columns,
        width=variant.width,
        per_float=product.weights_per_float,
        a_step=product.activation_step,
        token_block=variant.token_block,
        block=variant.token_block * max(1, STEP // variant.token_block),
        panel=panel,
        chunk=chunk,
        depth=product.depth,
        threads=threads,
        sub_stride=min(product.depth, round_up(deepest, STEP)) * variant.width // product.weights_per_float,
        low_sub=round_up(ranks, STEP) * variant.width // product.weights_per_float,
        a_stride=product.activation_stride(columns),
    )


def _job(one: Operand, columns: int) -> Job:
    layout = one.ops.format
    unpack, decode = one.ops.entries()
    return Job(
        rows=one.rows,
        row_bytes=one.row_bytes,
        block_values=layout.values,
        block_bytes=layout.bytes,
        unpack=unpack if columns % BLOCK == 0 else 0,
        decode=decode,
        rank=one.rank,
    )


def _layout(
    sizes: Sizes, jobs: Sequence[Job], arena: Arena, decoded: int, a_at: int = 0, factors_at: int = 0
) -> Layout:
    rank = max(job.rank for job in jobs)
    sub_panels = -(-sizes.panel // sizes.width)
    thread = Arena()
    thread.take(decoded)
    # The room of the panel serves the first region too: hidden of a block, of all jobs and scaled of one.
    sizes.panel_at = thread.take(max(sub_panels * sizes.sub_stride, sizes.block * (sizes.ranks + rank)))
    sizes.spare_at = thread.take(sizes.token_block * sizes.width)
    sizes.result_at = thread.take(rank * sizes.panel)
    sizes.low_at = thread.take(sub_panels * sizes.low_sub)
    sizes.thread_bytes = 4 * thread.floats
    return Layout(sizes, jobs, arena, thread, a_at, factors_at)
