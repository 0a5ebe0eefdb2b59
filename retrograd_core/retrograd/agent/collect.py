"""Which trajectories are worth training on: what is refused and why, and the best of the rest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from retrograd_hookspecs import Message, Scenario

from .play import Played

Verification = Literal["where possible", "always", "never"]
"""Which traces must have earned their reward: those of scenarios that are verified, all, or none."""
SUCCESS = 1.0
"""Reward of a solved scenario that does not say its own in `verify.reward_on_success`."""
ROUNDING = 1e-9
"""Sums of rewards may miss a bar by so much."""


@attrs.frozen(kw_only=True)
class Rules:
    """What is kept. `min_reward` replaces the reward of success; it also bounds the scores of a judge."""

    keep: int = 1
    min_reward: float | None = None
    verification: Verification = "where possible"


@attrs.define(eq=False, kw_only=True)
class Attempt:
    """A trajectory of a scenario and what became of it.

    `refused` is why it is no success, `left_out` why a success is not written; "" for neither. `score` is the
    environment's reward or the judge's score, None if there is none.
    """

    number: int
    stream: int
    played: Played
    score: float | None = None
    refused: str = ""
    left_out: str = ""
    detail: str = ""

    def refuse(self, reason: str, detail: str = "") -> None:
        """It is no success."""
        self.refused, self.detail = reason, detail

    @property
    def turns(self) -> list[Message]:
        """What the model wrote."""
        return [m for m in self.played.trajectory.messages if m.role == "assistant"]

    def same_as(self) -> str:
        """Equal for attempts in which the same was said and observed."""
        messages = [
            [m.role, m.content, m.is_error, [[c.name, dict(c.arguments)] for c in m.tool_calls]]
            for m in (*self.played.trajectory.opening, *self.played.trajectory.messages)
        ]
        return json.dumps(messages, ensure_ascii=False, default=str)

    def outcome(self) -> dict[str, Any]:
        """For the report."""
        found: dict[str, Any] = {"attempt": self.number, "stream": self.stream}
        found["outcome"] = self.refused or self.left_out or "kept"
        if self.detail:
            found["detail"] = self.detail
        return found | {"score": self.score, "turns": self.played.turns, "calls": self.played.calls}


@attrs.define(eq=False, kw_only=True)
class ScenarioAttempts:
    """All attempts at one scenario."""

    scenario: Scenario
    members: list[Attempt]

    @classmethod
    def of(cls, scenario: Scenario, members: list[Attempt]) -> ScenarioAttempts:
        """With those refused that did not end cleanly, and the environment's rewards as scores."""
        for member in members:
            member.refuse(*_unclean(member))
            reward = member.played.reward
            if not member.played.failed and not member.played.truncated and reward.kind == "value":
                member.score = reward.value
        return cls(scenario=scenario, members=members)

    @property
    def rewarded(self) -> bool:
        """The environment grades this scenario."""
        given = any(member.played.reward.kind == "value" for member in self.members)
        return given or "verify" in self.scenario.env

    @property
    def passed(self) -> list[Attempt]:
        """Attempts that are not refused."""
        return [member for member in self.members if not member.refused]

    def decide(self, rules: Rules) -> None:
        """Refuse what earned too little, or cannot be told to be right."""
        checked = rules.verification != "never" or rules.min_reward is not None
        bar = self._bar(rules) if self.rewarded else rules.min_reward
        for member in self.passed:
            if not self.rewarded and rules.verification == "always":
                member.refuse("unverified", "nothing verifies this scenario")
            elif not checked or bar is None:
                continue
            elif member.score is None:
                reward = member.played.reward
                why = f"{reward.kind}: {reward.explanation}" if reward.explanation else reward.kind
                member.refuse("unscored", f"reward {why}")
            elif member.score < bar - ROUNDING:
                member.refuse("not solved", f"{member.score:g}, and {bar:g} is needed")

    def ranked(self) -> list[Attempt]:
        """Distinct successes, best first: the higher score, then fewer turns, then fewer tokens."""
        seen: set[str] = set()
        ranked: list[Attempt] = []
        for member in sorted(self.passed, key=_rank):
            same = member.same_as()
            if same in seen:
                member.left_out = "duplicate"
            else:
                seen.add(same)
                ranked.append(member)
        return ranked

    def worse_than(self, best: Attempt, min_gap: float) -> list[Attempt]:
        """Attempts that may stand against the best one, the worst first.

        They ended, have a lower score by at least `min_gap`, and began as the best one did.
        """
        if best.score is None:
            return []
        opening, tools = best.played.trajectory.opening, best.played.trajectory.tools
        worse = [
            member
            for member in self.members
            if member.score is not None
            and best.score - member.score >= max(min_gap - ROUNDING, ROUNDING)
            and member.same_as() != best.same_as()
            and member.played.trajectory.opening == opening
            and member.played.trajectory.tools == tools
        ]
        return sorted(worse, key=lambda member: (member.score, member.number))

    def report(self) -> dict[str, Any]:
        """Pass rate, reasons and every attempt."""
        passed, attempts = len(self.passed), len(self.members)
        return {
            "id": self.scenario.id,
            "origin": self.scenario.origin,
            "attempts": attempts,
            "passed": passed,
            "pass_rate": passed / attempts,
            "kept": sum(not member.left_out for member in self.passed),
            "refused": dict(reasons([self])),
            "members": [member.outcome() for member in self.members],
        }

    def _bar(self, rules: Rules) -> float:
        if rules.min_reward is not None:
            return rules.min_reward
        verify = self.scenario.env.get("verify")
        given = verify.get("reward_on_success") if isinstance(verify, dict) else None
        return SUCCESS if given is None else float(given)


def reasons(groups: Sequence[ScenarioAttempts]) -> Counter[str]:
    """Refusals by reason, the most frequent first."""
    counts = Counter(member.refused for group in groups for member in group.members if member.refused)
    return Counter(dict(counts.most_common()))


def totals(groups: Sequence[ScenarioAttempts]) -> dict[str, Any]:
    """Figures of a whole collection."""
    members = [member for group in groups for member in group.members]
    passed = [member for member in members if not member.refused]
    left_out = Counter(member.left_out for member in passed if member.left_out)
    return {
        "scenarios": len(groups),
        "scenarios_passed": sum(bool(group.passed) for group in groups),
        "attempts": len(members),
        "passed": len(passed),
        "pass_rate": len(passed) / max(len(members), 1),
        "kept": sum(not member.left_out for member in passed),
        "refused": dict(reasons(groups)),
        "left_out": dict(left_out.most_common()),
    }


def _unclean(attempt: Attempt) -> tuple[str, str]:
    """Why an attempt did not end cleanly, with details; ("", "") if it did."""
    played = attempt.played
    if played.failed:
        return "failed", played.failed
    if played.failed_calls:
        return "malformed call", f"{played.failed_calls} calls were unreadable, or no tool takes them"
    if played.truncated:
        return f"truncated: {played.truncated}", ""
    if any(not turn.content.strip() and not turn.tool_calls for turn in attempt.turns):
        return "empty turn", ""
    if any(not turn.tool_calls for turn in attempt.turns[:-1]):
        return "turn without a call", ""
    return "", ""


def _rank(attempt: Attempt) -> tuple[float, int, int, int]:
    score = float("-inf") if attempt.score is None else attempt.score
    return -score, attempt.played.turns, sum(attempt.played.trajectory.trained), attempt.number
