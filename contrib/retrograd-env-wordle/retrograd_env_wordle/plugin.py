"""Wordle as an environment, one game a trajectory.

::

    [agent.environment]
    type = "wordle"
    guesses = 6
    partial_credit = 0.2

A scenario names its word, `"metadata": {"env": {"answer": "crane"}}`, or leaves it to `words`, a file with
one word a line, from which the seed of the trajectory draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from retrograd.agent import WorldProvider, mistake, observation
from retrograd_hookspecs import (
    BuildContext,
    Component,
    ConfigError,
    EnvironmentProvider,
    Problem,
    Scenario,
    Score,
    StepResult,
    ToolSpec,
    hookimpl,
    key,
)

from .game import GREEN, marks, share

GUESS = ToolSpec(
    name="guess",
    description="Guess the hidden word. Answers with one mark a letter: G is right, Y is elsewhere in the"
    " word, - is not in it.",
    input_schema={
        "type": "object",
        "properties": {"word": {"type": "string", "description": "A word of the right length."}},
        "required": ["word"],
        "additionalProperties": False,
    },
)


@attrs.frozen(kw_only=True)
class WordleConfig:
    """A game of Wordle a trajectory."""

    guesses: int = key(6, minimum=1, maximum=20, doc="Guesses in a game.")
    partial_credit: float = key(
        0.0, minimum=0.0, maximum=1.0, doc="Reward of a lost game whose best guess had every letter right."
    )
    words: Path | None = key(
        None, doc="Words, one a line, for scenarios that name none.", default_text="none", input=True
    )


class Wordle:
    """One game. Implements `retrograd_hookspecs.Environment`."""

    def __init__(self, config: WordleConfig, words: Sequence[str]) -> None:
        self._config = config
        self._words = words
        self._answer = ""
        self._history: list[str] = []
        self._best = 0.0
        self._won = False

    async def reset(self, scenario: Scenario, seed: int) -> str:
        """Choose the word. All trajectories of a scenario that names it play the same."""
        self._answer = str(scenario.env.get("answer") or self._words[seed % len(self._words)]).lower()
        return f"The word has {len(self._answer)} letters. You have {self._config.guesses} guesses."

    async def tools(self) -> Sequence[ToolSpec]:
        """`guess`."""
        return (GUESS,)

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Take a guess."""
        word = arguments["word"].strip().lower()
        if len(word) != len(self._answer) or not word.isalpha():
            return mistake(f"a guess has {len(self._answer)} letters; this guess does not count")
        pattern = marks(word, self._answer)
        self._history.append(f"{word} {pattern}")
        self._best = max(self._best, share(pattern))
        self._won = set(pattern) == {GREEN}
        left = self._config.guesses - len(self._history)
        if self._won:
            return observation(f"{pattern}\nYou found it.", done=True)
        if not left:
            return observation(f"{pattern}\nNo guesses are left. The word was {self._answer}.", done=True)
        return observation(f"{pattern}\n{left} guesses are left.")

    async def grade(self) -> Score:
        """1 for a game that was won, a part of `partial_credit` for one that was not."""
        if self._won:
            return Score(kind="value", value=1.0)
        return Score(kind="value", value=self._config.partial_credit * self._best)

    async def state(self) -> str:
        """All guesses."""
        return "\n".join(self._history) or "no guess"

    async def close(self) -> None:
        """Nothing is open."""


def _problems(scenario: Scenario, words: Sequence[str]) -> Iterator[str]:
    unknown = sorted(set(scenario.env) - {"answer"})
    if unknown:
        yield f"unknown key {unknown[0]!r}; known: 'answer'"
    answer = scenario.env.get("answer")
    if answer is None and not words:
        yield "names no answer, and [agent.environment].words is not given"
    elif answer is not None and not (isinstance(answer, str) and answer.isalpha()):
        yield f"the answer {answer!r} is not a word"


def _read(path: Path) -> list[str]:
    words = [line.strip().lower() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    bad = [word for word in words if not word.isalpha()]
    if bad or not words:
        message = f"{bad[0]!r} is not a word" if bad else "holds no words"
        raise ConfigError([Problem(where=str(path), key="agent.environment.words", message=message)])
    return words


def _build(config: WordleConfig, context: BuildContext) -> EnvironmentProvider:
    words = _read(config.words) if config.words is not None else []
    return WorldProvider(
        lambda scenario: Wordle(config, words),
        check=lambda scenario: _problems(scenario, words),
        tools=(GUESS,),
        signature={"words": words},
        scenario_keys="`answer` (the word, of five letters)",
    )


@hookimpl
def retrograd_environments() -> list[Component[WordleConfig, EnvironmentProvider]]:
    """`wordle`."""
    return [
        Component(name="wordle", config=WordleConfig, build=_build, summary="A game of Wordle a trajectory.")
    ]
