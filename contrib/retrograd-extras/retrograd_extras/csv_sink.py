"""Metrics as one CSV row a value: step, name, value.

::

    [metrics]
    sinks = ["csv"]

    [sink.csv]
    path = "metrics.csv"
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import attrs

from retrograd_hookspecs import BuildContext, Component, Sink, hookimpl, key


@attrs.frozen(kw_only=True)
class CsvConfig:
    """Keys of `[sink.csv]`."""

    path: Path = key(doc="CSV file; created if missing, appended to otherwise.")


class CsvSink:
    """Appends rows; a resumed run drops the rows of steps it will repeat."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", newline="")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row a metric."""
        csv.writer(self._file).writerows((step, name, repr(value)) for name, value in metrics.items())
        self._file.flush()

    def resume(self, step: int) -> None:
        """Keep rows up to `step`."""
        self._file.seek(0)
        kept = [row for row in csv.reader(self._file) if int(row[0]) <= step]
        self._file.truncate(0)
        csv.writer(self._file).writerows(kept)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _build(config: CsvConfig, context: BuildContext) -> Sink:
    return CsvSink(config.path)


@hookimpl
def retrograd_sinks() -> list[Component[CsvConfig, Sink]]:
    """`csv`."""
    return [Component(name="csv", config=CsvConfig, build=_build, summary="Metrics as CSV.")]
