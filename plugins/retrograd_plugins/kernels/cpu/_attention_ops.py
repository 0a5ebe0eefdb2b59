"""The ops `attention` and `attention_backward` of the `cpu` backend."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numba
import numpy as np

from retrograd_hookspecs import KernelError

from ._attention_blocks import queries_per_block, query_blocks, round_up, survey_segments
from ._attention_forward import ATTEND_ADDRESS, forward, forward_scratch
from ._gemm_workspace import aligned_floats
from ._math_common import Array, require_shape
from ._math_tiles import TILE_ROWS
from ._simd import WIDTH

SERIAL_PRODUCTS = 1 << 18
"""Below this many multiply-adds the calling thread alone is faster than all threads."""


Work = Callable[[str, int], Array]
"""`work(name, elements)`: float32 scratch memory of the calling thread, with what was left in it."""
Forward = Callable[..., None]
"""Attention of arrays that fit: the arguments of `attention`, then threads and `Work`."""
Backward = Callable[..., None]
"""Gradients on arrays that fit: the arguments of `attention_backward`, then threads and `Work`."""


def float_forward(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    scale: float,
    window: int,
    softcap: float,
    out: Array,
    lse: Array,
    threads: int,
    work: Work,
) -> None:
    """Products in float32."""
    block, rows, width = block_shape(q, k)
    stride = line(forward_scratch(rows, width))
    forward(
        ATTEND_ADDRESS,
        q,
        k,
        v,
        segments,
        query_blocks(segments, block),
        block,
        scale,
        window,
        softcap,
        out,
        lse,
        work("work", stride * threads),
        stride,
        np.empty(1, np.int64),
        threads,
    )


def load_tile_forward() -> Forward:
    """Products of AMX tiles, of operands in halves; compiled when this is called."""
    from ._attention_packs import queries_per_chunk
    from ._attention_tiles_forward import ATTEND_TILES_ADDRESS, tile_forward_scratch

    def tile_forward(
        q: Array,
        k: Array,
        v: Array,
        segments: Array,
        scale: float,
        window: int,
        softcap: float,
        out: Array,
        lse: Array,
        threads: int,
        work: Work,
    ) -> None:
        (_, heads, size), groups = q.shape, k.shape[1]
        chunk = queries_per_chunk(heads, groups, size)
        stride = line(tile_forward_scratch(chunk * heads // groups, size))
        forward(
            ATTEND_TILES_ADDRESS,
            q,
            k,
            v,
            segments,
            query_blocks(segments, chunk),
            chunk,
            scale,
            window,
            softcap,
            out,
            lse,
            work("work", stride * threads),
            stride,
            np.empty(1, np.int64),
            threads,
        )

    return tile_forward


def float_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    segments: Array,
    scale: float,
    window: int,
    softcap: float,
    dq: Array,
    dk: Array,
    dv: Array,
    threads: int,
    work: Work,
) -> None:
    """Products in float32, in two passes."""
    # Compiled when it is imported, which takes seconds: not where tiles serve.
    from ._attention_backward import (
        KEY_GRADIENT_ADDRESS,
        QUERY_GRADIENT_ADDRESS,
        backward_scratch,
        key_gradients,
        query_gradients,
    )

    block, rows, width = block_shape(q, k)
    stride = line(backward_scratch(rows, width))
    delta = work("delta", lse.size)[: lse.size].reshape(lse.shape)
    scratch = work("work", stride * threads)
    counter = np.empty(1, np.int64)
    query_gradients(
        QUERY_GRADIENT_ADDRESS,
        dout,
        q,
        k,
        v,
        out,
        lse,
        delta,
        segments,
        query_blocks(segments, block),
        scale,
        window,
        softcap,
        dq,
        scratch,
        stride,
        counter,
        threads,
    )
    key_gradients(
        KEY_GRADIENT_ADDRESS,
        dout,
        q,
        k,
        v,
        lse,
        delta,
        segments,
        scale,
        window,
        softcap,
        dk,
        dv,
        scratch,
        stride,
        counter,
        threads,
    )


def load_tile_backward() -> Backward:
    """Products of AMX tiles, of bfloat16, in one pass; compiled when this is called."""
    from ._attention_packs import queries_per_chunk
    from ._attention_tiles import CHUNK_GRADIENT_ADDRESS, tile_gradients, tile_scratch

    def tile_backward(
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        segments: Array,
        scale: float,
        window: int,
        softcap: float,
        dq: Array,
        dk: Array,
        dv: Array,
        threads: int,
        work: Work,
    ) -> None:
        (_, heads, size), groups = q.shape, k.shape[1]
        chunk = queries_per_chunk(heads, groups, size)
        chunks = query_blocks(segments, chunk)
        stride = line(tile_scratch(chunk * heads // groups, size))
        tile_gradients(
            CHUNK_GRADIENT_ADDRESS,
            dout,
            q,
            k,
            v,
            out,
            lse,
            segments,
            chunks,
            chunk,
            scale,
            window,
            softcap,
            dq,
            dk,
            dv,
            work("work", stride * threads),
            stride,
            np.zeros(len(chunks) * groups, np.int64),
            np.zeros(1, np.int64),
            threads,
        )

    return tile_backward


class Attention:
    """The two ops and their scratch memory, which grows to what the largest call needs."""

    def __init__(
        self,
        load_forward: Callable[[], Forward] = lambda: float_forward,
        load_backward: Callable[[], Backward] = lambda: float_backward,
    ) -> None:
        self._load_forward, self._load_backward = load_forward, load_backward
        self._forward: Forward | None = None
        self._backward: Backward | None = None
        # A call releases the interpreter lock, so each Python thread has scratch of its own.
        self._scratch = threading.local()

    def _work(self, name: str, elements: int) -> Array:
        held: Array | None = getattr(self._scratch, name, None)
        if held is None or held.size < elements:
            held = aligned_floats(elements)
            setattr(self._scratch, name, held)
        return held

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        segments: Array,
        scale: float,
        window: int,
        softcap: float,
        out: Array,
        lse: Array,
    ) -> None:
        """Attention of q (T, H, D) over k, v (M, G, D) by `segments` into out (T, H, D) and lse (T, H).

        Rows of q in no segment get out = 0 and lse = −inf.

        Raises:
            KernelError: shapes do not fit, or a segment leaves the arrays.
        """
        covered, threads = check_attention("attention", q, k, v, segments, out, lse)
        if not covered:
            out.fill(0.0)
            lse.fill(-np.inf)
        if self._forward is None:
            self._forward = self._load_forward()
        self._forward(q, k, v, segments, scale, window, softcap, out, lse, threads, self._work)

    def attention_backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        segments: Array,
        scale: float,
        window: int,
        softcap: float,
        dq: Array,
        dk: Array,
        dv: Array,
    ) -> None:
        """Gradients of `attention`: overwrites dq (T, H, D), adds to dk and dv (M, G, D).

        `out` and `lse` are those that `attention` gave.

        Raises:
            KernelError: shapes do not fit, or a segment leaves the arrays.
        """
        op = "attention_backward"
        covered, threads = check_attention(op, q, k, v, segments, out, lse)
        for name, array, like in (("dout", dout, q), ("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
            require_shape(op, name, array, like.shape)
        if not covered:
            dq.fill(0.0)
        if self._backward is None:
            self._backward = self._load_backward()
        self._backward(
            dout, q, k, v, out, lse, segments, scale, window, softcap, dq, dk, dv, threads, self._work
        )


def block_shape(q: Array, k: Array) -> tuple[int, int, int]:
    """Queries of a block, rows of its panels, and width of a panel."""
    heads, size = q.shape[1:]
    groups = k.shape[1]
    block = int(queries_per_block(heads, groups))
    return block, int(round_up(block * heads // groups, TILE_ROWS)), int(round_up(size, WIDTH))


def line(elements: int) -> int:
    """`elements` float32 and at least a cache line between two threads."""
    return int(round_up(elements, WIDTH)) + WIDTH


def check_attention(
    op: str, q: Array, k: Array, v: Array, segments: Array, out: Array, lse: Array
) -> tuple[bool, int]:
    """Whether the segments cover all queries, and on how many threads to work.

    Raises:
        KernelError: the arrays do not fit together, or a segment leaves them.
    """
    tokens, heads, size = q.shape
    if k.shape[2] != size or k.shape[1] < 1 or heads % k.shape[1]:
        raise KernelError(
            f"{op}: q has {heads} heads of {size} and k {k.shape[1]} of {k.shape[2]}; the sizes must be equal"
            " and the number of query heads a multiple of the key heads"
        )
    require_shape(op, "v", v, k.shape)
    require_shape(op, "out", out, q.shape)
    require_shape(op, "lse", lse, (tokens, heads))
    require_shape(op, "segments", segments, (segments.shape[0], 5))
    bad, queries, pairs = survey_segments(segments, tokens, k.shape[0])
    if bad >= 0:
        raise KernelError(
            f"{op}: segment {bad} is {segments[bad].tolist()} (query start, length, context start, context"
            f" length, key start), which leaves the {tokens} queries or the {k.shape[0]} keys"
        )
    few = pairs * heads * size < SERIAL_PRODUCTS
    return queries == tokens, 1 if few else int(numba.get_num_threads())
