"""How a product is cut into tasks: columns of the result a panel, tokens a chunk."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from ._gemm_kernels import Product
from ._gemm_workspace import round_up

PANEL = 128
"""Columns of a task where a variant does not say how much of a panel its second cache holds."""
CHUNK_TOKENS = 128
"""Fewest tokens of a chunk."""
WIDEST = 384
"""Columns of the widest panel: as decoded, 32 rows of it are as much as the first cache holds."""
READING = 32
"""Reading the activations of a task costs as much as so many columns more."""
SIMULATED = 256
"""Up to so many tasks their turns are followed one by one."""


def widest_panel(product: Product, depth: int, step: int, width: int) -> int:
    """Columns, a multiple of `step`, of the widest panel for `depth` steps of the sum.

    Each panel reads all activations again, which are seldom in the second cache, so it is as wide as that
    holds.
    """
    if not product.panel_floats:
        return max(step, PANEL // step * step)
    floats = round_up(min(depth, product.depth), 32) / product.weights_per_float
    return max(step, width, min(WIDEST, int(product.panel_floats / floats)) // step * step)


@lru_cache(maxsize=1024)
def task_blocks(
    sizes: Sequence[int],
    tokens: int,
    *,
    step: int,
    widest: int,
    token_block: int,
    threads: int,
    decoding: int,
) -> tuple[int, int]:
    """(panel, chunk): columns and tokens of a task, so that `threads` are done soonest.

    `sizes` are the columns of each result; panels are multiples of `step` up to `widest`. Decoding a column
    costs what multiplying `decoding` tokens by it does.
    """
    best, chosen = float("inf"), (step, tokens)
    for parts in range(1, min(3 * threads, max(1, tokens // CHUNK_TOKENS)) + 1):
        chunk = round_up(max(1, -(-tokens // parts)), token_block)
        for panel in range(step, min(widest, round_up(max(sizes), step)) + 1, step):
            time = _time(sizes, panel, tokens, chunk, threads, decoding)
            if time < best:
                best, chosen = time, (panel, chunk)
    return chosen


def _time(sizes: Sequence[int], panel: int, tokens: int, chunk: int, threads: int, decoding: int) -> float:
    """When the last thread is done, if each takes the next task once it is free."""
    widths = [min(panel, size - first) for size in sizes for first in range(0, size, panel)]
    chunks = [min(chunk, tokens - first) for first in range(0, tokens, chunk)]
    if len(widths) * len(chunks) > SIMULATED * threads:
        total = sum((width + READING) * tokens + width * decoding * len(chunks) for width in widths)
        return total / threads
    ends = [0.0] * threads
    for size in sizes:
        own = [min(panel, size - first) for first in range(0, size, panel)]
        for part in chunks:
            for width in own:
                heapq.heapreplace(ends, ends[0] + (width + READING) * part + width * decoding)
    return max(ends)
