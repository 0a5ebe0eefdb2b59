"""Fixtures of the tests of algorithms that learn from rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.judges.server import JudgeServer, Request, says

from .support import SMALL, Rollouts, value_of


@pytest.fixture
def rollouts(tmp_path: Path, tiny_model: Callable[..., Path]) -> Rollouts:
    """A user's folder with a tiny llama model, on the reference backend."""
    return Rollouts(tmp_path, tiny_model(**SMALL))


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    """An endpoint that judges answers by what they say."""

    def by_text(request: Request) -> str:
        scores = [
            {"id": number, "explanation": "seen", "score": value_of(text)}
            for number, text in request.candidates.items()
        ]
        return json.dumps({"scores": scores})

    served = JudgeServer()
    served.always = says(by_text)
    yield served
    served.close()
