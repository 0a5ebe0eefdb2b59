"""Proximal policy optimization: answers are compared with what a value head expected of them.

L = 1/N · Σ_i 1/|y_i| · Σ_t [ β·k3(π_old‖π) − min(r_{i,t}·A_{i,t}, clip(r_{i,t}, 1 − ε, 1 + ε)·A_{i,t}) ]

over the N answers of an update. The reward comes with an answer's last token; A is its generalised advantage
estimate with the critic, whitened over the tokens of the update. Without the critic A is the reward of the
whole answer, whitened over the answers. β (`kl_coefficient`) keeps the policy near the one that generated the
batch. One optimizer step is one pass over all answers of the update.

Minimal TOML::

    [run]
    algorithm = "ppo"
    [model]
    path = "model.gguf"
    [output]
    path = "adapter.gguf"
    [lora]
    [training]
    ctx = 512
    micro_batch = 512
    lr = 1e-5
    [ppo]
    prompts = "prompts.jsonl"
    reward_command = ["python", "reward.py"]
    updates = 100
    rollout_batch_size = 16
    ppo_epochs = 2
    clip_range = 0.2
    kl_coefficient = 0.05
    [ppo.sampling]
    temperature = 1.0
    top_p = 1.0
    max_new_tokens = 128
    seed = 0

Sources: Schulman et al. 2017 (PPO); Schulman et al. 2016 (GAE); Schulman 2020 (k3).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from retrograd_hookspecs import (
    Algorithm,
    BuildContext,
    Component,
    ConfigTable,
    PolicyObjective,
    Problem,
    Rollout,
    RolloutError,
    RolloutGroup,
    hookimpl,
    key,
)

from ._base import RolloutAlgorithm
from ._critic import Critic, CriticConfig, check_critic, unit_length
from ._parts import ROLLOUT_KEYS, Collected, Parts
from ._prompts import PromptOrder
from ._rewards import RewardKeys, build_reward, check_reward
from ._rollouts import HOOK_HINT, Draw, why_lost
from ._sampling import SamplingConfig


@attrs.frozen(kw_only=True)
class PPOConfig(RewardKeys):
    """Proximal policy optimization."""

    prompts: Path = key(doc="Chat JSONL prompts.", input=True)
    updates: int = key(minimum=1, may_grow=True, doc="Number of rollout batches.")
    rollout_batch_size: int = key(minimum=2, doc="Answers per update, each to a prompt of its own.")
    ppo_epochs: int = key(minimum=1, doc="Optimizer passes per batch.")
    clip_range: float = key(above=0.0, below=1.0, doc="Distance of the clip range from 1, typically 0.2.")
    kl_coefficient: float = key(
        minimum=0.0, doc="Penalty toward the policy that generated the batch; 0 disables it."
    )
    template_variables: Mapping[str, Any] = key(
        factory=dict, doc="Variables for the chat template, e.g. `{ enable_thinking = false }`."
    )
    loss: str = key("ppo", doc="Objective; its options are in `[loss.NAME]`.")
    sampling: SamplingConfig = key(doc="How answers are drawn.")
    critic: CriticConfig = key(factory=CriticConfig, doc="Value head and GAE.")


class Ppo(RolloutAlgorithm):
    """The algorithm; prompts are read by `prepare`."""

    def __init__(self, config: PPOConfig, parts: Parts) -> None:
        super().__init__(
            parts,
            prompts=config.prompts,
            updates=config.updates,
            epochs=config.ppo_epochs,
            params=config.sampling.params(),
            template_variables=config.template_variables,
        )
        self.answers_per_update = config.rollout_batch_size
        self._config = config
        width = parts.engine.model.spec.embedding_length
        self._critic = Critic(config.critic, width) if config.critic.enabled else None

    def next_draws(self, *, advance: bool = True) -> list[Draw]:
        """The next prompts, in the order of the file."""
        order = PromptOrder(count=len(self.prompts), seed=self._config.sampling.seed, shuffled=False)
        numbers = range(self.draws, self.draws + self._config.rollout_batch_size)
        if advance:
            self.draws = numbers.stop
        update = self.update_number + 1
        return [
            Draw(id=f"{update}.{number}", prompt=self.prompts[order.at(number)], count=1, stream=number)
            for number in numbers
        ]

    def collect(self) -> Collected:
        """Draw and score a batch, and take advantages of it."""
        from retrograd.policy_update import PolicyBatch

        groups = self.answerer.draw(self.next_draws(), self.progress())
        seconds = {"reward": self.answerer.score(groups), "critic": 0.0}
        for rollout in (rollout for group in groups for rollout in group.members):
            if rollout.reward.kind == "value":
                rollout.total = rollout.reward.value
            else:
                rollout.excluded = why_lost(rollout)
        self.parts.rollouts_ready(groups)
        kept = [group for group in groups if not group.members[0].excluded and not group.dropped]
        members = [group.members[0] for group in kept]
        extra: dict[str, float] = {}
        if len(members) > 1:
            started = time.perf_counter()
            extra = self._take_advantages(members)
            seconds["critic"] = time.perf_counter() - started
        metrics = {**self.collected_metrics(groups, **seconds), **extra}
        metrics["batch/groups_trained"] = float(len(members))
        if len(members) < 2 or not any(np.any(rollout.advantage) for rollout in members):
            return Collected(groups=groups, metrics=metrics, batch=None, stalled=_why(groups, members))
        batch = PolicyBatch.of(
            [[rollout] for rollout in members],
            normalizer=float(len(members)),
            weight=lambda rollout: 1.0 / rollout.trained_tokens,
        )
        return Collected(groups=groups, metrics=metrics, batch=batch)

    def objective(self) -> PolicyObjective:
        """The clip range and the penalty."""
        config = self._config
        return PolicyObjective(
            clip_low=config.clip_range, clip_high=config.clip_range, kl_coefficient=config.kl_coefficient
        )

    def state(self) -> dict[str, Any]:
        """As the base class, with the critic."""
        critic = {} if self._critic is None else self._critic.state()
        return {**super().state(), **{f"critic.{name}": value for name, value in critic.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`."""
        super().load(state)
        if self._critic is not None:
            prefix = "critic."
            self._critic.load({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})

    def _take_advantages(self, members: Sequence[Rollout]) -> dict[str, float]:
        """Give each answer its advantages; what the critic's fit says."""
        from retrograd.advantages import check_comparable, gae, whiten

        totals = [rollout.total for rollout in members if rollout.total is not None]
        if len(totals) < len(members) or not np.all(np.isfinite(totals)):
            raise RolloutError(f"a hook left rewards {totals} for {len(members)} answers: {HOOK_HINT}")
        check_comparable(totals)
        if self._critic is None:
            for rollout, value in zip(members, whiten(totals), strict=True):
                rollout.advantage = np.where(rollout.trained, value, 0.0)
            return {}
        stored = self._critic.stored(self._hidden(members))
        config = self._config.critic
        pairs = [
            gae(_at_the_end(total, values.size), values, gamma=config.gamma, lam=config.gae_lambda)
            for total, values in zip(totals, self._critic.values(stored), strict=True)
        ]
        white = whiten(np.concatenate([advantage for advantage, _ in pairs]))
        cuts = np.cumsum([advantage.size for advantage, _ in pairs])[:-1]
        for rollout, own in zip(members, np.split(white, cuts), strict=True):
            rollout.advantage = np.zeros(rollout.tokens.size)
            rollout.advantage[rollout.trained] = own
        return self._critic.fit(stored, [target for _, target in pairs])

    def _hidden(self, members: Sequence[Rollout]) -> Any:
        """Final hidden states that predict each token of the answers, at length 1."""
        from retrograd.engine import TrainingSequence

        sequences = [TrainingSequence(tokens=r.tokens, trained=r.trained) for r in members]
        return unit_length(self.parts.engine.hidden(sequences, trained_only=True))


