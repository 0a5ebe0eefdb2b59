"""Packing: every trained token once, no pass too long, cut sequences in order, everything by seed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from retrograd.engine import Piece, Step, plan_epoch, shuffled_order

MASKS = st.lists(
    st.lists(st.booleans(), max_size=40).map(lambda mask: np.array([*mask, True])), min_size=1, max_size=25
)


def plan(masks: list[np.ndarray], micro_batch: int, accumulation: int, seed: int = 0) -> list[Step]:
    order = shuffled_order(len(masks), seed=seed, epoch=0)
    return plan_epoch(masks, order, micro_batch=micro_batch, gradient_accumulation=accumulation)


@given(MASKS, st.integers(1, 12), st.integers(1, 5), st.integers(0, 3))
def test_every_trained_token_is_in_exactly_one_step(
    masks: list[np.ndarray], micro_batch: int, accumulation: int, seed: int
) -> None:
    seen = [np.zeros(len(mask), dtype=int) for mask in masks]
    for step in plan(masks, micro_batch, accumulation, seed):
        assert any(masks[p.sequence][p.start : p.stop].any() for p in step.pieces())
        for piece in step.pieces():
            seen[piece.sequence][piece.start : piece.stop] += 1
    for mask, count in zip(masks, seen, strict=True):
        assert (count[mask] == 1).all()
        assert (count <= 1).all()


@given(MASKS, st.integers(1, 12), st.integers(1, 5))
def test_passes_and_steps_stay_within_their_size(
    masks: list[np.ndarray], micro_batch: int, accumulation: int
) -> None:
    for step in plan(masks, micro_batch, accumulation):
        assert 1 <= len(step.passes) <= accumulation
        for pieces in (*step.context, *step.passes):
            assert 1 <= sum(piece.length for piece in pieces) <= micro_batch


@given(MASKS, st.integers(1, 12), st.integers(1, 5))
def test_a_step_sees_all_earlier_tokens_of_its_sequences_in_order(
    masks: list[np.ndarray], micro_batch: int, accumulation: int
) -> None:
    for step in plan(masks, micro_batch, accumulation):
        position: dict[int, int] = {}
        for pieces in (*step.context, *step.passes):
            for piece in pieces:
                assert piece.start == position.get(piece.sequence, 0)
                position[piece.sequence] = piece.stop


@given(MASKS, st.integers(1, 12), st.integers(1, 5))
def test_what_fits_is_not_cut(masks: list[np.ndarray], micro_batch: int, accumulation: int) -> None:
    for step in plan(masks, micro_batch, accumulation):
        for piece in step.pieces():
            length = len(masks[piece.sequence])
            if length <= micro_batch:
                assert piece == Piece(piece.sequence, 0, length)
            assert piece.start % micro_batch == 0
            if length <= micro_batch * accumulation:
                # The whole sequence is in this step: its gradient is exact.
                assert not any(p.sequence == piece.sequence for c in step.context for p in c)


def test_a_plan_is_a_function_of_its_arguments() -> None:
    rng = np.random.default_rng(3)
    masks = [rng.random(int(n)) < 0.5 for n in rng.integers(2, 60, 40)]
    for mask in masks:
        mask[-1] = True
    assert plan(masks, 16, 4, seed=1) == plan(masks, 16, 4, seed=1)
    assert plan(masks, 16, 4, seed=1) != plan(masks, 16, 4, seed=2)


def test_orders_differ_by_epoch_and_are_permutations() -> None:
    first, second = (shuffled_order(50, seed=4, epoch=epoch) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert (first != second).any()
    assert (shuffled_order(5, seed=4, epoch=1, shuffle=False) == np.arange(5)).all()


def test_passes_are_well_filled_with_conversations_of_mixed_length() -> None:
    rng = np.random.default_rng(0)
    masks = [np.ones(n, dtype=bool) for n in rng.integers(20, 400, 500)]
    steps = plan(masks, 512, 4)
    passes = sum(len(step.passes) for step in steps)
    assert sum(len(mask) for mask in masks) / (passes * 512) > 0.95


def test_a_sequence_longer_than_a_step_is_spread_with_context() -> None:
    mask = np.zeros(20, dtype=bool)
    mask[9:] = True
    steps = plan_epoch([mask], [0], micro_batch=4, gradient_accumulation=2)
    assert steps == [
        Step(
            passes=((Piece(0, 8, 12),), (Piece(0, 12, 16),)),
            context=((Piece(0, 0, 4),), (Piece(0, 4, 8),)),
        ),
        Step(
            passes=((Piece(0, 16, 20),),),
            context=tuple((Piece(0, first, first + 4),) for first in range(0, 16, 4)),
        ),
    ]


def test_the_rest_of_a_cut_sequence_shares_its_pass_behind_the_full_ones() -> None:
    masks = [np.ones(n, dtype=bool) for n in (9, 3)]
    assert plan_epoch(masks, [1, 0], micro_batch=4, gradient_accumulation=3) == [
        Step(passes=((Piece(0, 0, 4),), (Piece(0, 4, 8),), (Piece(1, 0, 3), Piece(0, 8, 9))))
    ]
