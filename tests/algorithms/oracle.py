"""GRPO and PPO written out once more in float64, from what the sampler drew and the reward said.

Nothing of the package's losses, advantages, batches or optimizers is used. Log-probabilities are the
engine's, of one sequence at a time; their derivatives are taken by the engine for constants that are
computed here (and checked by finite differences in the tests).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd.engine import TrainingEngine, TrainingSequence, plan_epoch
from retrograd_hookspecs import LossBatch, LossResult, Rollout, RolloutGroup

Array = npt.NDArray[np.float64]
Parameters = Mapping[str, npt.NDArray[Any]]


class Model:
    """log π of answers, as a function of the adapter's masters."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine
        assert engine.trainable is not None
        self.parameters = {p.name: p for p in engine.trainable.parameters}

    def set(self, masters: Parameters) -> None:
        for name, parameter in self.parameters.items():
            parameter.weight[...] = masters[name]

    def base(self) -> None:
        """The adapter does nothing."""
        for name, parameter in self.parameters.items():
            if name.endswith("lora_b"):
                parameter.weight[...] = 0.0

    def logp(self, rollouts: Sequence[Rollout]) -> list[Array]:
        return [np.array(self.engine.log_probabilities([_alone(r)])[0], np.float64) for r in rollouts]

    def hidden(self, rollouts: Sequence[Rollout]) -> list[Array]:
        """The states that predict each token of an answer, at length 1."""
        states = [self.engine.hidden([_alone(r)])[0] for r in rollouts]
        chosen = [h[np.flatnonzero(r.trained) - 1] for h, r in zip(states, rollouts, strict=True)]
        return [h / np.sqrt(np.sum(h**2, axis=1, keepdims=True)) for h in chosen]

    def gradient(self, rollouts: Sequence[Rollout], slopes: Sequence[Array]) -> dict[str, Array]:
        """Σ slope_t · ∂ log π_t / ∂θ."""
        self.engine.zero_grad()
        for rollout, slope in zip(rollouts, slopes, strict=True):
            sequence = _alone(rollout)

            def linear(batch: LossBatch, first: int = rollout_start(rollout), own: Array = slope) -> Any:
                dlogp = own[batch.position - first]
                return LossResult(value=float(dlogp @ batch.logp), dlogp=dlogp)

            [step] = plan_epoch([sequence.predicts], [0], micro_batch=512, gradient_accumulation=1)
            self.engine.train_step(step, [sequence], linear, 1.0)
        gradient = {name: np.array(p.grad, np.float64) for name, p in self.parameters.items()}
        self.engine.zero_grad()
        return gradient


def rollout_start(rollout: Rollout) -> int:
    """Index of the answer's first token."""
    return int(np.argmax(rollout.trained))


def _alone(rollout: Rollout) -> TrainingSequence:
    return TrainingSequence(tokens=rollout.tokens, trained=rollout.trained)


@attrs.frozen(eq=False)
class Slopes:
    """Value of a loss and its derivatives by each log-probability."""

    loss: float
    dlogp: list[Array]
    ratio: Array


def grpo_advantages(groups: Sequence[RolloutGroup], table: Mapping[str, Any]) -> list[tuple[Rollout, float]]:
    """The answers that are trained, with their advantages."""
    budget = table["sampling"]["max_new_tokens"]
    found = []
    for group in groups:
        kept, rewards = [], []
        for rollout in group.members:
            if rollout.reward.kind != "value":
                continue
            if table.get("mask_truncated") and rollout.finish == "length":
                continue
            reward = rollout.reward.value
            penalty = table.get("overlong_penalty")
            if penalty:
                over = int(rollout.trained.sum()) - (budget - penalty["buffer_tokens"])
                if over > 0:
                    reward -= penalty["max_penalty"] * min(1.0, over / penalty["buffer_tokens"])
            kept.append(rollout)
            rewards.append(reward)
        if len(kept) < 2 or max(rewards) == min(rewards):
            continue
        for index, rollout in enumerate(kept):
            others = rewards[:index] + rewards[index + 1 :]
            loo = table.get("baseline") == "leave_one_out"
            baseline = sum(others) / len(others) if loo else sum(rewards) / len(rewards)
            found.append((rollout, rewards[index] - baseline))
    return found


def grpo_slopes(
    logp: Sequence[Array],
    old: Sequence[Array],
    reference: Sequence[Array],
    advantages: Sequence[float],
    table: Mapping[str, Any],
) -> Slopes:
    """The objective of docs/objectives.md, differentiated by hand."""
    divisor = len(logp) * table["sampling"]["max_new_tokens"]
    low, high = 1 - table["clip_range_low"], 1 + table["clip_range_high"]
    beta = table["kl_coefficient"]
    total, slopes, ratios = 0.0, [], []
    for now, then, ref, advantage in zip(logp, old, reference, advantages, strict=True):
        ratio = np.exp(now - then)
        if table.get("importance_sampling_level") == "sequence":
            ratio = np.full(now.size, np.exp(np.mean(now - then)))
        clipped = np.clip(ratio, low, high)
        surrogate = np.minimum(ratio * advantage, clipped * advantage)
        bound = (ratio > high) if advantage > 0 else (ratio < low)
        slope = np.where(bound, 0.0, ratio * advantage)
        kl = np.exp(ref - now) - (ref - now) - 1
        total += float(np.sum(beta * kl - surrogate)) / divisor
        slopes.append((beta * (1 - np.exp(ref - now)) - slope) / divisor)
        ratios.append(ratio)
    return Slopes(total, slopes, np.concatenate(ratios))


