"""What one pass evaluates: runs of consecutive tokens, and the only place where segments are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import Backend


@attrs.frozen(eq=False, kw_only=True)
class Run:
    """Consecutive tokens of one sequence within a pass.

    `row` is None for a sequence that lies wholly in the pass: its keys and values are the pass's own.
    Otherwise the sequence's earlier `start` tokens are in the key/value cache at rows
    [row, row + start), and the run's own keys and values are written behind them.
    """

    tokens: npt.NDArray[np.int32]
    start: int = 0
    row: int | None = None


@attrs.frozen(kw_only=True)
class CachedRun:
    """Where a run's keys and values lie: rows [query, query + length) of the pass are rows
    [row + start, row + start + length) of the cache, after a context of `start` rows from `row`."""

    query: int
    length: int
    row: int
    start: int


@attrs.frozen(eq=False, kw_only=True)
class PassBatch:
    """A pass as modules see it: `tokens` and `positions` int32 (T,), `segments` int64 (S, 5).

    Without `cached` runs, segments refer to the keys and values of the pass itself. With them, they
    refer to the rows of a `KVCache`: first its sequence rows, then one row a token of the pass for the
    runs in `loose` that need no cache, given as (first, stop) of the pass.
    """

    length: int
    max_position: int
    tokens: Any
    positions: Any
    segments: Any
    cached: tuple[CachedRun, ...] = ()
    loose: tuple[tuple[int, int], ...] = ()


def build_pass(runs: Sequence[Run], backend: Backend, *, cache_rows: int = 0) -> PassBatch:
    """Lay `runs` one after another. `cache_rows` is the number of sequence rows of the cache in use."""
    uses_cache = any(run.row is not None for run in runs)
    segments = np.zeros((len(runs), 5), dtype=np.int64)
    positions: list[npt.NDArray[np.int32]] = []
    cached: list[CachedRun] = []
    loose: list[tuple[int, int]] = []
    query = 0
    for segment, run in zip(segments, runs, strict=True):
        length = len(run.tokens)
        if run.row is not None:
            cached.append(CachedRun(query=query, length=length, row=run.row, start=run.start))
            segment[:] = query, length, run.row, run.start, run.row + run.start
        else:
            first_key = cache_rows + query if uses_cache else query
            loose.append((query, query + length))
            segment[:] = query, length, first_key, 0, first_key
        positions.append(np.arange(run.start, run.start + length, dtype=np.int32))
        query += length
    tokens = np.concatenate([np.asarray(run.tokens, dtype=np.int32) for run in runs])
    return PassBatch(
        length=query,
        max_position=max(run.start + len(run.tokens) for run in runs) - 1,
        tokens=backend.from_host(tokens),
        positions=backend.from_host(np.concatenate(positions)),
        segments=backend.from_host(segments),
        cached=tuple(cached),
        loose=tuple(loose) if uses_cache else (),
    )
