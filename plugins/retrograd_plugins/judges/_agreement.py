"""How well a judge's order of each group agrees with labels, and with its own order in a second pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from retrograd_hookspecs import Judge, Score

from ._fixtures import Fixture


@attrs.frozen(kw_only=True)
class Agreement:
    """Rank correlations of two lists of values; None where one of the lists is constant.

    Source: Kendall 1945, The treatment of ties in ranking problems (tau-b); Spearman 1904 (rho).
    """

    tau: float | None
    rho: float | None

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Agreement:
        """Of two lists of equal length."""
        from scipy.stats import kendalltau, spearmanr

        if len(set(first)) < 2 or len(set(second)) < 2:
            return cls(tau=None, rho=None)
        return cls(
            tau=float(kendalltau(first, second).statistic), rho=float(spearmanr(first, second).statistic)
        )

    @classmethod
    def mean(cls, parts: Sequence[Agreement]) -> Agreement:
        """Mean over those that are defined; None if none is."""
        return cls(tau=_mean([part.tau for part in parts]), rho=_mean([part.rho for part in parts]))


@attrs.frozen(kw_only=True)
class GroupReport:
    """A group's scores in both passes. `error` says why there are none; `labels` is the mean of the passes'
    agreement with the labels, `itself` that of the two passes, `shift` the mean absolute difference of a
    member's two scores."""

    id: str
    members: int
    scores: tuple[tuple[float, ...], ...] = ()
    labels: Agreement = Agreement(tau=None, rho=None)
    itself: Agreement = Agreement(tau=None, rho=None)
    shift: float | None = None
    equal: int = 0
    """Passes in which all members had the same score, which have no order."""
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "id": self.id,
            "members": self.members,
            "error": self.error or None,
            "scores": [list(scores) for scores in self.scores],
            "kendall_tau": self.labels.tau,
            "spearman_rho": self.labels.rho,
            "self_kendall_tau": self.itself.tau,
            "self_spearman_rho": self.itself.rho,
            "self_mean_difference": self.shift,
            "passes_all_equal": self.equal,
        }


async def evaluate(judge: Judge, fixtures: Sequence[Fixture]) -> list[GroupReport]:
    """Judge every group twice.

    The second pass has other group ids, so that a judge that derives the order of presentation from them
    presents the members in another one: an opinion that depends on the order is not consistent.
    """
    import anyio

    passes: list[dict[int, Sequence[Score]]] = [{}, {}]

    async def score(number: int, index: int) -> None:
        group = fixtures[index].group
        named = attrs.evolve(group, id=f"{group.id} (pass {number + 1})")
        passes[number][index] = await judge.score(named)

    for number in range(2):
        async with anyio.create_task_group() as tasks:
            for index in range(len(fixtures)):
                tasks.start_soon(score, number, index)
    return [_report(fixture, [done[index] for done in passes]) for index, fixture in enumerate(fixtures)]


def _report(fixture: Fixture, passes: Sequence[Sequence[Score]]) -> GroupReport:
    name, members = fixture.group.id, len(fixture.labels)
    for scores in passes:
        failed = [score.explanation or score.kind for score in scores if score.kind != "value"]
        if failed:
            return GroupReport(id=name, members=members, error=failed[0])
    values = tuple(tuple(score.value for score in scores) for scores in passes)
    return GroupReport(
        id=name,
        members=members,
        scores=values,
        labels=Agreement.mean([Agreement.of(scores, fixture.labels) for scores in values]),
        itself=Agreement.of(*values),
        shift=math.fsum(abs(a - b) for a, b in zip(*values, strict=True)) / members,
        equal=sum(len(set(scores)) == 1 for scores in values),
    )


def overall(reports: Sequence[GroupReport]) -> Mapping[str, Any]:
    """Means over the groups in which a figure is defined, and how many groups have none.

    Scores are relative to their group, so values of different groups are never ranked together.
    """
    judged = [report for report in reports if not report.error]
    labels = Agreement.mean([report.labels for report in judged])
    itself = Agreement.mean([report.itself for report in judged])
    return {
        "groups": len(reports),
        "failed": len(reports) - len(judged),
        "without_order": sum(report.labels.tau is None for report in judged),
        "kendall_tau": labels.tau,
        "spearman_rho": labels.rho,
        "self_kendall_tau": itself.tau,
        "self_spearman_rho": itself.rho,
        "self_mean_difference": _mean([report.shift for report in judged]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
