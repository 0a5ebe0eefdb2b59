"""Rollouts recorded for reading: `[observe]`."""

from .factory import observer_of
from .writer import NullObserver, Observer, Recorder, RunFacts

__all__ = ["NullObserver", "Observer", "Recorder", "RunFacts", "observer_of"]
