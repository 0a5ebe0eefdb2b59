"""Where metrics go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """Receives metrics. A sink that fails is reported and switched off; it never stops a run."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step, evaluation or event."""

    def close(self) -> None:
        """Flush and release; may be called more than once."""

    def resume(self, step: int) -> None:
        """The run goes on after step `step`: forget anything later that an earlier process wrote."""
