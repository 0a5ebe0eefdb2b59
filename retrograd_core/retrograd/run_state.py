"""What a run puts into a checkpoint, and how it goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from retrograd_hookspecs import Algorithm, CheckpointError, Schedule, Trainable

from .checkpoint import SUFFIX, Checkpoint, CheckpointStore


@attrs.define
class Progress:
    """What the driver itself must remember to go on after a resume."""

    step: int = 0
    total_steps: int | None = None
    """Steps of the whole run, if its algorithm knows them."""
    boundaries: int = 0
    best_score: float | None = None
    best_step: int = 0
    evaluations_without_improvement: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    tokens: int = 0
    records: int = 0
    """Records that the sinks were given: several are of one step where updates took none."""
    boundary_pending: bool = False
    """An interruption came at a boundary: its evaluation is the first thing to do."""


@attrs.frozen(kw_only=True)
class RunState:
    """Saves and restores the parts of a run that change.

    Args:
        signature: what a checkpoint must share with the run.
        may_grow: dotted fields of the signature that say no more than how long the run goes on: a resumed run
            may have larger ones.
        schedule: the learning-rate schedule of a run of so many steps.
    """

    store: CheckpointStore
    algorithm: Algorithm
    trainable: Trainable
    optimizer: Any
    signature: Callable[[], Mapping[str, Any]]
    may_grow: Collection[str]
    schedule: Callable[[int | None], Schedule]

    def exists(self, name: str) -> bool:
        """True if there is a checkpoint of that name."""
        return (self.store.directory / (name + SUFFIX)).exists()

    def save(self, name: str, progress: Progress) -> Path:
        """Write a checkpoint. Raises `CheckpointError` if that fails."""
        tensors = {f"parameter/{p.name}": p.value for p in self.trainable.parameters}
        tensors.update({f"optimizer/{key}": value for key, value in self.optimizer.state().items()})
        state = self.algorithm.state()
        arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
        tensors.update({f"algorithm/{key}": value for key, value in arrays.items()})
        plain = {key: value for key, value in state.items() if key not in arrays}
        checkpoint = Checkpoint(
            signature=self.signature(),
            state={"driver": attrs.asdict(progress), "algorithm": plain},
            tensors=tensors,
        )
        return self.store.save(name, checkpoint, adapter=self.trainable.save)

    def load(self, path: Path, total_steps: int | None) -> Progress:
        """Restore everything from `path`, for a run that now has so many steps.

        Raises: `CheckpointError` for a checkpoint of another run, and for one whose steps would have been
        others in a run of this length.
        """
        checkpoint = CheckpointStore(path.parent).load(path)
        checkpoint.require_signature(self.signature(), path, may_grow=self.may_grow)
        progress = Progress(**checkpoint.state["driver"])
        if progress.total_steps != total_steps:
            self._require_same_rates(path, progress, total_steps)
        for parameter in self.trainable.parameters:
            stored = checkpoint.tensors.get(f"parameter/{parameter.name}")
            if stored is None or stored.shape != parameter.value.shape:
                raise CheckpointError(f"{path}: holds no {parameter.name} of shape {parameter.value.shape}")
            parameter.value[...] = stored
        self.trainable.refresh()
        self.optimizer.load(_below("optimizer/", checkpoint.tensors))
        self.algorithm.load({**checkpoint.state["algorithm"], **_below("algorithm/", checkpoint.tensors)})
        return progress

    def _require_same_rates(self, path: Path, progress: Progress, total_steps: int | None) -> None:
        """The steps so far are those of a run of the new length, if their learning rates are."""
        before, now = self.schedule(progress.total_steps), self.schedule(total_steps)
        for step in range(1, progress.step + 1):
            if before.lr(step) != now.lr(step):
                raise CheckpointError(
                    f"{path} is of a run of {progress.total_steps} steps, this one has {total_steps}: its"
                    f" learning rate was {before.lr(step):.3g} in step {step} and would have been"
                    f" {now.lr(step):.3g}, since training.lr_scheduler decays to the end of the run. A run"
                    ' with lr_scheduler = "constant" can be made longer; for this one, set its length back,'
                    f" or start a new one from {path.with_suffix('.gguf')}"
                )


def _below(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
