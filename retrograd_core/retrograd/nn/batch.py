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
    """Consecutive tokens of one sequence within a pass, after `start` earlier ones: its context.

    Where these lie is said by at most one of the others. With `row` they are in the key/value cache at rows
    [row, row + start), and the run's own keys and values are written behind them. With `context_row` they
    are there too, but belong to another sequence that begins with the same tokens: they are read, and the
    run's own keys and values stay with the pass. With `context_run` they are the first tokens of that run
    of the same pass, which must be whole in it. With none of them `start` is 0.
    """

    tokens: npt.NDArray[np.int32]
    start: int = 0
    row: int | None = None
    context_row: int | None = None
    context_run: int | None = None
    shared: tuple[int, int] | None = None
    """(row, count): the keys and values of the first `count` tokens of the context are at `row` as well, as
    those of other runs of the pass. `decode_blocks` reads them there, once for all."""

    @property
    def uses_cache(self) -> bool:
        """Whether rows of the cache are read or written."""
        return self.row is not None or self.context_row is not None


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

    Unless it `uses_cache`, segments refer to the keys and values of the pass itself. Else they refer to the
    rows of a `KVCache`: first its sequence rows, then one row a token of the pass for the runs in `loose`
    whose keys and values are not kept, given as (first, stop) of the pass. `contexts` are the sequence
    rows, as (first, stop), that runs read which are not `cached` there themselves.
    """

    length: int
    max_position: int
    tokens: Any
    positions: Any
    segments: Any
    shared_segments: Any
    """As `segments`, for `decode_blocks`: contexts that runs share are one; what follows is their own."""
    cached: tuple[CachedRun, ...] = ()
    loose: tuple[tuple[int, int], ...] = ()
    contexts: tuple[tuple[int, int], ...] = ()

    @property
    def uses_cache(self) -> bool:
        """Whether keys and values are those of a `KVCache`."""
        return bool(self.cached or self.contexts)


def build_pass(runs: Sequence[Run], backend: Backend, *, cache_rows: int = 0) -> PassBatch:
    """Lay `runs` one after another. `cache_rows` is the number of sequence rows of the cache in use."""
    uses_cache = any(run.uses_cache for run in runs)
    base = cache_rows if uses_cache else 0
    firsts = np.cumsum([0, *(len(run.tokens) for run in runs)]).tolist()
    segments = np.zeros((len(runs), 5), dtype=np.int64)
    shared_segments = np.zeros_like(segments)
    positions: list[npt.NDArray[np.int32]] = []
    cached: list[CachedRun] = []
    loose: list[tuple[int, int]] = []
    contexts: dict[tuple[int, int], None] = {}
    for segment, shared, run, query in zip(segments, shared_segments, runs, firsts, strict=False):
        length = len(run.tokens)
        if run.row is not None:
            cached.append(CachedRun(query=query, length=length, row=run.row, start=run.start))
            context, first_key = run.row, run.row + run.start
        else:
            loose.append((query, query + length))
            context = first_key = base + query
            if run.context_row is not None:
                context = run.context_row
                contexts[context, context + run.start] = None
            elif run.context_run is not None:
                context = base + firsts[run.context_run]
        segment[:] = query, length, context, run.start, first_key
        shared[:] = segment
        if run.shared is not None and run.row is not None:
            row, count = run.shared
            shared[2:] = row, count, run.row + count
        positions.append(np.arange(run.start, run.start + length, dtype=np.int32))
    tokens = np.concatenate([np.asarray(run.tokens, dtype=np.int32) for run in runs])
    return PassBatch(
        length=firsts[-1],
        max_position=max(run.start + len(run.tokens) for run in runs) - 1,
        tokens=backend.from_host(tokens),
        positions=backend.from_host(np.concatenate(positions)),
        segments=backend.from_host(segments),
        cached=tuple(cached),
        loose=tuple(loose) if uses_cache else (),
        contexts=tuple(contexts),
        shared_segments=backend.from_host(shared_segments),
    )
