"""The README's commands, so that CI and tests run what a newcomer reads.

`python tests/readme_commands.py quickstart|tests` prints one command.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def blocks(text: str) -> list[str]:
    """The contents of all `sh` code blocks, in order."""
    return [block.strip() for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]


def command(name: str) -> str:
    """The `quickstart` command (the one that ends in that word) or the `tests` command (pytest)."""
    ending = {"quickstart": "retrograd quickstart", "tests": "pytest"}[name]
    [found] = [block for block in blocks(README.read_text()) if block.endswith(ending)]
    return found


if __name__ == "__main__":
    sys.stdout.write(command(sys.argv[1]) + "\n")
