"""A judge that verifies: no model is asked, and nothing is compared.

It reads a group of trajectories a line, and writes a line with their scores (`docs/judges.md`). The right
answer stands in the scenario's rubric, which a judge `ruler` would read, too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RIGHT = re.compile(r"The right answer is (-?\d+)\.")
NUMBER = re.compile(r"-?\d+")


def score(messages: Sequence[Mapping[str, Any]], right: str) -> tuple[float, str]:
    """From 0 to 1, and why.

    | score | for |
    |---|---|
    | 1 | a tool returned the right answer, and it is the last number of the last turn |
    | 0.5 | a tool returned it, and the last turn does not say so |
    | 0.2 | the right answer without a tool that returned it |
    | 0 | anything else |
    """
    results = [m["content"].strip() for m in messages if m["role"] == "tool" and not m.get("is_error")]
    last = messages[-1] if messages else {}
    said = NUMBER.findall(last.get("content", "")) if last.get("role") == "assistant" else []
    calculated, answered = right in results, bool(said) and said[-1] == right
    if calculated and answered:
        return 1.0, "calculated and answered"
    if calculated:
        return 0.5, "calculated, not answered"
    if answered:
        return 0.2, "answered without a tool"
    return 0.0, f"neither calculated nor answered {right}"


def verdict(group: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of a group. Raises: `ValueError` if its rubric names no answer."""
    found = RIGHT.search(group["rubric"])
    if found is None:
        raise ValueError(f"the rubric of {group['group']} names no right answer: {group['rubric']!r}")
    scores = []
    for member in group["members"]:
        value, why = score(member["messages"], found[1])
        scores.append({"id": member["id"], "score": value, "explanation": why})
    return {"group": group["group"], "scores": scores}


def serve(lines: Iterable[str]) -> None:
    """Answer each line with one."""
    for line in lines:
        sys.stdout.write(json.dumps(verdict(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.stdin)
