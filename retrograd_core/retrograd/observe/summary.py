"""What a list of many groups shows of each: the page keeps these of all rollouts, and no texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .records import Record

EXCERPT = 160
"""Characters of a prompt or an answer in a list."""


class GroupSummary:
    """Collects the records of one group."""

    def __init__(self) -> None:
        self._row: Record = {"kind": "group", "dropped": ""}
        self._members: dict[str, Record] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """A `prompt`, `rollout`, `outcome` or `selection` record of the group."""
        kind = record["kind"]
        if kind == "prompt":
            self._row |= {
                **{key: record[key] for key in ("segment", "update", "group", "split", "source")},
                "prompt": _excerpt(_last_user_text(record["messages"])),
            }
        elif kind == "selection":
            self._row["dropped"] = record["dropped"]
            for member, reason in record["excluded"].items():
                self._member(member)["excluded"] = reason
        elif kind == "rollout":
            self._rollout(record)
        elif kind == "outcome":
            self._outcome(record)

    def row(self) -> Record:
        """The summary."""
        return {**self._row, "members": list(self._members.values())}

    def _member(self, name: str) -> Record:
        return self._members.setdefault(name, {"id": name})

    def _rollout(self, record: Mapping[str, Any]) -> None:
        member = self._member(record["member"])
        messages = record.get("messages", ())
        answers = [message for message in messages if message["role"] == "assistant"]
        member |= {
            "finish": record["finish"],
            "tokens": record["tokens"]["trained_count"],
            "text": _excerpt(record["completion"]),
        }
        counts = {
            "turns": len(answers) if len(answers) > 1 else 0,
            "calls": sum(len(message.get("tool_calls", ())) for message in answers),
            "tool_errors": sum(1 for message in messages if message.get("is_error")),
        }
        member |= {name: count for name, count in counts.items() if count}

    def _outcome(self, record: Mapping[str, Any]) -> None:
        member = self._member(record["member"])
        member["total"] = record["total"]
        for name in ("reward", "judgement"):
            score = record.get(name)
            if score is not None:
                member[name] = score["value"] if score["kind"] == "value" else score["kind"]
        if steps := record.get("step_rewards"):
            member["steps"] = round(sum(reward or 0.0 for _, reward in steps), 9)


def _last_user_text(messages: list[Mapping[str, Any]]) -> str:
    texts = [message["content"] for message in messages if message["role"] == "user"]
    if texts:
        return str(texts[-1])
    return str(messages[-1]["content"]) if messages else ""


def _excerpt(text: str) -> str:
    """The start of a text on one line."""
    words = " ".join(text[: 4 * EXCERPT].split())
    return words if len(words) <= EXCERPT else words[: EXCERPT - 1] + "…"
