"""Rollouts made by rule, for tests and for looking at the page."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrograd.observe import Observer, RunFacts
from retrograd_hookspecs import Message, Rollout, RolloutGroup, Score, ToolCall


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for another thread or process."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def read(directory: Path) -> list[dict[str, Any]]:
    """The records of a directory."""
    return [json.loads(line) for line in (directory / "observe.jsonl").read_text().splitlines()]


FACTS = RunFacts(algorithm="agent_grpo", model="SmolLM2-135M-Instruct.Q4_1.gguf", output="/runs/sums.gguf")


def decode(ids: Sequence[int]) -> list[str]:
    """The character with that code: a token is a character."""
    return [chr(token_id) for token_id in ids]


def rollout(
    name: str,
    turns: Sequence[str | Message],
    *,
    prompt: str = "Q?",
    logp: Sequence[float] | None = None,
    advantage: float | Sequence[float] | None = None,
    reward: Score | None = None,
    total: float | None = None,
    **fields: object,
) -> Rollout:
    """A trajectory: texts are answers of the policy, messages are observations. A token is a character."""
    messages = tuple(
        Message(role="assistant", content=turn) if isinstance(turn, str) else turn for turn in turns
    )
    texts = [prompt, *(message.content for message in messages)]
    trained = [[False] * len(prompt)]
    trained += [[message.role == "assistant"] * len(message.content) for message in messages]
    mask = np.concatenate([np.array(part, dtype=bool) for part in trained])
    values = np.zeros(len(mask))
    values[mask] = -0.5 if logp is None else logp
    advantages = None
    if advantage is not None:
        advantages = np.zeros(len(mask))
        advantages[mask] = advantage
    if reward is None:
        reward = Score(kind="missing") if total is None else Score(kind="value", value=total)
    return Rollout(
        id=name,
        tokens=np.array([ord(char) for text in texts for char in text], dtype=np.int32),
        trained=mask,
        logp=values,
        completion="".join(message.content for message in messages if message.role == "assistant"),
        messages=messages,
        finish=fields.pop("finish", "stop"),  # type: ignore[arg-type]
        reward=reward,
        total=total,
        advantage=advantages,
        **fields,  # type: ignore[arg-type]
    )


def group(name: str, members: Sequence[Rollout], *, prompt: str = "Q?", **fields: object) -> RolloutGroup:
    """A group whose prompt is one user message."""
    return RolloutGroup(
        id=name,
        source=fields.pop("source", "tasks.jsonl:1"),  # type: ignore[arg-type]
        messages=(Message(role="user", content=prompt),),
        prompt_tokens=len(prompt),
        members=list(members),
        **fields,  # type: ignore[arg-type]
    )


def sum_group(update: int, index: int, size: int = 8, *, seed: int = 0) -> RolloutGroup:
    """An agent that adds two numbers with a calculator, better with every update."""
    rng = random.Random(f"{seed}/{update}/{index}")
    left, right = rng.randrange(10, 999), rng.randrange(10, 999)
    prompt = f"What is {left} + {right}? Use the calculator, then answer with the number alone."
    kind = "same" if rng.random() < 0.12 else "mixed"
    members = [_sum_member(rng, f"{index}.{i}", prompt, left, right, update, kind) for i in range(size)]
    totals = [member.total for member in members if member.total is not None and not member.excluded]
    mean = sum(totals) / len(totals) if totals else 0.0
    spread = max(totals) - min(totals) if totals else 0.0
    for member in members:
        if member.total is not None and not member.excluded and spread:
            steps = np.zeros(len(member.tokens))
            for at, reward in member.step_rewards:
                steps[: at + 1] += reward / 4
            member.advantage = np.where(member.trained, member.total - mean + steps, 0.0)
    return RolloutGroup(
        id=f"{update}.{index}",
        source=f"sums.jsonl:{index + 1}",
        messages=(
            Message(
                role="system", content="You are a careful assistant. Call calculator(expression) to compute."
            ),
            Message(role="user", content=prompt),
        ),
        prompt_tokens=len(prompt),
        members=members,
        rubric="The final answer must be the right number, and nothing else." if index % 2 else "",
        metadata={"answer": left + right},
        dropped="" if spread else "no reward spread",
    )


def _sum_member(
    rng: random.Random, name: str, prompt: str, left: int, right: int, update: int, kind: str
) -> Rollout:
    skill = 1.0 if kind == "same" else 1 - math.exp(-(update + 2) / 25)
    right_answer = rng.random() < skill
    said = left + right if right_answer else left + right + rng.choice([-10, -1, 1, 100])
    call = f'{{"expression": "{left} + {right}"}}'
    thought = rng.choice(["Let me compute this with the tool.", "I need the sum.", "First, the calculator."])
    turns: list[str | Message] = [f"{thought}\n<tool_call>{call}</tool_call>"]
    failed = rng.random() < 0.15 and kind == "mixed"
    if failed:
        turns.append(Message(role="tool", name="calculator", content="unknown variable 'x'", is_error=True))
        turns.append(f"That failed; again.\n<tool_call>{call}</tool_call>")
    turns.append(Message(role="tool", name="calculator", content=str(left + right)))
    turns.append(f"The answer is {said}." if rng.random() < 0.4 else f"{said}")
    cut = rng.random() < 0.06 and kind == "mixed"
    broken = rng.random() < 0.03 and kind == "mixed"
    made: list[str | Message] = []
    for turn in turns:
        if isinstance(turn, str) and "<tool_call>" in turn:
            calls = (ToolCall(name="calculator", arguments={"expression": f"{left} + {right}"}, id="c1"),)
            made.append(Message(role="assistant", content=turn, tool_calls=calls, raw=True))
        else:
            made.append(turn)
    verdict = round(0.2 + 0.6 * right_answer + rng.random() * 0.2, 3) if kind == "mixed" else 0.9
    value = float(right_answer)
    member = rollout(
        name,
        made,
        prompt=prompt,
        finish="length" if cut else "stop",
        reward=Score(kind="error", explanation="verify: the container stopped (exit code 137)")
        if broken
        else Score(
            kind="value", value=value, explanation="" if value else f"expected {left + right}, got {said}"
        ),
        judgement=Score(
            kind="value",
            value=verdict,
            explanation="Correct and terse."
            if right_answer
            else "The arithmetic is wrong: the tool's result was ignored.",
        ),
        total=None if broken else round(value + 0.5 * verdict, 3),
        excluded="truncated" if cut else "reward failed" if broken else "",
    )
    count = int(member.trained.sum())
    member.logp[member.trained] = [-(rng.random() ** 4) * 6 for _ in range(count)]
    starts = np.flatnonzero(np.diff(np.concatenate([[0], member.trained.astype(int)])) == 1)
    if failed:
        member.step_rewards = ((int(starts[0]), -0.1), (int(starts[1]), 0.1))
    return member


def sum_metrics(update: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Metrics as a run of grpo writes them."""
    rng = random.Random(update)
    totals = [m.total for g in groups for m in g.members if m.total is not None]
    return {
        "reward/mean": float(np.mean(totals)),
        "reward/std": float(np.std(totals)),
        "reward/min": float(np.min(totals)),
        "reward/max": float(np.max(totals)),
        "policy/kl": 0.002 * update**0.7 * (1 + rng.random() * 0.3),
        "policy/entropy": 1.4 * math.exp(-update / 90) + rng.random() * 0.05,
        "policy/clip_fraction": abs(rng.gauss(0.04, 0.02)),
        "policy/loss": rng.gauss(0.0, 0.02),
        "completions/mean_tokens": 60 + 8 * rng.random(),
        "completions/truncated_fraction": rng.random() * 0.1,
        "agent/tool_calls_per_turn": 0.5 + rng.random() * 0.1,
        "agent/failed_fraction": rng.random() * 0.05,
        "optimizer/grad_norm": math.exp(rng.gauss(-1, 0.5)),
        "optimizer/lr": 1e-5 * (1 - update / 400),
        "timing/tokens_per_second": 310 + rng.gauss(0, 12),
        "timing/update_seconds": 12 + rng.random(),
    }


def record_sums(directory: Path, updates: int, groups: int = 8, size: int = 8, *, start: int = 1) -> None:
    """Record a run of that many updates, as a resumed one if `start` is later."""
    observer = Observer(directory, FACTS, decode=decode, message=lambda text: None)
    observer.run(settings={"training.lr": 1e-5, "agent.group_size": size}, resumed=start > 1)
    for update in range(start, start + updates):
        made = [sum_group(update, index, size) for index in range(groups)]
        observer.update(update, made, sum_metrics(update, made))
        until(lambda: not observer._jobs)  # a real update takes longer than writing it
        if update % 5 == 0:
            observer.evaluation(update, {"eval/reward_mean": 1 - math.exp(-(update + 2) / 30)})
    observer.close()
