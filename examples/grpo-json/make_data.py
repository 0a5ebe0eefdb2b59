"""Writes prompts.jsonl and heldout.jsonl: a sentence of three facts, to be repeated as a JSON object.

    python make_data.py

No name, place, thing, color, or day of the held-out sentences occurs in a sentence that is trained on.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

Values = tuple[Any, ...]

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "person": ("{} is {} years old and lives in {}.", ("name", "age", "city")),
    "sale": ("The {} costs {} dollars and is {}.", ("item", "price", "color")),
    "meeting": ("On {} at {} we meet in the {}.", ("day", "hour", "place")),
}
"""The sentence, and the key of each of its facts."""

TRAINED: dict[str, tuple[Values, Values, Values]] = {
    "person": (
        ("Anna", "Tom", "Lucy", "Peter", "Maria", "David", "Sarah", "Paul"),
        tuple(range(20, 60, 2)),
        ("Paris", "London", "Rome", "Tokyo", "Boston", "Madrid", "Dublin", "Chicago"),
    ),
    "sale": (
        ("lamp", "chair", "phone", "jacket", "table", "watch", "bag", "clock"),
        tuple(range(30, 90, 3)),
        ("red", "blue", "green", "black"),
    ),
    "meeting": (("Monday", "Tuesday", "Thursday", "Saturday"), (2, 3, 5, 8, 9), ("park", "library", "hotel")),
}
HELD_OUT: dict[str, tuple[Values, Values, Values]] = {
    "person": (
        ("Emma", "Jack", "Laura", "Simon", "Nora", "Frank"),
        tuple(range(21, 61, 3)),
        ("Berlin", "Sydney", "Vienna", "Denver", "Oslo", "Toronto"),
    ),
    "sale": (
        ("shirt", "camera", "sofa", "mirror", "bike", "guitar"),
        tuple(range(31, 91, 4)),
        ("white", "yellow", "brown", "gray"),
    ),
    "meeting": (("Wednesday", "Friday", "Sunday"), (1, 4, 6, 7), ("museum", "school", "office")),
}


def records(values: dict[str, tuple[Values, Values, Values]], each: int, seed: int) -> list[dict[str, Any]]:
    """`each` records a kind, the kinds in turn, no two alike."""
    draw = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    for number in range(each * len(KINDS)):
        kind = list(KINDS)[number % len(KINDS)]
        sentence, keys = KINDS[kind]
        while True:
            facts = [draw.choice(choices) for choices in values[kind]]
            asked = ", ".join(f'"{key}"' for key in keys)
            prompt = f"{sentence.format(*facts)}\nReply with JSON only: an object with the keys {asked}."
            if prompt not in found:
                break
        found[prompt] = {
            "messages": [{"role": "user", "content": prompt}],
            "expected": dict(zip(keys, facts, strict=True)),
        }
    return list(found.values())


def write(folder: Path) -> None:
    """Write both files into `folder`."""
    for name, values, each, seed in (("prompts", TRAINED, 32, 1), ("heldout", HELD_OUT, 12, 2)):
        lines = [json.dumps(record) + "\n" for record in records(values, each, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
