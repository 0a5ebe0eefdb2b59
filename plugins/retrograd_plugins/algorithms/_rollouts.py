"""Answers to prompts: drawn and scored by a reward."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from retrograd_hookspecs import (
    Answer,
    Message,
    Reward,
    Rollout,
    RolloutError,
    RolloutGroup,
    SamplingParams,
    Score,
    Tokenizer,
)

from ._prompts import Prompt

if TYPE_CHECKING:
    from retrograd.engine.policy import Policy
    from retrograd.interrupts import Interrupt

MISSING = Score(kind="missing", explanation="not scored yet")
HOOK_HINT = "a reward is a finite number; `excluded` leaves an answer out"
"""Said where a hook made a reward that is none."""
HELD_OUT_STREAMS = 1 << 40
"""Random streams of evaluations begin here, apart from those of training."""


@attrs.frozen(kw_only=True)
class Draw:
    """Answers to be drawn: `count` to one prompt, from random streams `stream`, `stream + 1`, …"""

    id: str
    prompt: Prompt
    count: int
    stream: int


class Answerer:
    """Draws answers with the policy and scores them. An `interrupt` gives up what is drawn or scored.
    `judged`: there is a judge, whose weight a score may set."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        params: SamplingParams,
        reward: Reward,
        interrupt: Interrupt,
        *,
        judged: bool,
    ) -> None:
        self._interrupt = interrupt
        self._judged = judged
        self._policy = policy
        self._tokenizer = tokenizer
        self._params = params
        self._reward = reward

    def draw(
        self, draws: Sequence[Draw], progress: Callable[[int, int], None] | None = None
    ) -> list[RolloutGroup]:
        """A group a draw, not scored yet. `progress` gets the answers done, and how many there are."""
        from retrograd.engine import GenerationRequest

        requests = [
            GenerationRequest(
                prompt=draw.prompt.tokens,
                params=self._params,
                stop_ids=self._tokenizer.stop_ids,
                stream=draw.stream + member,
            )
            for draw in draws
            for member in range(draw.count)
        ]
        finished = 0

        def count(number: int, completion: Any) -> None:
            nonlocal finished
            finished += 1
            if progress is not None:
                progress(finished, len(requests))

        completions = iter(self._policy.generate_all(requests, count, self._interrupt.check))
        return [
            RolloutGroup(
                id=draw.id,
                source=draw.prompt.origin,
                messages=draw.prompt.messages,
                prompt_tokens=len(draw.prompt.tokens),
                members=[self._rollout(draw, member, next(completions)) for member in range(draw.count)],
                rubric=draw.prompt.rubric,
                metadata=draw.prompt.metadata,
            )
            for draw in draws
        ]

    def score(self, groups: Sequence[RolloutGroup]) -> float:
        """Give every answer its reward; the seconds that took.

        Raises: `RolloutError` if the reward is broken, does not give one score an answer, or sets the weight
        of a judge that the run does not have.
        """
        started = time.perf_counter()
        answers = [
            Answer(
                prompt=group.messages[-1].content,
                completion=rollout.completion,
                messages=group.messages,
                finish=rollout.finish,
                metadata=group.metadata,
            )
            for group in groups
            for rollout in group.members
        ]
        with self._interrupt.given_up_at_once():
            scores = self._reward.score(answers)
        if len(scores) != len(answers):
            raise RolloutError(f"the reward gave {len(scores)} scores for {len(answers)} answers")
        if not self._judged:
            _require_no_judge_weight(scores)
        rest = iter(scores)
        for group in groups:
            for rollout in group.members:
                rollout.reward = _checked(next(rest))
        return time.perf_counter() - started

    def _rollout(self, draw: Draw, member: int, completion: Any) -> Rollout:
        prompt = np.asarray(draw.prompt.tokens, dtype=np.int32)
        tokens = np.concatenate([prompt, completion.tokens])
        trained = np.arange(tokens.size) >= prompt.size
        logp = np.zeros(tokens.size)
        logp[prompt.size :] = completion.logp
        text = self._text(int(prompt[-1]), completion)
        return Rollout(
            id=f"{draw.id}.{member}",
            tokens=tokens,
            trained=trained,
            logp=logp,
            completion=text,
            messages=(Message(role="assistant", content=text),),
            finish=completion.finish,
            reward=MISSING,
        )

    def _text(self, previous: int, completion: Any) -> str:
        """What the model wrote, without the stop token. Decoded behind the prompt's last token, since the
        first token of a text may lose the space that SentencePiece puts before texts."""
        tokens = completion.tokens.tolist()
        if completion.finish == "stop":
            tokens = tokens[:-1]
        before = self._tokenizer.decode_bytes([previous])
        return self._tokenizer.decode_bytes([previous, *tokens])[len(before) :].decode("utf-8", "replace")


def _require_no_judge_weight(scores: Sequence[Score]) -> None:
    weights = [score.judge_weight for score in scores if score.judge_weight is not None]
    if weights:
        raise RolloutError(
            f"the reward gave {len(weights)} of {len(scores)} answers a judge_weight, first {weights[0]:g},"
            " but this run has no judge: leave it out of the score, or add [grpo.judge]"
        )


