"""Writes prompts.jsonl and heldout.jsonl: one sentence is asked for, with a given word in it.

python make_data.py
"""

from __future__ import annotations

import json
from pathlib import Path

TRAINED = """
river bread window garden teacher train summer mountain apple music horse doctor winter kitchen island
letter market bridge forest coffee sister flower school engine ocean picture butter castle dinner farmer
hammer jacket ladder mirror needle orange pencil rabbit saddle ticket uncle valley wagon yellow basket
candle desert evening finger guitar harbor insect jungle kettle lemon machine nature office palace
"""
HELD_OUT = """
lake cheese door field writer bus spring hill pear song cow nurse autumn bedroom coast story shop tunnel
tree tea brother grass college motor beach movie honey tower lunch baker knife shirt
"""


def write(folder: Path) -> None:
    """Write both files into `folder`."""
    for name, words in (("prompts", TRAINED), ("heldout", HELD_OUT)):
        lines = []
        for word in words.split():
            prompt = f'Write one short sentence with the word "{word}".'
            lines.append(json.dumps({"messages": [{"role": "user", "content": prompt}]}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
