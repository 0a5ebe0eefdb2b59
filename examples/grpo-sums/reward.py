"""What an answer is worth: 1 if its last number is the sum, else 0. There are no steps in between."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def score(prompt: str, completion: str, *, metadata: Mapping[str, Any]) -> float | None:
    """1 or 0; no reward if the prompt's record has no `sum`."""
    if "sum" not in metadata:
        return None
    numbers = re.findall(r"\d+", completion.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == str(metadata["sum"]))
