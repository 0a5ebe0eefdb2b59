"""Packs the folders of `tasks/` into scenarios.jsonl and heldout.jsonl.

    python make_data.py

`NAME.py` has a bug, and `test_NAME.py`, which the model is given, fails on it. `hidden_NAME.py` is written
just before the verification and is never seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TASKS = Path(__file__).parent / "tasks"
SYSTEM = "You are a programmer. Work with the tools, and submit when the work is done."
FILES = {"scenarios": ("intervals", "pages", "roman", "cache"), "heldout": ("words", "clock")}


def scenario(name: str) -> dict[str, Any]:
    """A line of a scenario file."""
    folder = TASKS / name

    def text(file: str) -> str:
        return (folder / file).read_text(encoding="utf-8")

    given = (f"{name}.py", f"test_{name}.py")
    return {
        "id": name,
        "system": SYSTEM,
        "user": f"Some of the tests in test_{name}.py fail. Mend {name}.py; the tests are right.",
        "metadata": {
            "env": {
                "files": {file: text(file) for file in given},
                "setup": ["git init -q && git add -A && git -c user.name=- -c user.email=- commit -qm start"],
                "verify": {
                    "command": ["python3", "-m", "pytest", "-q"],
                    "files": {f"test_hidden_{name}.py": text(f"hidden_{name}.py")},
                },
                "summary": ["git", "diff"],
            }
        },
    }


def write(folder: Path) -> None:
    """Write both files into `folder`."""
    for file, names in FILES.items():
        lines = [json.dumps(scenario(name)) + "\n" for name in names]
        (folder / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
