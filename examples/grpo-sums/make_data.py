"""Writes prompts.jsonl and heldout.jsonl: sums of two numbers from 2 to 49.

No held-out sum is trained on, nor the same sum turned round.

    python make_data.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path


def write(folder: Path) -> None:
    """Write both files into `folder`."""
    pairs = [(a, b) for a in range(2, 50) for b in range(a, 50)]
    random.Random(3).shuffle(pairs)
    for name, chosen in (("prompts", pairs[:256]), ("heldout", pairs[256:296])):
        lines = []
        for number, (a, b) in enumerate(chosen):
            left, right = (a, b) if number % 2 else (b, a)
            prompt = f"What is {left} + {right}? Reply with the sum."
            record = {"messages": [{"role": "user", "content": prompt}], "sum": a + b}
            lines.append(json.dumps(record) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
