"""TensorBoard event files, one scalar a metric::

    [metrics]
    tensorboard_dir = "runs"

Each process of a run writes its own event file. A resumed run marks where it goes on, and TensorBoard then
hides the points of later steps that an earlier process wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrograd_hookspecs import (
    BuildContext,
    Component,
    ConfigError,
    NoConfig,
    Problem,
    Sink,
    hookimpl,
)

FLUSH_SECONDS = 10


class TensorBoardSink:
    """Writes scalars through tensorboardX; the file is created by the first write."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._purge_step: int | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric at `step`; NaN and infinities are kept."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._directory.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(
                str(self._directory), purge_step=self._purge_step, flush_secs=FLUSH_SECONDS
            )
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def resume(self, step: int) -> None:
        """Hide what was written after `step`."""
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _build(config: NoConfig, context: BuildContext) -> Sink:
    directory = context.config.metrics.tensorboard_dir
    if directory is None:
        raise ConfigError(
            [
                Problem(
                    where="configuration",
                    key="metrics.tensorboard_dir",
                    message="is not set, but the sink tensorboard is asked for",
                    hint='set tensorboard_dir = "runs"',
                )
            ]
        )
    return TensorBoardSink(Path(directory))


@hookimpl
def retrograd_sinks() -> list[Component[NoConfig, Sink]]:
    """`tensorboard`."""
    return [
        Component(
            name="tensorboard",
            config=NoConfig,
            build=_build,
            summary="TensorBoard event files in metrics.tensorboard_dir.",
            selected_by="metrics.tensorboard_dir",
            extra="tensorboard",
            requires=("tensorboardX",),
        )
    ]
