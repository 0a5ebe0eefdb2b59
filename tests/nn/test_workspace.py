"""The workspace allocates by name, once, and grows only when it must."""

from __future__ import annotations

import numpy as np

from retrograd.nn import Workspace
from tests.model_support import build_backend


def test_a_name_is_one_array_whatever_its_shape() -> None:
    workspace = Workspace(build_backend("reference"))
    first = workspace.get("a", (4, 6))
    first[...] = 7.0
    again = workspace.get("a", (3, 5))
    assert again.base is first.base
    assert (again == 7.0).all()
    assert again.flags.c_contiguous
    assert workspace.allocations == 1
    workspace.get("a", (5, 6))
    workspace.get("a", (2, 2), np.int32)
    assert workspace.allocations == 3


def test_rows_are_allocated_for_the_largest_pass() -> None:
    workspace = Workspace(build_backend("reference"), token_capacity=10)
    scope = workspace.scope("block")
    for tokens in (3, 10, 1):
        assert scope.rows("x", tokens, 4).shape == (tokens, 4)
    assert workspace.allocations == 1
    assert dict(workspace.sizes()) == {"block/x": 10 * 4 * 8}
    assert scope.rows("x", 11, 4).shape == (11, 4)
    assert workspace.allocations == 2


def test_scopes_do_not_share_names() -> None:
    workspace = Workspace(build_backend("reference"))
    one, two = workspace.scope("0").get("x", (2,)), workspace.scope("1").get("x", (2,))
    assert not np.shares_memory(one, two)
