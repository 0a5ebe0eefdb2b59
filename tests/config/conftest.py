"""Fixtures of the configuration tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from retrograd.config import Document, parse_document


@pytest.fixture
def parse(tmp_path: Path) -> Callable[[str], Document]:
    """Parse TOML text as `run.toml` in a temporary directory."""

    def read(text: str) -> Document:
        return parse_document(text, "run.toml", base_dir=tmp_path)

    return read
