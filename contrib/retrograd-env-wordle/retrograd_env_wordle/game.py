"""The rules of the game, apart from everything else."""

from __future__ import annotations

from collections import Counter

GREEN, YELLOW, GREY = "G", "Y", "-"


def marks(guess: str, answer: str) -> str:
    """One mark a letter: G at its place, Y elsewhere in the answer, - not in it (so often).

    >>> marks("speed", "abide")
    '--Y-Y'
    """
    left = Counter(a for g, a in zip(guess, answer, strict=True) if g != a)
    result = []
    for letter, wanted in zip(guess, answer, strict=True):
        if letter == wanted:
            result.append(GREEN)
        elif left[letter]:
            left[letter] -= 1
            result.append(YELLOW)
        else:
            result.append(GREY)
    return "".join(result)


def share(pattern: str) -> float:
    """How close a guess came, from 0 to 1: a letter at its place counts 1, one elsewhere a half."""
    return (pattern.count(GREEN) + 0.5 * pattern.count(YELLOW)) / len(pattern)
