"""Fixtures of the tests of algorithms that learn from rewards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .support import SMALL, Rollouts


@pytest.fixture
def rollouts(tmp_path: Path, tiny_model: Callable[..., Path]) -> Rollouts:
    """A user's folder with a tiny llama model, on the reference backend."""
    return Rollouts(tmp_path, tiny_model(**SMALL))
