"""Fixtures of the whole-program tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .support import Workspace


@pytest.fixture
def workspace(tmp_path: Path, tiny_model: Callable[..., Path]) -> Workspace:
    """A user's folder with a tiny llama model; runs use the reference backend, which needs no compiler."""
    return Workspace(tmp_path, tiny_model(), "reference")
