"""A file with seven different mistakes gets seven good messages, together."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrograd.config import load_document
from retrograd_hookspecs import ConfigError

from .components import read_run

FILE = Path(__file__).with_name("seven_mistakes.toml")

EXPECTED = [
    (
        "kind = ",
        'output.kind: must be one of "adapter", "trainable", "model", got "adaptor"'
        ' (did you mean "adapter"?)',
    ),
    ("rank = ", "lora.rank: expected an integer, got 8.5"),
    ("lr_schedular = ", "training.lr_schedular: unknown key (did you mean lr_scheduler?)"),
    ("lr = ", 'training.lr: expected a number, got the string "1e-4" (write 1e-4 without quotes)'),
    ("weight_decay = ", "training.weight_decay: must be at least 0 and at most 1, got 1.5"),
    (
        "micro_batch = ",
        "training.micro_batch: micro_batch × gradient_accumulation = 48 × 1 = 48 does not divide ctx = 128"
        " (line 19) (micro_batch may be 32 or 64)",
    ),
    ("[sft]", "sft.data: required key is missing (Training file.)"),
]


def test_seven_messages() -> None:
    lines = FILE.read_text(encoding="utf-8").split("\n")
    with pytest.raises(ConfigError) as caught:
        read_run(load_document(FILE))
    expected = []
    for start, message in EXPECTED:
        line = next(number for number, text in enumerate(lines, 1) if text.startswith(start))
        expected.append(f"{FILE}:{line}: {message}")
    assert [str(problem) for problem in caught.value.problems] == expected
    assert str(caught.value).startswith("7 problems:\n")
    assert caught.value.exit_code == 2
