"""The reward that an algorithm's table names: `reward_command`, or `reward` by name or as a function."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from retrograd_hookspecs import BuildContext, ConfigTable, Problem, Reward, key

_COMMAND_KEYS = ("reward_mode", "reward_timeout_seconds")


@attrs.frozen(kw_only=True)
class RewardKeys:
    """Keys that say what scores the answers."""

    reward_command: tuple[str, ...] | None = key(
        None,
        doc="Reward program, as an argument list. This or `reward` is required.",
        default_text="none",
        excluded_by="reward",
    )
    reward_mode: Literal["persistent", "oneshot"] = key(
        "persistent", doc="One reward program for the whole run, or one for each batch."
    )
    reward_timeout_seconds: float = key(300.0, above=0.0, unit="s", doc="Deadline for one batch of rewards.")
    reward: str | None = key(
        None,
        doc="A Python function, `python:module:function` or `python:./file.py:function`, or the name of an"
        " installed reward, whose options are in `[reward.NAME]`.",
        default_text="none",
    )


def build_reward(config: RewardKeys, context: BuildContext, *, allow_judge_weight: bool = False) -> Reward:
    """The reward of an algorithm's table."""
    if config.reward is not None:
        name, _, rest = config.reward.partition(":")
        reward: Reward = context.build("rewards", name, **({"function": rest} if rest else {}))
        return reward
    command: Reward = context.build(
        "rewards",
        "command",
        command=config.reward_command,
        mode=config.reward_mode,
        timeout_seconds=config.reward_timeout_seconds,
        allow_judge_weight=allow_judge_weight,
    )
    return command


def check_reward(config: RewardKeys, table: ConfigTable) -> list[Problem]:
    """A reward is named once, and keys of programs are not given without one."""

    def problem(name: str, message: str, hint: str) -> Problem:
        return Problem(where=table.where(name), key=f"{table.name}.{name}", message=message, hint=hint)

    if config.reward is None and config.reward_command is None:
        return [
            problem(
                "reward_command",
                "required key is missing: nothing scores the answers",
                'give reward_command = ["python", "reward.py"] or reward = "python:./reward.py:function"',
            )
        ]
    if config.reward_command is not None and not config.reward_command:
        return [problem("reward_command", "is empty", "name a program and its arguments")]
    if config.reward is not None:
        given: list[Any] = [name for name in _COMMAND_KEYS if name in table]
        return [
            problem(name, f"has no effect with reward = {config.reward!r}", "leave it out") for name in given
        ]
    return []
