"""Group relative policy optimization: answers to a prompt are compared with each other.

J = 1/(N·L) · Σ_i Σ_t [ min(r_{i,t}·A_i, clip(r_{i,t}, 1 − ε_low, 1 + ε_high)·A_i) − β·k3(π_ref/π) ]
A_i = R_i − mean of the group (or of the others, "leave_one_out")

with r the ratio of the policy to that of the rollouts, N the trained answers of the update and L =
max_new_tokens. That is Dr. GRPO (no division by the group's standard deviation nor by an answer's length)
with DAPO's corrections: two clip distances, groups without spread left out, a penalty before the budget
ends, truncated answers masked, replacements drawn for groups without signal. One optimizer step is one pass
over all answers of the update. `docs/objectives.md` has the whole of it.

Minimal TOML::

    [run]
    algorithm = "grpo"
    [model]
    path = "model.gguf"
    [output]
    path = "adapter.gguf"
    [lora]
    [training]
    ctx = 512
    micro_batch = 512
    lr = 1e-5
    [grpo]
    prompts = "prompts.jsonl"
    reward = "python:./reward.py:score"
    updates = 100
    prompts_per_update = 2
    group_size = 8
    grpo_epochs = 1
    clip_range_low = 0.2
    clip_range_high = 0.28
    kl_coefficient = 0.0
    [grpo.sampling]
    temperature = 1.0
    top_p = 1.0
    max_new_tokens = 128
    seed = 0

Sources: Shao et al. 2024 (DeepSeekMath, GRPO); Liu et al. 2025 (Dr. GRPO); Yu et al. 2025 (DAPO); Zheng et
al. 2025 (GSPO: `importance_sampling_level = "sequence"`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from retrograd_hookspecs import (
    Algorithm,
    BuildContext,
    Component,
    PolicyObjective,
    Rollout,
    RolloutError,
    RolloutGroup,
    hookimpl,
)

from ._base import RolloutAlgorithm
from ._grpo_config import GRPOConfig, check_grpo
from ._judging import Judging
from ._kl import KlCoefficient, KlScheduleConfig
from ._parts import ROLLOUT_KEYS, Collected, Parts
from ._prompts import PromptOrder
from ._rewards import build_reward
from ._rollouts import HOOK_HINT, Draw, all_equal, why_lost, why_stalled

if TYPE_CHECKING:
    from retrograd.reference import Reference

__all__ = ["GRPOConfig", "Grpo", "retrograd_algorithms"]

EQUAL = "all rewards are equal"


class Grpo(RolloutAlgorithm):
    """The algorithm; prompts are read by `prepare`."""

    def __init__(
        self, config: GRPOConfig, parts: Parts, *, reference: Reference | None, judging: Judging | None
    ) -> None:
        super().__init__(
            parts,
            prompts=config.prompts,
            updates=config.updates,
            epochs=config.grpo_epochs,
            params=config.sampling.params(),
            template_variables=config.template_variables,
            judged=judging is not None,
        )
        self.answers_per_update = config.prompts_per_update * config.group_size
        self._config = config
        self._reference = reference
        self._judging = judging
        self._kl = KlCoefficient(config.kl_coefficient, config.kl_schedule or KlScheduleConfig())

    def next_draws(self, *, advance: bool = True, count: int | None = None) -> list[Draw]:
        """The next prompts, `prompts_per_update` unless `count` says otherwise."""
        config = self._config
        order = PromptOrder(
            count=len(self.prompts),
            seed=config.sampling.seed,
            shuffled=config.prompt_order == "shuffled",
        )
        numbers = range(self.draws, self.draws + (count or config.prompts_per_update))
        if advance:
            self.draws = numbers.stop
        return [
            Draw(
                id=f"{self.update_number + 1}.{number}",
                prompt=self.prompts[order.at(number)],
                count=config.group_size,
                stream=number * config.group_size,
            )
            for number in numbers
        ]

    def collect(self) -> Collected:
        """Draw groups, score, judge, take advantages; with dynamic sampling until enough have signal."""
        from retrograd.policy_update import PolicyBatch

        config = self._config
        wanted = config.prompts_per_update
        most = wanted * (config.dynamic_sampling.max_resample_factor if config.dynamic_sampling else 1)
        groups: list[RolloutGroup] = []
        useful: list[RolloutGroup] = []
        seconds = {"reward": 0.0, "judge": 0.0, "reference": 0.0}
        while len(useful) < wanted and len(groups) < most:
            count = min(wanted - len(useful), most - len(groups))
            drawn = self.answerer.draw(self.next_draws(count=count), self.progress())
            seconds["reward"] += self.answerer.score(drawn)
            seconds["judge"] += self._finish_rewards(drawn)
            self.parts.rollouts_ready(drawn)
            for group in drawn:
                self._take_advantages(group)
            groups += drawn
            useful += [group for group in drawn if not group.dropped]
            if not config.dynamic_sampling:
                break
        if self._judging is not None:
            self._judging.check_drops(groups, self.update_number + 1)
        batch = None
        if useful:
            members = [[r for r in group.members if not r.excluded] for group in useful]
            answers = sum(len(group) for group in members)
            batch = PolicyBatch.of(members, normalizer=float(answers * config.sampling.max_new_tokens))
            seconds["reference"] = self._score_reference(batch)
        metrics = self.collected_metrics(groups, **seconds)
        metrics["batch/groups_trained"] = float(len(useful))
        metrics["policy/kl_coefficient"] = self._kl.at(self.update_number)
        if self._judging is not None:
            metrics |= self._judging.metrics(groups)
        return Collected(groups=groups, metrics=metrics, batch=batch, stalled=why_stalled(groups))

    def objective(self) -> PolicyObjective:
        """The clip range, and the coefficient of this update."""
        config = self._config
        return PolicyObjective(
            clip_low=config.clip_range_low,
            clip_high=config.clip_range_high,
            level=config.importance_sampling_level,
            kl_coefficient=self._kl.at(self.update_number) if self._reference is not None else 0.0,
        )

    def update_ended(self, metrics: Mapping[str, float]) -> None:
        """Adapt the KL coefficient."""
        if "policy/kl_reference" in metrics:
            self._kl.observe(self.update_number - 1, metrics["policy/kl_reference"])

    def stop_reason(self) -> str:
        """Too many updates in a row without signal."""
        most = self._config.max_stalled_updates
        if most and self.stalled_in_a_row >= most:
            return (
                f"{most} updates in a row had no signal (max_stalled_updates): the answers to a prompt all"
                " earn the same; choose prompts that the model solves sometimes, a reward with more steps, or"
                " a larger group_size"
            )
        return ""

    def state(self) -> dict[str, Any]:
        """As the base class, with the adapted coefficient."""
        return {**super().state(), "kl_scale": self._kl.scale}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`."""
        super().load(state)
        self._kl.scale = float(state["kl_scale"])

    def close(self) -> None:
        """End the reward and the judge."""
        judging, self._judging = self._judging, None
        try:
            super().close()
        finally:
            if judging is not None:
                judging.close()

    def _finish_rewards(self, groups: Sequence[RolloutGroup]) -> float:
        """Leave out what cannot be trained, add penalty and verdict to the rewards; the judge's seconds."""
        from retrograd.advantages import overlong_penalty

        config = self._config
        for group in groups:
            for rollout in group.members:
                if rollout.reward.kind != "value":
                    rollout.excluded = why_lost(rollout)
                elif config.mask_truncated and rollout.finish == "length":
                    rollout.excluded = "truncated"
                if rollout.reward.kind == "value":
                    rollout.total = rollout.reward.value
            if sum(not rollout.excluded for rollout in group.members) < 2:
                group.dropped = f"fewer than two answers are left: {_first_exclusion(group.members)}"
        seconds = self._judging.add_verdicts(groups) if self._judging is not None else 0.0
        if config.overlong_penalty is not None:
            for rollout in (r for group in groups for r in group.members if r.total is not None):
                [penalty] = overlong_penalty(
                    [rollout.trained_tokens],
                    budget=config.sampling.max_new_tokens,
                    buffer_tokens=config.overlong_penalty.buffer_tokens,
                    max_penalty=config.overlong_penalty.max_penalty,
                )
                rollout.total = (rollout.total or 0.0) + float(penalty)
        return seconds

    def _take_advantages(self, group: RolloutGroup) -> None:
        from retrograd.advantages import group_advantages

        if group.dropped:
            return
        members = [rollout for rollout in group.members if not rollout.excluded]
        if len(members) < 2:
            group.dropped = f"fewer than two answers are left: {_first_exclusion(group.members)}"
            return
        totals = [rollout.total for rollout in members if rollout.total is not None]
        if len(totals) < len(members) or not np.all(np.isfinite(totals)):
            raise RolloutError(
                f"{group.source}: a hook left rewards {totals} for {len(members)} answers: {HOOK_HINT}"
            )
        if all_equal(totals):
            group.dropped = EQUAL
            return
        advantages = group_advantages(totals, self._config.baseline)
        for rollout, advantage in zip(members, advantages, strict=True):
            rollout.advantage = np.where(rollout.trained, advantage, 0.0)

    def _score_reference(self, batch: Any) -> float:
        if self._reference is None:
            return 0.0
        started = time.perf_counter()
        batch.add_reference(self._reference)
        return time.perf_counter() - started