def _at_the_end(reward: float, tokens: int) -> Any:
    rewards = np.zeros(tokens)
    rewards[-1] = reward
    return rewards


def _why(groups: Sequence[RolloutGroup], members: Sequence[Rollout]) -> str:
    if len(members) < 2:
        lost = [rollout.excluded for group in groups for rollout in group.members if rollout.excluded]
        return f"{len(lost)} of {len(groups)} answers have no reward; first: {lost[0] if lost else 'dropped'}"
    return f"{len(members)} answers: all rewards are equal"


def _build(config: PPOConfig, context: BuildContext) -> Algorithm:
    run = context.config
    parts = Parts(
        **{name: context.service(name) for name in Parts.NEEDS},
        loss=context.build("losses", config.loss),
        reward=build_reward(config, context),
        training=run.training,
        evaluation=run.evaluation,
    )
    return Ppo(config, parts)


def _check(config: PPOConfig, table: ConfigTable, run: Any) -> list[Problem]:
    return [*check_reward(config, table), *check_critic(config.critic, table.table("critic"))]


@hookimpl
def retrograd_algorithms() -> list[Component[PPOConfig, Algorithm]]:
    """`ppo`."""
    return [
        Component(
            name="ppo",
            config=PPOConfig,
            build=_build,
            summary="Learning from rewards with a value head.",
            source="Schulman et al. 2017, Proximal Policy Optimization, equation 7",
            needs=Parts.NEEDS,
            selects={"loss": "losses", "reward": "rewards"},
            check=_check,
            applies=("evaluation", "observe"),
            reads=ROLLOUT_KEYS,
            fixed_accumulation=True,
        )
    ]
