"""Keys and values by row, and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd.nn import KVCache, KVGradients, Run, Workspace, build_pass
from tests.model_support import build_backend


def make(dtype: Any = None) -> tuple[KVCache, Workspace]:
    workspace = Workspace(build_backend("reference"))
    return KVCache(name="kv", workspace=workspace, blocks=2, heads=1, head_length=2, dtype=dtype), workspace


def values(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 1, 2))


@pytest.mark.parametrize("dtype", [None, np.float32, np.float16])
def test_context_own_rows_and_loose_rows_lie_where_segments_say(dtype: Any) -> None:
    cache, workspace = make(dtype)
    cache.reserve(8, 4)
    first = build_pass([Run(tokens=np.zeros(3, np.int32), row=2)], workspace.backend, cache_rows=8)
    k0, v0 = values(3, 0), values(3, 1)
    for block in range(2):
        cache.extend(block, k0 + block, v0 + block, first)
    runs = [Run(tokens=np.zeros(2, np.int32)), Run(tokens=np.zeros(2, np.int32), start=3, row=2)]
    second = build_pass(runs, workspace.backend, cache_rows=8)
    k1, v1 = values(4, 2), values(4, 3)
    keys, seen = cache.extend(1, k1, v1, second)
    precision = dtype or np.float64
    np.testing.assert_array_equal(keys[2:5], (k0 + 1).astype(precision))
    np.testing.assert_array_equal(seen[5:7], v1[2:].astype(precision))
    # A sequence that is whole in the pass is never rounded.
    np.testing.assert_array_equal(keys[8:10], k1[:2])
    assert keys.dtype == np.float64


def test_rows_can_be_copied() -> None:
    cache, workspace = make(np.float16)
    cache.reserve(8, 0)
    batch = build_pass([Run(tokens=np.zeros(3, np.int32), row=0)], workspace.backend, cache_rows=8)
    for block in range(2):
        cache.extend(block, values(3, 0), values(3, 1), batch)
    cache.copy_rows(0, 4, 3)
    after = build_pass([Run(tokens=np.zeros(1, np.int32), start=3, row=4)], workspace.backend, cache_rows=8)
    keys, _ = cache.extend(1, values(1, 2), values(1, 3), after)
    np.testing.assert_array_equal(keys[4:7], values(3, 0).astype(np.float16))


def test_gradients_of_own_rows_are_taken_out_and_those_of_context_stay() -> None:
    workspace = Workspace(build_backend("reference"))
    gradients = KVGradients(name="g", workspace=workspace, blocks=1, heads=1, head_length=2)
    gradients.reserve(8, 4)
    gradients.clear(0, 8)
    runs = [Run(tokens=np.zeros(2, np.int32)), Run(tokens=np.zeros(2, np.int32), start=3, row=2)]
    batch = build_pass(runs, workspace.backend, cache_rows=8)
    for round_ in (1, 2):
        dkeys, dvalues = gradients.of(0, batch)
        dkeys += 1.0
        dvalues += 2.0
        dk, dv = np.empty((4, 1, 2)), np.empty((4, 1, 2))
        gradients.take(0, batch, dk, dv)
        assert dk[:2].ravel().tolist() == [1.0] * 4
        assert dk[2:].ravel().tolist() == [float(round_)] * 4
        assert dv[2:].ravel().tolist() == [2.0 * round_] * 4
        assert (dkeys[2:5] == round_).all()


@pytest.mark.parametrize("dtype", [None, np.float16])
def test_a_context_of_another_sequence_is_read_and_keeps_its_gradients(dtype: Any) -> None:
    cache, workspace = make(dtype)
    cache.reserve(8, 4)
    gradients = KVGradients(name="g", workspace=workspace, blocks=2, heads=1, head_length=2)
    gradients.reserve(8, 4)
    gradients.clear(0, 8)
    owner = build_pass([Run(tokens=np.zeros(3, np.int32), row=2)], workspace.backend, cache_rows=8)
    for block in range(2):
        cache.extend(block, values(3, 0) + block, values(3, 1), owner)
    branches = [Run(tokens=np.zeros(n, np.int32), start=2, context_row=2) for n in (1, 3)]
    batch = build_pass(branches, workspace.backend, cache_rows=8)
    keys, _ = cache.extend(0, values(4, 2), values(4, 3), batch)
    np.testing.assert_array_equal(keys[2:4], values(3, 0)[:2].astype(dtype or np.float64))
    np.testing.assert_array_equal(keys[8:12], values(4, 2))
    dkeys, _ = gradients.of(0, batch)
    dkeys += 1.0
    gradients.take(0, batch, np.empty((4, 1, 2)), np.empty((4, 1, 2)))
    assert (gradients.of(0, batch)[0][:8] == 1).all()


def test_gradients_of_copied_rows_are_added_to_those_they_are_from() -> None:
    workspace = Workspace(build_backend("reference"))
    gradients = KVGradients(name="g", workspace=workspace, blocks=1, heads=1, head_length=2)
    gradients.reserve(8, 0)
    gradients.clear(0, 8)
    empty = build_pass([Run(tokens=np.zeros(0, np.int32))], workspace.backend)
    dkeys, dvalues = gradients.of(0, empty)
    dkeys[:8] = np.arange(8.0)[:, None, None]
    gradients.add_rows(4, 0, 3)
    assert dkeys[:, 0, 0].tolist() == [4, 6, 8, 3, 4, 5, 6, 7]
    assert not dvalues.any()
    gradients.clear(4, 7)
    assert dkeys[:, 0, 0].tolist() == [4, 6, 8, 3, 0, 0, 0, 7]
