"""What a language model wrote, read as a verdict: found among reasoning and prose, then checked strictly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from retrograd.chat_replies import ChatError, ReplyError, shown


class VerdictError(ChatError):
    """There is no verdict; the message is the reason that scores of kind "error" carry."""


@attrs.frozen(kw_only=True)
class Verdict:
    """A score in [0, 1] and why."""

    score: float
    explanation: str


@attrs.frozen(kw_only=True)
class Comparison:
    """`winner` is 1 or 2, the candidate's place in the request, or 0 for a tie."""

    winner: int
    explanation: str


def scores_schema(ids: Sequence[str]) -> dict[str, Any]:
    """JSON Schema of a verdict on the candidates `ids`.

    It uses only what strict modes of servers take: no bounds of numbers, no counts.
    """
    entry = _object(
        id={"type": "string", "enum": list(ids)},
        explanation={"type": "string"},
        score={"type": "number"},
    )
    return _object(scores={"type": "array", "items": entry})


def comparison_schema() -> dict[str, Any]:
    """JSON Schema of the verdict on two candidates."""
    return _object(
        explanation={"type": "string"},
        winner={"type": "string", "enum": ["1", "2", "tie"]},
    )


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def read_scores(value: Any, ids: Sequence[str]) -> dict[str, Verdict]:
    """Verdict by id, one for each of `ids`. Raises `ReplyError`."""
    entries = value.get("scores") if isinstance(value, dict) else None
    if not isinstance(entries, list):
        raise ReplyError(f'the reply has no array "scores": {shown(value)}')
    found: dict[str, Verdict] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise ReplyError(f"an entry of scores is no object: {shown(entry)}")
        name = _id(entry.get("id"))
        if name not in ids:
            raise ReplyError(f"there is no candidate with id {shown(entry.get('id'))}")
        if name in found:
            raise ReplyError(f"candidate {name} is scored twice")
        found[name] = Verdict(score=_score(entry, name), explanation=_explanation(entry))
    missing = [name for name in ids if name not in found]
    if missing:
        raise ReplyError(f"{len(found)} of {len(ids)} candidates are scored; missing: {', '.join(missing)}")
    return found


def read_comparison(value: Any) -> Comparison:
    """The verdict on two candidates. Raises `ReplyError`."""
    if not isinstance(value, dict) or "winner" not in value:
        raise ReplyError(f'the reply has no key "winner": {shown(value)}')
    winner = {"1": 1, "2": 2, "tie": 0}.get(_id(value["winner"]).lower())
    if winner is None:
        raise ReplyError(f'the winner is {shown(value["winner"])}, not "1", "2" or "tie"')
    return Comparison(winner=winner, explanation=_explanation(value))


def _id(value: Any) -> str:
    # Without a schema models write 3 as often as "3".
    return str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _score(entry: dict[str, Any], name: str) -> float:
    score = entry.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ReplyError(f"the score of candidate {name} is no number: {shown(score)}")
    if not math.isfinite(score) or not 0 <= score <= 1:
        raise ReplyError(f"the score of candidate {name} is {score}, outside 0 to 1")
    return float(score)


def _explanation(entry: dict[str, Any]) -> str:
    explanation = entry.get("explanation", "")
    if not isinstance(explanation, str):
        raise ReplyError(f"an explanation is no string: {shown(explanation)}")
    return explanation.strip()
