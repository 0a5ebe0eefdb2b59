"""Which pairs of a group are compared, and what their results are worth."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

PRIOR = 0.05
"""Weight of the squared norm of the strengths, against log-likelihoods, in the Bradley-Terry fit."""


@attrs.frozen
class Game:
    """A comparison of two members: `score` is what the first earned, 1, 0.5 for a tie, or 0."""

    first: int
    second: int
    score: float


def schedule(count: int, max_pairs: int | None = None) -> list[tuple[int, int]]:
    """Pairs of `range(count)` in the order in which they are played.

    First a ring, in which each meets its neighbour, so that all are connected; then neighbours at distance
    two, and so on, until every pair has met or `max_pairs` have. Each pair is met once.

    Raises: ValueError if `max_pairs` is below count - 1: the members would not be connected.
    """
    pairs: list[tuple[int, int]] = []
    for distance in range(1, count // 2 + 1):
        # Opposite members of an even ring would meet from both sides.
        meetings = distance if 2 * distance == count else count
        pairs += [(first, (first + distance) % count) for first in range(meetings)]
    if max_pairs is not None and max_pairs < count - 1:
        raise ValueError(
            f"max_pairs = {max_pairs} cannot connect {count} different answers;"
            f" at least {count - 1} are needed"
        )
    return pairs[:max_pairs]


def win_rates(count: int, games: Sequence[Game]) -> list[float]:
    """Share of its games that each won, a tie counting half."""
    earned, played = [0.0] * count, [0] * count
    for game in games:
        earned[game.first] += game.score
        earned[game.second] += 1.0 - game.score
        played[game.first] += 1
        played[game.second] += 1
    return [e / p for e, p in zip(earned, played, strict=True)]


def bradley_terry(count: int, games: Sequence[Game]) -> list[float]:
    """Mean probability of each to beat each other, under strengths fitted to the games.

    P(i beats j) = 1 / (1 + exp(s_j - s_i)); s maximises the log-likelihood of the games, a tie counting as
    half a win for each, less `PRIOR`·‖s‖², without which a member that never lost would be infinitely
    strong. Unlike a win rate it counts whom a member beat, which tells apart members with few games.

    Source: Bradley and Terry 1952, Rank analysis of incomplete block designs, I; the fit is choix's.
    """
    import choix
    import numpy as np

    # A game is two results, so that a tie is one of each and no member has half a win.
    results = [
        (game.first, game.second) if won else (game.second, game.first)
        for game in games
        for won in _results(game.score)
    ]
    # Twice the results have twice the likelihood, so the prior is doubled with them.
    strengths = np.asarray(choix.opt_pairwise(count, results, alpha=2 * PRIOR, tol=1e-10))
    odds = strengths[:, None] - strengths[None, :]
    beats = 1.0 / (1.0 + np.exp(-odds))
    np.fill_diagonal(beats, 0.0)
    return [float(x) for x in beats.sum(axis=1) / (count - 1)]


def _results(score: float) -> tuple[bool, bool]:
    return {1.0: (True, True), 0.5: (True, False), 0.0: (False, False)}[score]