def ppo_slopes(
    logp: Sequence[Array], old: Sequence[Array], advantages: Sequence[Array], table: Mapping[str, Any]
) -> Slopes:
    """−N·∂L/∂log π_t = (A·r·1[not clipped] + β·(1 − r)) / length, as the specification has it."""
    epsilon, beta = table["clip_range"], table["kl_coefficient"]
    total, slopes, ratios = 0.0, [], []
    for now, then, advantage in zip(logp, old, advantages, strict=True):
        ratio = np.exp(now - then)
        surrogate = np.minimum(ratio * advantage, np.clip(ratio, 1 - epsilon, 1 + epsilon) * advantage)
        bound = np.where(advantage > 0, ratio > 1 + epsilon, ratio < 1 - epsilon)
        weight = advantage * ratio * ~bound + beta * (1 - ratio)
        divisor = len(logp) * now.size
        total += float(np.sum(beta * (ratio - 1 - (now - then)) - surrogate)) / divisor
        slopes.append(-weight / divisor)
        ratios.append(ratio)
    return Slopes(total, slopes, np.concatenate(ratios))


def whitened(values: Array) -> Array:
    """Zero mean, unit deviation."""
    return np.asarray((values - values.mean()) / (values.std() + 1e-8))


class ValueHead:
    """A linear value head with Adam, and GAE by its definition as a sum."""

    def __init__(self, width: int, table: Mapping[str, Any]) -> None:
        self.w = np.zeros(width)
        self.b = 0.0
        self.table = table
        self.moments = [np.zeros(width + 1), np.zeros(width + 1)]
        self.steps = 0

    def advantages(self, hidden: Sequence[Array], rewards: Sequence[float]) -> list[Array]:
        gamma, lam = self.table["gamma"], self.table["gae_lambda"]
        found, targets = [], []
        for states, reward in zip(hidden, rewards, strict=True):
            values = np.append(states @ self.w + self.b, 0.0)
            given = np.zeros(len(states))
            given[-1] = reward
            delta = given + gamma * values[1:] - values[:-1]
            own = np.array(
                [
                    sum((gamma * lam) ** k * delta[t + k] for k in range(len(delta) - t))
                    for t in range(len(delta))
                ]
            )
            found.append(own)
            targets.append(own + values[:-1])
        self._fit(np.concatenate(hidden), np.concatenate(targets))
        white = whitened(np.concatenate(found))
        return list(np.split(white, np.cumsum([len(own) for own in found])[:-1]))

    def _fit(self, states: Array, targets: Array) -> None:
        for _ in range(self.table["value_epochs"]):
            error = states @ self.w + self.b - targets
            gradient = np.append(2 * (error[:, None] * states).mean(0), 2 * error.mean())
            self.steps += 1
            first, second = self.moments
            first[:] = 0.9 * first + 0.1 * gradient
            second[:] = 0.999 * second + 0.001 * gradient**2
            step = (first / (1 - 0.9**self.steps)) / (np.sqrt(second / (1 - 0.999**self.steps)) + 1e-8)
            self.w = self.w - self.table["value_lr"] * step[:-1]
            self.b -= self.table["value_lr"] * float(step[-1])


class AdamW:
    """Loshchilov & Hutter 2019 behind a clip of the global norm."""

    def __init__(self, parameters: Parameters, *, decay: float, max_norm: float) -> None:
        self.first = {name: np.zeros(value.shape) for name, value in parameters.items()}
        self.second = {name: np.zeros(value.shape) for name, value in parameters.items()}
        self.decay, self.max_norm, self.steps = decay, max_norm, 0

    def step(self, masters: Parameters, gradient: Mapping[str, Array], lr: float) -> dict[str, Array]:
        norm = np.sqrt(sum(float(np.sum(g**2)) for g in gradient.values()))
        factor = min(1.0, self.max_norm / norm)
        self.steps += 1
        after = {}
        for name, value in masters.items():
            g = gradient[name] * factor
            self.first[name] = 0.9 * self.first[name] + 0.1 * g
            self.second[name] = 0.999 * self.second[name] + 0.001 * g**2
            first = self.first[name] / (1 - 0.9**self.steps)
            second = self.second[name] / (1 - 0.999**self.steps)
            wide = value.astype(np.float64)
            after[name] = wide - lr * (first / (np.sqrt(second) + 1e-8) + self.decay * wide)
        return after