def _first_exclusion(members: Sequence[Rollout]) -> str:
    return next((rollout.excluded for rollout in members if rollout.excluded), "none has a reward")


def _build(config: GRPOConfig, context: BuildContext) -> Algorithm:
    run = context.config
    judging = None
    if config.judge is not None and config.judge_weight is not None:
        judging = Judging(
            context.build("judges", config.judge.type),
            weight=config.judge_weight,
            failure=config.judge_failure,
            max_dropped_fraction=config.max_judge_dropped_fraction,
            check=context.service("interrupt").check,
        )
    parts = Parts(
        **{name: context.service(name) for name in Parts.NEEDS},
        loss=context.build("losses", config.loss),
        reward=build_reward(config, context, allow_judge_weight=judging is not None),
        training=run.training,
        evaluation=run.evaluation,
    )
    reference = context.service("reference") if config.kl_coefficient > 0 else None
    return Grpo(config, parts, reference=reference, judging=judging)


@hookimpl
def retrograd_algorithms() -> list[Component[GRPOConfig, Algorithm]]:
    """`grpo`."""
    return [
        Component(
            name="grpo",
            config=GRPOConfig,
            build=_build,
            summary="Learning from rewards: answers to a prompt are compared with each other.",
            source="Shao et al. 2024, equation 3; Liu et al. 2025, section 3.2; Yu et al. 2025, equation 8",
            needs=(*Parts.NEEDS, "reference"),
            selects={"loss": "losses", "reward": "rewards", "judge": "judges"},
            check=check_grpo,
            applies=("evaluation", "observe", "reference"),
            reads=ROLLOUT_KEYS,
            fixed_accumulation=True,
        )
    ]
