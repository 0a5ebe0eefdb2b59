"""Segments of a pass."""

from __future__ import annotations

import numpy as np

from retrograd.nn import Run, build_pass
from retrograd.nn.batch import CachedRun
from tests.model_support import build_backend


def tokens(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def test_whole_sequences_see_themselves_alone() -> None:
    batch = build_pass([Run(tokens=tokens(3)), Run(tokens=tokens(2))], build_backend("reference"))
    assert batch.segments.tolist() == [[0, 3, 0, 0, 0], [3, 2, 3, 0, 3]]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.tokens.tolist() == [0, 1, 2, 0, 1]
    assert (batch.length, batch.max_position) == (5, 2)
    assert not batch.cached
    assert not batch.loose


def test_cut_sequences_refer_to_the_cache_and_the_others_to_rows_behind_it() -> None:
    runs = [Run(tokens=tokens(2)), Run(tokens=tokens(3), start=4, row=10)]
    batch = build_pass(runs, build_backend("reference"), cache_rows=20)
    assert batch.segments.tolist() == [[0, 2, 20, 0, 20], [2, 3, 10, 4, 14]]
    assert batch.positions.tolist() == [0, 1, 4, 5, 6]
    assert batch.cached == (CachedRun(query=2, length=3, row=10, start=4),)
    assert batch.loose == ((0, 2),)
    assert batch.max_position == 6


def test_runs_share_the_beginning_of_another_run_of_their_pass() -> None:
    runs = [
        Run(tokens=tokens(2)),
        Run(tokens=tokens(5)),
        *(Run(tokens=tokens(n), start=3, context_run=1) for n in (1, 4)),
    ]
    batch = build_pass(runs, build_backend("reference"), cache_rows=20)
    assert batch.segments.tolist() == [[0, 2, 0, 0, 0], [2, 5, 2, 0, 2], [7, 1, 2, 3, 7], [8, 4, 2, 3, 8]]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 3, 3, 4, 5, 6]
    assert not batch.uses_cache
    assert (batch.loose, batch.contexts) == ((), ())
    with_cache = build_pass(
        [*runs, Run(tokens=tokens(1), start=2, row=7)], build_backend("reference"), cache_rows=20
    )
    assert with_cache.segments.tolist()[2:] == [[7, 1, 22, 3, 27], [8, 4, 22, 3, 28], [12, 1, 7, 2, 9]]


def test_runs_share_cached_rows_of_another_sequence() -> None:
    runs = [Run(tokens=tokens(n), start=3, context_row=6) for n in (2, 1)]
    batch = build_pass(runs, build_backend("reference"), cache_rows=20)
    assert batch.segments.tolist() == [[0, 2, 6, 3, 20], [2, 1, 6, 3, 22]]
    assert batch.uses_cache
    assert batch.contexts == ((6, 9),)
    assert batch.loose == ((0, 2), (2, 3))