def _checked(score: Score) -> Score:
    """The score, or an error where it holds what no reward may be."""
    if score.kind == "value" and not math.isfinite(score.value):
        return Score(kind="error", explanation=f"the reward is {score.value}, not a finite number")
    return score


def reward_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """`reward/*` and `completions/*` of all answers, trained or not."""
    members = [rollout for group in groups for rollout in group.members]
    totals = np.array([rollout.total for rollout in members if rollout.total is not None])
    rewards = np.array([r.reward.value for r in members if r.reward.kind == "value"])
    kinds = Counter(rollout.reward.kind for rollout in members)
    lengths = np.array([rollout.trained_tokens for rollout in members], dtype=np.float64)
    spreads = [_spread(group) for group in groups]
    known = [spread for spread in spreads if spread is not None]
    logp = [-rollout.logp[rollout.trained] for rollout in members]
    metrics = {
        "reward/missing_fraction": kinds["missing"] / len(members),
        "reward/error_fraction": kinds["error"] / len(members),
        "completions/length_mean": float(lengths.mean()),
        "completions/length_min": float(lengths.min()),
        "completions/length_max": float(lengths.max()),
        "completions/truncated_fraction": sum(r.finish == "length" for r in members) / len(members),
        "policy/entropy": float(np.mean(np.concatenate(logp))) if lengths.any() else 0.0,
    }
    if rewards.size:
        metrics |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
        }
    if totals.size:
        metrics["reward/total_mean"] = float(totals.mean())
    if known:
        metrics["reward/group_std_mean"] = float(np.mean(known))
        metrics["reward/zero_spread_fraction"] = sum(s == 0.0 for s in known) / len(known)
    return metrics


def _spread(group: RolloutGroup) -> float | None:
    """Standard deviation of the rewards that are compared; exactly 0 if they are equal, None below two."""
    values = [r.total for r in group.members if r.total is not None and not r.excluded]
    if len(values) < 2:
        return None
    return 0.0 if all_equal(values) else float(np.std(values))


def pass_at_k(passed: int, samples: int, k: int) -> float:
    """Probability that one of k answers passes, estimated from `samples` of which `passed` do.

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1.
    """
    if samples - passed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - passed + 1, samples + 1)))


def evaluation_metrics(groups: Sequence[RolloutGroup], *, samples: int) -> dict[str, float]:
    """`eval/*` of held-out prompts, by the reward alone.

    `avg@k` is the mean over all k answers; an answer passes whose reward is the largest possible by
    convention, 1 or more.
    """
    members = [rollout for group in groups for rollout in group.members]
    values = np.array([r.reward.value for r in members if r.reward.kind == "value"])
    if not values.size:
        failed = next(iter(members)).reward
        raise RolloutError(
            f"no held-out answer could be scored: {failed.explanation or failed.kind} ({groups[0].source})"
        )
    metrics: dict[str, float] = {
        "eval/reward": float(values.mean()),
        "eval/reward_std": float(values.std()),
        "eval/pass": float(np.mean(values >= 1.0)),
        "eval/prompts": float(len(groups)),
        "eval/unscored_fraction": 1.0 - values.size / len(members),
        "eval/length_mean": float(np.mean([r.trained_tokens for r in members])),
        "eval/truncated_fraction": sum(r.finish == "length" for r in members) / len(members),
    }
    if samples > 1:
        metrics[f"eval/avg@{samples}"] = metrics["eval/reward"]
        metrics[f"eval/pass@{samples}"] = _pass_rate(groups, samples)
    return metrics


def _pass_rate(groups: Sequence[RolloutGroup], k: int) -> float:
    rates = []
    for group in groups:
        values = [r.reward.value for r in group.members if r.reward.kind == "value"]
        if values:
            passed = sum(value >= 1.0 for value in values)
            rates.append(pass_at_k(passed, len(values), min(k, len(values))))
    return float(np.mean(rates))


def all_equal(rewards: Sequence[float]) -> bool:
    """True if rewards differ by no more than what rounding leaves of sums that are equal."""
    return max(rewards) - min(rewards) <= 1e-12 * max(1.0, *map(abs, rewards))


def lost_rewards(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    """Answers without a reward."""
    return [rollout for group in groups for rollout in group.members if rollout.reward.kind != "value"]


def why_lost(rollout: Rollout) -> str:
    """`reward error: ValueError: …`, of an answer without a reward."""
    detail = f": {rollout.reward.explanation}" if rollout.reward.explanation else ""
    return f"reward {rollout.reward.kind}{detail}"


def why_stalled(groups: Sequence[RolloutGroup]) -> str:
    """Why no group of an update can be trained: `8 groups: all rewards are equal`. Of reasons with details,
    the details of the first."""
    answers = sum(len(group.members) for group in groups)
    lost = lost_rewards(groups)
    if len(lost) == answers:
        return f"none of the {answers} answers has a reward; first: {why_lost(lost[0])}"
    found: dict[str, list[str]] = {}
    for group in groups:
        if group.dropped:
            found.setdefault(group.dropped.partition(":")[0], []).append(group.dropped)
    return "; ".join(
        f"{len(reasons)} group{'s' if len(reasons) > 1 else ''}: {reasons[0]}" for reasons in found.values()
    )
