"""The judge of a run: verdicts on groups of answers, and what they add to the rewards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from retrograd.task_errors import one_error
from retrograd_hookspecs import Judge, JudgeGroup, JudgeMember, RolloutError, RolloutGroup, Score

FAILED = "judge failed"
"""How `RolloutGroup.dropped` begins where there is no verdict."""
CHECK_SECONDS = 0.1
"""How often it is looked whether the run was asked to stop."""


class Judging:
    """Asks a judge about groups, and adds its verdicts to the rewards.

    The judge lives in one event loop for the whole run, in a thread of its own, so that its connections are
    kept.

    Args:
        weight: what a verdict is multiplied by, unless the answer's reward brings a weight of its own.
        failure: "drop_group", or "fail" to end the run.
        max_dropped_fraction: largest share of an update's groups that may be lost.
        check: called while verdicts are awaited; gives them up by raising.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        weight: float,
        failure: Literal["drop_group", "fail"],
        max_dropped_fraction: float,
        check: Callable[[], None],
    ) -> None:
        self._judge = judge
        self._weight = weight
        self._failure = failure
        self._max_dropped_fraction = max_dropped_fraction
        self._check = check
        self._opened: Any = None
        self._portal: Any = None

    def add_verdicts(self, groups: Sequence[RolloutGroup]) -> float:
        """Judge the groups that are not dropped; the seconds that took.

        A group without a verdict is dropped. Raises: `RolloutError` for one if `failure` is "fail".
        """
        started = time.perf_counter()
        self._call(judge_groups, self._judge, groups, check=self._check)
        for group in groups:
            if group.dropped.startswith(FAILED) and self._failure == "fail":
                hint = 'judge_failure = "drop_group" would leave the group out'
                raise RolloutError(f"{group.source}: {group.dropped}; {hint}")
            for rollout in group.members:
                if not group.dropped and rollout.judgement is not None and rollout.total is not None:
                    own = rollout.reward.judge_weight
                    rollout.total += (self._weight if own is None else own) * rollout.judgement.value
        return time.perf_counter() - started

    def check_drops(self, groups: Sequence[RolloutGroup], update: int) -> None:
        """Raise `RolloutError` if an update lost more groups to failures than it may."""
        failed = [group for group in groups if group.dropped.startswith(FAILED)]
        most = self._max_dropped_fraction
        if len(failed) > most * len(groups):
            raise RolloutError(
                f"the judge failed for {len(failed)} of {len(groups)} groups of update {update}, more than"
                f" max_judge_dropped_fraction = {most:g}; {failed[0].dropped}"
            )

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """`judge/*` of an update, with those of the judge itself since the last call."""
        failed = sum(group.dropped.startswith(FAILED) for group in groups)
        verdicts = [
            [rollout.judgement.value for rollout in group.members if rollout.judgement is not None]
            for group in groups
            if not group.dropped.startswith(FAILED)
        ]
        judged = [values for values in verdicts if values]
        own: Mapping[str, float] = getattr(self._judge, "metrics", dict)()
        metrics = {f"judge/{name}": float(value) for name, value in own.items()}
        metrics["judge/failed_fraction"] = failed / len(groups)
        if judged:
            metrics["judge/degenerate_group_fraction"] = sum(len(set(v)) == 1 for v in judged) / len(judged)
            metrics["judge/score_mean"] = float(np.mean(np.concatenate(judged)))
        return metrics

    def close(self) -> None:
        """End the judge and its event loop; may be called more than once."""
        self._call(self._judge.close)
        opened, self._opened, self._portal = self._opened, None, None
        opened.__exit__(None, None, None)

    def _call(
        self, function: Callable[..., Any], *arguments: Any, check: Callable[[], None] | None = None
    ) -> None:
        from concurrent.futures import wait

        if self._portal is None:
            from anyio.from_thread import start_blocking_portal

            self._opened = start_blocking_portal()
            self._portal = self._opened.__enter__()
        future = self._portal.start_task_soon(function, *arguments)
        try:
            while not wait([future], CHECK_SECONDS if check is not None else None).done:
                assert check is not None
                check()
            future.result()
        except BaseException:
            future.cancel()  # interrupted while a verdict is still awaited
            raise


def answers_of(group: RolloutGroup) -> JudgeGroup:
    """The answers of a group as the judge sees them."""
    return JudgeGroup(
        id=group.id,
        opening=group.messages,
        members=tuple(JudgeMember(messages=r.messages) for r in group.members if not r.excluded),
        rubric=group.rubric,
    )


def trajectories_of(group: RolloutGroup) -> JudgeGroup:
    """The trajectories of a group as the judge sees them: with a `summary` the final state that it describes
    stands for the transcript."""
    summarised = "summary" in (group.metadata.get("env") or {})
    return JudgeGroup(
        id=group.id,
        opening=group.messages,
        members=tuple(
            JudgeMember(
                messages=() if summarised and rollout.final_state is not None else rollout.messages,
                final_state=rollout.final_state,
            )
            for rollout in group.members
            if not rollout.excluded
        ),
        rubric=group.rubric,
    )


async def judge_groups(
    judge: Judge,
    groups: Sequence[RolloutGroup],
    shown: Callable[[RolloutGroup], JudgeGroup] = answers_of,
) -> None:
    """Compare the members of each group that are not excluded; a verdict of kind "error" drops the group.
    `shown` makes what the judge sees.

    Raises: `RolloutError` if the judge does not give one score a member; what the judge raises.
    """
    import anyio

    async def one(group: RolloutGroup) -> None:
        members = [rollout for rollout in group.members if not rollout.excluded]
        scores = await judge.score(shown(group))
        if len(scores) != len(members):
            raise RolloutError(f"the judge gave {len(scores)} scores for {len(members)} answers")
        for rollout, score in zip(members, scores, strict=True):
            rollout.judgement = score
        failed = [score for score in scores if not _usable(score)]
        if failed:
            group.dropped = f"{FAILED}: {failed[0].explanation or failed[0].kind}"

    with one_error():
        async with anyio.create_task_group() as tasks:
            for group in groups:
                if not group.dropped:
                    tasks.start_soon(one, group)


def _usable(score: Score) -> bool:
    return score.kind == "value" and bool(np.isfinite(score.value))
