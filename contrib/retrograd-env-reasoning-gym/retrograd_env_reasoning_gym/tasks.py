"""Datasets of reasoning-gym by their settings, and their tasks by index."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import attrs


class TaskError(Exception):
    """A task that cannot be made, in words for whoever wrote the scenario."""


@attrs.frozen(kw_only=True)
class Source:
    """A dataset: its name, how many tasks it has, its seed, and the keys of its own configuration."""

    dataset: str
    size: int
    seed: int
    options: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def key(self) -> str:
        """Equal for equal datasets."""
        return json.dumps(attrs.asdict(self), sort_keys=True)


@attrs.frozen(eq=False)
class Task:
    """One task. `entry` is what reasoning-gym made of it."""

    data: Any
    entry: Mapping[str, Any]

    @property
    def question(self) -> str:
        """What the model is asked."""
        return str(self.entry["question"])


class Tasks:
    """Makes datasets once, and scores answers. May be used from several threads."""

    def __init__(self) -> None:
        self._datasets: dict[str, Any] = {}
        self._lock = threading.Lock()

    def task(self, source: Source, index: int) -> Task:
        """The task of a dataset with an index. Raises: `TaskError`."""
        with self._lock:
            data = self._dataset(source)
            if not 0 <= index < source.size:
                raise TaskError(f"index {index} is outside of the {source.size} tasks of {source.dataset!r}")
            try:
                return Task(data, data[index])
            except Exception as error:
                raise TaskError(f"task {index} of {source.dataset!r} cannot be made: {error}") from error

    def score(self, task: Task, answer: str | None) -> float:
        """What the dataset gives for an answer; None is no answer. Raises what the dataset raises."""
        with self._lock:
            return float(task.data.score_answer(answer, task.entry))

    def _dataset(self, source: Source) -> Any:
        from reasoning_gym.factory import DATASETS, create_dataset

        if source.dataset not in DATASETS:
            import difflib

            meant = difflib.get_close_matches(source.dataset, DATASETS, n=1)
            hint = f"; did you mean {meant[0]!r}?" if meant else ""
            raise TaskError(f"reasoning-gym has no dataset {source.dataset!r}{hint}")
        if source.key not in self._datasets:
            try:
                made = create_dataset(source.dataset, size=source.size, seed=source.seed, **source.options)
            except (AssertionError, TypeError, ValueError) as error:
                raise TaskError(f"the options of {source.dataset!r} are wrong: {error}") from error
            self._datasets[source.key] = made
        return self._datasets[source.key]
