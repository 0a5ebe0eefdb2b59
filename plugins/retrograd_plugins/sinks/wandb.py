"""Weights & Biases, offline: a run directory that `wandb sync` uploads, or nothing does::

    [metrics]
    wandb_export_dir = "wandb-export"

The steps are collected in `history.jsonl` in that directory and exported when the run ends, so a resumed
run's export holds every step once: W&B's own log cannot forget what an interrupted process wrote. Nothing
is sent anywhere. A run killed without a chance to end leaves `history.jsonl`; resuming it goes on there.
"""

from __future__ import annotations

import shutil
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

PROJECT = "retrograd"
_EXPORT_NOTE = "exported.txt"


class WandbSink:
    """Collects metrics and writes them as one offline W&B run on `close`."""

    def __init__(self, directory: Path, name: str) -> None:
        from retrograd.metrics import JsonlMetrics

        self._directory = directory
        self._name = name
        self._history = JsonlMetrics(directory / "history.jsonl")
        self._dirty = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Collect the metrics of `step`."""
        self._history.write(step, metrics)
        self._dirty = True

    def resume(self, step: int) -> None:
        """Forget what was collected after `step`."""
        self._history.resume(step)
        self._dirty = True

    def close(self) -> None:
        """Export all collected steps; replaces this directory's export of an earlier process of the run."""
        self._history.close()
        if self._dirty:
            self._dirty = False
            self._export()

    def _export(self) -> None:
        import wandb

        from retrograd.metrics import read_metrics

        steps = _by_step(read_metrics(self._history.path))
        if not steps:
            return
        note = self._directory / _EXPORT_NOTE
        previous = note.read_text().strip() if note.exists() else ""
        run = wandb.init(
            mode="offline",
            project=PROJECT,
            name=self._name,
            dir=str(self._directory),
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        # `run.dir` is DIRECTORY/wandb/offline-run-DATE-ID/files.
        exported = Path(run.dir).parent
        for step, metrics in steps.items():
            run.log(metrics, step=step)
        run.finish()
        note.write_text(f"{exported.name}\n")
        if previous and previous != exported.name:
            shutil.rmtree(exported.with_name(previous), ignore_errors=True)


def _by_step(records: Any) -> dict[int, dict[str, float]]:
    """Metrics by step, those of several records of a step together; values that are not finite as such."""
    steps: dict[int, dict[str, float]] = {}
    for record in records:
        nonfinite = record.pop("nonfinite", {})
        step = record.pop("step")
        del record["time"]
        record.update({name: float(text) for name, text in nonfinite.items()})
        steps.setdefault(step, {}).update(record)
    return steps


def _build(config: NoConfig, context: BuildContext) -> Sink:
    directory = context.config.metrics.wandb_export_dir
    if directory is None:
        raise ConfigError(
            [
                Problem(
                    where="configuration",
                    key="metrics.wandb_export_dir",
                    message="is not set, but the sink wandb is asked for",
                    hint='set wandb_export_dir = "wandb-export"',
                )
            ]
        )
    return WandbSink(Path(directory), Path(context.config.output.path).stem)


@hookimpl
def retrograd_sinks() -> list[Component[NoConfig, Sink]]:
    """`wandb`."""
    return [
        Component(
            name="wandb",
            config=NoConfig,
            build=_build,
            summary="Offline Weights & Biases run in metrics.wandb_export_dir.",
            selected_by="metrics.wandb_export_dir",
            extra="wandb",
            requires=("wandb",),
        )
    ]
