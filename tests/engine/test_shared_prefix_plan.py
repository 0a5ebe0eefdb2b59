"""Plans of one step with shared prefixes: every target once, what is read lies before, sizes are kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.engine import (
    Branch,
    Fanout,
    PackingStats,
    Piece,
    Step,
    TrainingSequence,
    plan_step,
    whole_sequence,
)
from retrograd.engine.layout import lay_out
from retrograd.engine.shared_prefix import most_cache_rows, shared_length, step_cost

PROMPT_TOKEN = 7


def answer(number: int, prompt: int, length: int) -> TrainingSequence:
    """A prompt of equal tokens, and an answer whose tokens no other number has; all of it is trained."""
    tokens = np.full(prompt + length, PROMPT_TOKEN, np.int32)
    tokens[prompt:] = 100 + number
    trained = np.zeros(prompt + length, dtype=bool)
    trained[prompt:] = True
    return TrainingSequence(tokens=tokens, trained=trained)


def batch_of_families(
    sizes: Sequence[tuple[int, Sequence[int]]],
) -> tuple[list[TrainingSequence], list[list[int]]]:
    """Sequences and families from (tokens of the prompt, tokens of each answer)."""
    sequences: list[TrainingSequence] = []
    families = []
    for prompt, lengths in sizes:
        families.append(list(range(len(sequences), len(sequences) + len(lengths))))
        sequences += [answer(len(sequences) + i, prompt, length) for i, length in enumerate(lengths)]
    return sequences, families


SIZES = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(0, 30), min_size=1, max_size=6)),
    min_size=1,
    max_size=5,
)
FANOUTS: st.SearchStrategy[Fanout] = st.one_of(st.sampled_from(("auto", "off", "max")), st.integers(2, 5))


@given(SIZES, st.integers(1, 40), FANOUTS, st.booleans())
def test_every_target_is_in_one_pass_and_sees_what_is_before_it(
    sizes: list[tuple[int, list[int]]], micro_batch: int, fanout: Fanout, gradients: bool
) -> None:
    sequences, families = batch_of_families(sizes)
    step = plan_step(sequences, families, micro_batch=micro_batch, fanout=fanout, gradients=gradients)
    branches = {branch.sequence: branch for branch in step.branches}
    position = {number: branch.length for number, branch in branches.items()}
    begun: dict[int, int] = {}
    for index, pieces in enumerate(step.passes):
        assert 1 <= sum(piece.length for piece in pieces) <= micro_batch
        for piece in pieces:
            assert piece.start == position.get(piece.sequence, 0)
            position[piece.sequence] = piece.stop
            begun.setdefault(piece.sequence, index)
        for piece in pieces:
            if piece.sequence in branches:
                branch = branches[piece.sequence]
                assert position[branch.owner] >= branch.length
                if piece.sequence in step.cut_sequences():
                    assert begun[branch.owner] < begun[piece.sequence]
    assert not step.context
    assert [position.get(number, 0) for number in range(len(sequences))] == [s.inputs for s in sequences]
    assert not {branch.owner for branch in step.branches} & set(branches)


@given(SIZES, st.integers(1, 40), FANOUTS)
def test_branches_share_what_is_equal_and_predicts_no_target(
    sizes: list[tuple[int, list[int]]], micro_batch: int, fanout: Fanout
) -> None:
    sequences, families = batch_of_families(sizes)
    step = plan_step(sequences, families, micro_batch=micro_batch, fanout=fanout)
    by_owner: dict[int, int] = {}
    for branch in step.branches:
        own, owner = sequences[branch.sequence], sequences[branch.owner]
        assert (own.tokens[: branch.length] == owner.tokens[: branch.length]).all()
        assert not own.predicts[: branch.length].any()
        by_owner[branch.owner] = by_owner.get(branch.owner, 1) + 1
    if fanout == "off":
        assert not step.branches
    elif isinstance(fanout, int):
        assert all(members <= fanout for members in by_owner.values())
    elif fanout == "max":
        for (prompt, _), members in zip(sizes, families, strict=True):
            answered = [number for number in members if sequences[number].inputs]
            expected = len(answered) if prompt > 1 and len(answered) > 1 else 0
            assert sum(by_owner.get(number, 0) for number in members) == expected


@given(SIZES, st.integers(1, 40), FANOUTS)
def test_a_family_that_fits_lies_in_one_pass_without_a_cache(
    sizes: list[tuple[int, list[int]]], micro_batch: int, fanout: Fanout
) -> None:
    sequences, families = batch_of_families(sizes)
    step = plan_step(sequences, families, micro_batch=micro_batch, fanout=fanout)
    layout = lay_out(step, sequences)
    if fanout != "max":
        return
    for members in families:
        answered = [number for number in members if sequences[number].inputs]
        shared = shared_length([sequences[number] for number in answered]) if answered else 0
        tokens = sum(sequences[number].inputs - shared for number in answered) + shared
        places = {index for index, pieces in enumerate(step.passes) for p in pieces if p.sequence in answered}
        if shared and tokens <= micro_batch and answered:
            assert len(places) == 1
            assert not set(answered) & set(layout.cached)


@given(SIZES, st.integers(1, 40), st.booleans())
def test_auto_costs_at_most_what_no_sharing_costs(
    sizes: list[tuple[int, list[int]]], micro_batch: int, gradients: bool
) -> None:
    sequences, families = batch_of_families(sizes)
    auto, off = (
        step_cost(
            plan_step(sequences, families, micro_batch=micro_batch, fanout=fanout, gradients=gradients),
            sequences,
            gradients=gradients,
        )
        for fanout in ("auto", "off")
    )
    assert auto <= off


@given(SIZES, st.integers(1, 40), FANOUTS)
def test_rows_that_are_in_use_together_do_not_overlap(
    sizes: list[tuple[int, list[int]]], micro_batch: int, fanout: Fanout
) -> None:
    """Both orders of evaluation are replayed on rows that remember which token they hold."""
    sequences, families = batch_of_families(sizes)
    step = plan_step(sequences, families, micro_batch=micro_batch, fanout=fanout)
    layout = lay_out(step, sequences)
    for backward in (False, True):
        rows: list[tuple[int, int] | None] = [None] * layout.rows

        def evaluate(pieces: Sequence[Piece], rows: list[tuple[int, int] | None] = rows) -> None:
            copies = list(layout.copies(pieces))
            for piece in pieces:
                held = layout.cached.get(piece.sequence)
                branch = layout.branches.get(piece.sequence)
                if held is None:
                    continue
                if branch is not None and branch.length == piece.start:
                    source = layout.cached[branch.owner].start
                    assert copies.pop(0) == (source, held.start, branch.length)
                    for i in range(branch.length):
                        assert rows[source + i] == (branch.owner, i)
                        rows[held.start + i] = (piece.sequence, i)
                for i in range(piece.start, piece.stop):
                    rows[held.start + i] = (piece.sequence, i)
            assert not copies

        order = range(len(layout.passes))
        for index in reversed(order) if backward else order:
            for pieces in layout.ahead.get(index, ()) if backward else ():
                evaluate(pieces)
            evaluate(layout.passes[index])
            for piece in layout.passes[index]:
                held = layout.cached.get(piece.sequence)
                if held is not None:
                    expected = [(piece.sequence, i) for i in range(piece.stop)]
                    assert rows[held.start : held.start + piece.stop] == expected
                branch = layout.branches.get(piece.sequence)
                if branch is not None and held is None and branch.owner in layout.cached:
                    first = layout.cached[branch.owner].start
                    expected = [(branch.owner, i) for i in range(branch.length)]
                    assert rows[first : first + branch.length] == expected


def test_a_family_by_hand() -> None:
    # A prompt of 6 tokens shares 5 positions; answers of 3, 2 and 1 tokens have as many own positions.
    sequences, families = batch_of_families([(6, [3, 2, 1])])
    step = plan_step(sequences, families, micro_batch=11, fanout="max")
    assert step == Step(
        passes=((Piece(0, 0, 8), Piece(1, 5, 7), Piece(2, 5, 6)),),
        branches=(Branch(1, 0, 5), Branch(2, 0, 5)),
    )
    stats = PackingStats.of(step, 11)
    assert stats.metrics() == {
        "packing/efficiency": 1.0,
        "packing/tokens": 11.0,
        "packing/tokens_saved": 10.0,
        "packing/prefix_share": pytest.approx(10 / 21),
        "packing/passes": 1.0,
        "packing/fanout_mean": 3.0,
    }
    # In passes of 8 the branches come behind their owner, whose prefix is evaluated once ahead.
    step = plan_step(sequences, families, micro_batch=8, fanout="max")
    assert step.passes == ((Piece(0, 0, 8),), (Piece(1, 5, 7), Piece(2, 5, 6)))
    layout = lay_out(step, sequences)
    assert layout.ahead == {1: ((Piece(0, 0, 5),),)}
    assert layout.cached == {0: range(8)}
    off = PackingStats.of(plan_step(sequences, families, micro_batch=8, fanout="off"), 8)
    assert (off.tokens, off.tokens_saved, off.prefix_share, off.fanout_mean) == (21, 0, 0.0, 1.0)
    assert PackingStats.of(Step(passes=()), 8).metrics()["packing/efficiency"] == 0.0


def test_a_prefix_and_a_branch_longer_than_passes_by_hand() -> None:
    sequences, families = batch_of_families([(7, [3, 9, 6])])
    step = plan_step(sequences, families, micro_batch=4, fanout="max")
    assert step.passes == (
        *((Piece(1, first, first + 4),) for first in (0, 4, 8)),
        (Piece(1, 12, 15),),
        (Piece(2, 6, 10),),
        (Piece(2, 10, 12),),
        (Piece(0, 6, 9),),
    )
    layout = lay_out(step, sequences)
    assert layout.cached == {1: range(15), 2: range(15, 27)}
    assert list(layout.copies(step.passes[4])) == [(0, 15, 6)]
    assert layout.ahead == {
        6: ((Piece(1, 0, 4),), (Piece(1, 4, 8),), (Piece(1, 8, 12),)),
        5: ((Piece(2, 6, 10),),),
    }


def test_answers_that_fit_together_share_a_copy_each() -> None:
    """With a short prompt, copies in several passes are cheaper than a cache."""
    sequences, families = batch_of_families([(9, [20] * 8)])
    step = plan_step(sequences, families, micro_batch=90, fanout="auto")
    assert not lay_out(step, sequences).rows
    assert [len(pieces) for pieces in step.passes] == [4, 4]
    assert PackingStats.of(step, 90).fanout_mean == 4.0


def test_auto_shares_a_long_prompt_and_leaves_a_tiny_one() -> None:
    sequences, families = batch_of_families([(400, [20] * 16)])
    step = plan_step(sequences, families, micro_batch=512, fanout="auto")
    assert PackingStats.of(step, 512).tokens_saved > 0.9 * 15 * 399
    # Kept apart, pairs of 30 and 34 fill passes of 64; a family of both prompts' answers leaves room.
    sequences, families = batch_of_families([(2, [29, 29, 29]), (2, [33, 33, 33])])
    assert not plan_step(sequences, families, micro_batch=64, fanout="auto").branches
    assert plan_step(sequences, families, micro_batch=64, fanout="max").branches


def test_a_step_is_a_function_of_its_arguments() -> None:
    rng = np.random.default_rng(5)
    sequences, families = batch_of_families(
        [(int(rng.integers(1, 60)), rng.integers(1, 90, 8).tolist()) for _ in range(12)]
    )
    plans = [plan_step(sequences, families, micro_batch=64) for _ in range(2)]
    assert plans[0] == plans[1]


def test_passes_are_well_filled() -> None:
    rng = np.random.default_rng(0)
    sequences, families = batch_of_families(
        [(int(rng.integers(40, 300)), rng.integers(10, 200, 8).tolist()) for _ in range(32)]
    )
    shared = PackingStats.of(plan_step(sequences, families, micro_batch=512), 512)
    unshared = PackingStats.of(plan_step(sequences, families, micro_batch=512, fanout="off"), 512)
    assert shared.efficiency > 0.88
    assert unshared.efficiency > 0.85
    assert shared.passes < 0.6 * unshared.passes
    assert shared.tokens + shared.tokens_saved == unshared.tokens


@given(SIZES, st.integers(1, 40), FANOUTS)
def test_cache_rows_are_bounded(sizes: list[tuple[int, list[int]]], micro_batch: int, fanout: Fanout) -> None:
    sequences, families = batch_of_families(sizes)
    longest = max(sequence.inputs for sequence in sequences)
    for chosen in (families, []):
        step = plan_step(sequences, chosen, micro_batch=micro_batch, fanout=fanout)
        most = most_cache_rows(longest, micro_batch, families=bool(chosen) and fanout != "off")
        assert lay_out(step, sequences).rows <= most


def test_cut_sequences_do_not_pile_up_in_the_cache() -> None:
    sequences = [whole_sequence(np.arange(81, dtype=np.int32)) for _ in range(40)]
    assert lay_out(plan_step(sequences, micro_batch=64), sequences).rows == 80
    many, families = batch_of_families([(30, [150] * 12)])
    assert lay_out(plan_step(many, families, micro_batch=64, fanout="max"), many).rows == 2 * 179


def test_what_is_trained_in_the_prompt_is_not_shared() -> None:
    tokens = np.arange(10, dtype=np.int32)
    late, early = np.zeros(10, dtype=bool), np.zeros(10, dtype=bool)
    late[8:] = True
    early[[4, 9]] = True
    members = [TrainingSequence(tokens=tokens, trained=trained) for trained in (late, early)]
    assert shared_length(members) == 3
    assert shared_length([members[0], members[0]]) == 7
    other = TrainingSequence(tokens=np.where(tokens == 2, 50, tokens).astype(np.int32), trained=late)
    assert shared_length([members[0], other]) == 2


def test_families_are_checked() -> None:
    sequences, _ = batch_of_families([(5, [1, 2, 3])])
    with pytest.raises(ValueError, match="names sequence 3, but there are 3"):
        plan_step(sequences, [[0, 3]], micro_batch=8)
    with pytest.raises(ValueError, match="name sequence 1 twice"):
        plan_step(sequences, [[0, 1], [1, 2]], micro_batch=8)
    with pytest.raises(ValueError, match="fanout is 1"):
        plan_step(sequences, [[0, 1]], micro_batch=8, fanout=1)
