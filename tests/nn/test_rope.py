"""Angles of rotary embeddings."""

from __future__ import annotations

import numpy as np

from retrograd.nn.rope import RopeTable, RopeTables, rope_angles
from retrograd_hookspecs import BlockStyle
from tests.model_support import build_backend


def test_angles_by_hand() -> None:
    angles = rope_angles(BlockStyle(rope_base=100.0), 4, 3)
    np.testing.assert_allclose(angles, [[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    scaled = rope_angles(BlockStyle(rope_base=100.0, rope_scale=2.0, rope_factors=(1.0, 5.0)), 4, 3)
    np.testing.assert_allclose(scaled, [[0.0, 0.0], [0.5, 0.01], [1.0, 0.02]])


def test_tables_grow_and_keep_their_values() -> None:
    table = RopeTable(BlockStyle(), 8, build_backend("reference"))
    cos, _ = table.tables(10)
    before = np.array(cos[:10])
    longer, sin = table.tables(1000)
    assert longer.shape[0] >= 1000
    assert (longer[:10] == before).all()
    np.testing.assert_allclose(longer**2 + sin**2, 1.0)
    assert table.nbytes() == longer.nbytes + sin.nbytes


def test_blocks_of_one_style_share_a_table() -> None:
    tables = RopeTables(8, build_backend("reference"))
    windowed = BlockStyle(window=4)
    assert tables.of(BlockStyle()) is tables.of(windowed)
    assert tables.of(BlockStyle(rope_base=5.0)) is not tables.of(windowed)
