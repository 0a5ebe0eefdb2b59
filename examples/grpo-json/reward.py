"""What an answer is worth: tenths of a point for what is right about its JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def score(prompt: str, completion: str, *, metadata: Mapping[str, Any]) -> float | None:
    """From 0 to 1, in steps of 0.1.

    | tenths | for |
    |---|---|
    | 1 | a JSON object anywhere in the answer; without one the answer earns 0 |
    | 2 each | the right value under each of the three keys; a number is no string, `31` is not `"31"` |
    | 1 | the three keys and no other |
    | 2 | nothing but the object: no text before or after it, no code fence |

    `expected`, the object that is asked for, is a field of the prompt's record; without it, no reward.
    """
    expected = metadata.get("expected")
    if expected is None:
        return None
    start = completion.find("{")
    try:
        found, end = json.JSONDecoder().raw_decode(completion, max(start, 0))
    except (ValueError, RecursionError):
        return 0.0
    if start < 0 or not isinstance(found, dict):
        return 0.0
    tenths = 1
    tenths += 2 * sum(_same(found.get(key), value) for key, value in expected.items())
    tenths += found.keys() == expected.keys()
    tenths += 2 * (completion[:start].strip() == "" and completion[end:].strip() == "")
    return tenths / 10


def _same(found: object, expected: object) -> bool:
    return type(found) is type(expected) and found == expected
