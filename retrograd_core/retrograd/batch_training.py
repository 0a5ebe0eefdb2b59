"""Updates on answers that were written and scored elsewhere: `Trainer.train_grpo_batch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal

import attrs
import numpy as np

from retrograd_hookspecs import ConfigError, DataError, Message, PolicyObjective, Problem, Rollout, Score

from .advantages import group_advantages
from .answers import encoder_of
from .assembly import Assembly
from .conversation import Conversation, ConversationEncoder
from .given_messages import given_messages
from .policy_losses import policy_means
from .policy_update import PolicyBatch, train_epoch
from .update import Updater


@attrs.frozen(kw_only=True)
class AnswerGroup:
    """Answers to one prompt with their rewards.

    `prompt` is a user message, or messages as a chat JSONL holds them; each answer is the text that the model
    wrote, without a stop token, which is added and trained.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    answers: Sequence[str]
    rewards: Sequence[float]

    def messages(self, where: str = "prompt") -> tuple[Message, ...]:
        """The prompt as messages. Raises `DataError` that begins with `where`."""
        return given_messages(self.prompt, where)


class BatchTraining:
    """One optimizer over any number of batches."""

    def __init__(self, assembly: Assembly) -> None:
        services = assembly.services
        services.provide("total_steps", None)
        self._engine = services.get("engine")
        self._tokenizer = services.get("tokenizer")
        self._encoder: ConversationEncoder = encoder_of(assembly)
        self._loss = assembly.build("losses", assembly.one("losses").component.name)
        self._ctx = assembly.config.training.ctx
        self._update = Updater(
            trainable=services.get("trainable"),
            optimizer=services.get("optimizer"),
            schedule=services.get("schedule"),
            kernels=services.get("kernels"),
            max_grad_norm=assembly.config.training.max_grad_norm,
        )
        self._steps = 0

    def train(
        self,
        groups: Sequence[AnswerGroup],
        *,
        max_new_tokens: int,
        objective: PolicyObjective,
        epochs: int,
        baseline: Literal["mean", "leave_one_out"],
    ) -> dict[str, float]:
        """See `Trainer.train_grpo_batch`."""
        groups = list(groups)
        _check_settings(max_new_tokens=max_new_tokens, objective=objective, epochs=epochs, baseline=baseline)
        _check(groups)
        rollouts: list[list[Rollout]] = []
        for number, group in enumerate(groups):
            advantages = group_advantages(group.rewards, baseline)
            if np.any(advantages):
                rollouts.append(self._rollouts(number, group, advantages))
        answers = sum(len(members) for members in rollouts)
        metrics = {
            "reward/mean": float(np.mean([r for group in groups for r in group.rewards])),
            "batch/groups": float(len(groups)),
            "batch/groups_trained": float(len(rollouts)),
            "batch/answers_trained": float(answers),
        }
        if not rollouts:
            return metrics
        batch = PolicyBatch.of(rollouts, normalizer=float(answers * max_new_tokens))
        for _ in range(epochs):
            stats = train_epoch(self._engine, batch, self._loss, objective)
            self._steps += 1
            updated = self._update(self._steps)
            metrics |= {
                "train/loss": stats.step.loss,
                "batch/trained_tokens": float(stats.step.trained_tokens),
                "optimizer/lr": updated.lr,
                "optimizer/grad_norm": updated.grad_norm,
                "optimizer/skipped_steps": metrics.get("optimizer/skipped_steps", 0.0) + updated.skipped,
                **policy_means(stats.step.metrics),
                **stats.packing.metrics(),
            }
        return metrics

    def _rollouts(self, number: int, group: AnswerGroup, advantages: Any) -> list[Rollout]:
        messages = group.messages(f"groups[{number}].prompt")
        prompt = self._encoder.prompt(Conversation(messages=messages))
        stop = self._tokenizer.eos_id if self._tokenizer.eos_id is not None else min(self._tokenizer.stop_ids)
        stops = [i for i in self._encoder.pieces.stop_texts.values() if i == stop] or [
            *self._encoder.pieces.stop_texts.values()
        ]
        rollouts = []
        for member, (answer, reward) in enumerate(zip(group.answers, group.rewards, strict=True)):
            turn = [*self._encoder.pieces.turn(answer, prompt), (stops or [stop])[0]]
            tokens = np.array([*prompt, *turn], np.int32)
            if tokens.size > self._ctx:
                raise _refused(
                    number, f"answer {member}: {tokens.size} tokens exceed training.ctx = {self._ctx}"
                )
            trained = np.arange(tokens.size) >= len(prompt)
            rollouts.append(
                Rollout(
                    id=f"{number}.{member}",
                    tokens=tokens,
                    trained=trained,
                    logp=np.zeros(tokens.size),
                    completion=answer,
                    messages=(Message(role="assistant", content=answer),),
                    finish="stop",
                    reward=Score(kind="value", value=float(reward)),
                    total=float(reward),
                    advantage=np.where(trained, advantages[member], 0.0),
                )
            )
        return rollouts


def _check_settings(*, max_new_tokens: int, objective: PolicyObjective, epochs: int, baseline: str) -> None:
    """What the TOML's keys of the same names may be. Raises: `ConfigError` with every mistake."""
    wrong: dict[str, str] = {}
    for name, count in (("max_new_tokens", max_new_tokens), ("epochs", epochs)):
        if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
            wrong[name] = f"must be an integer of at least 1, got {count!r}"
    low, high = objective.clip_low, objective.clip_high
    if not 0.0 < low < 1.0:
        wrong["clip_range_low"] = f"must be above 0 and below 1, got {low!r}"
    elif not low <= high < float("inf"):
        wrong["clip_range_high"] = f"must be finite and at least clip_range_low = {low:g}, got {high!r}"
    if baseline not in ("mean", "leave_one_out"):
        wrong["baseline"] = f'must be "mean" or "leave_one_out", got {baseline!r}'
    if objective.level not in ("token", "sequence"):
        wrong["importance_sampling_level"] = f'must be "token" or "sequence", got {objective.level!r}'
    if wrong:
        raise ConfigError(
            Problem(where="train_grpo_batch", key=key, message=message) for key, message in wrong.items()
        )


def _check(groups: Sequence[AnswerGroup]) -> None:
    if not groups:
        raise _refused(0, "there are no groups")
    for number, group in enumerate(groups):
        if not isinstance(group, AnswerGroup):
            raise _refused(number, f"expected a retrograd.AnswerGroup, got {type(group).__name__}")
        group.messages(f"groups[{number}].prompt")
        if isinstance(group.answers, str):
            raise _refused(number, "answers must be a sequence of texts, is one text")
        if len(group.answers) != len(group.rewards):
            raise _refused(number, f"{len(group.answers)} answers and {len(group.rewards)} rewards")
        if len(group.answers) < 2:
            raise _refused(number, "a group needs two answers or more to be compared")
        for member, (answer, reward) in enumerate(zip(group.answers, group.rewards, strict=True)):
            if not isinstance(answer, str):
                raise _refused(number, f"answer {member} must be a text, is {answer!r}")
            if not isinstance(reward, Real | np.bool_):
                raise _refused(
                    number,
                    f"the reward of answer {member} must be a number, is {reward!r}: leave answers without a"
                    " reward out",
                )
            if not np.isfinite(reward):
                raise _refused(number, f"the reward {reward} of answer {member} is not finite")


def _refused(number: int, message: str) -> DataError:
    return DataError([Problem(where=f"groups[{number}]", message=message)])
