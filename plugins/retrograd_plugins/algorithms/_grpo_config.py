"""Keys of `[grpo]`, and rules across them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from retrograd_hookspecs import ComponentTable, ConfigTable, Problem, key

from ._kl import KlScheduleConfig, no_reference
from ._rewards import RewardKeys, check_reward
from ._sampling import NeutralSamplingConfig


@attrs.frozen(kw_only=True)
class OverlongPenaltyConfig:
    """A penalty for answers that come close to the budget."""

    buffer_tokens: int = key(
        minimum=1, unit="tokens", doc="The penalty grows linearly over the last so many tokens of the budget."
    )
    max_penalty: float = key(above=0.0, doc="Penalty of an answer that uses the whole budget.")


@attrs.frozen(kw_only=True)
class DynamicSamplingConfig:
    """Replacements for groups without signal."""

    max_resample_factor: int = key(
        minimum=2, doc="Prompts drawn for an update are at most this multiple of prompts_per_update."
    )


@attrs.frozen(kw_only=True)
class GRPOConfig(RewardKeys):
    """Group relative policy optimization."""

    prompts: Path = key(doc="Chat JSONL prompts.", input=True)
    updates: int = key(minimum=1, may_grow=True, doc="Number of updates.")
    prompts_per_update: int = key(minimum=1, doc="Prompts per update.")
    group_size: int = key(minimum=2, maximum=256, doc="Answers per prompt.")
    grpo_epochs: int = key(minimum=1, doc="Optimizer passes per update.")
    clip_range_low: float = key(above=0.0, below=1.0, doc="Lower clip, e.g. 0.2.")
    clip_range_high: float = key(above=0.0, doc="Upper clip, at least the lower one, e.g. 0.28.")
    importance_sampling_level: Literal["token", "sequence"] = key(
        "token", doc="One ratio a token, or one an answer (GSPO)."
    )
    kl_coefficient: float = key(minimum=0.0, doc="KL penalty toward the reference; 0 disables it.")
    mask_truncated: bool = key(False, doc="Ignore answers cut at max_new_tokens.")
    baseline: Literal["mean", "leave_one_out"] = key("mean", doc="What a reward is compared with.")
    prompt_order: Literal["sequential", "shuffled"] = key(
        "sequential", doc="Order in which prompts are drawn."
    )
    max_stalled_updates: int = key(
        25,
        minimum=0,
        unit="updates",
        may_grow=True,
        doc="Stop after so many updates in a row without signal; 0 never stops.",
    )
    template_variables: Mapping[str, Any] = key(
        factory=dict, doc="Variables for the chat template, e.g. `{ enable_thinking = false }`."
    )
    loss: str = key("grpo", doc="Objective; its options are in `[loss.NAME]`.")
    sampling: NeutralSamplingConfig = key(doc="How answers are drawn.")
    overlong_penalty: OverlongPenaltyConfig | None = key(None, doc="Penalty close to the budget.")
    kl_schedule: KlScheduleConfig | None = key(None, doc="Changes of kl_coefficient; it must be positive.")
    dynamic_sampling: DynamicSamplingConfig | None = key(None, doc="Replacements for groups without signal.")
    judge: ComponentTable | None = key(None, doc="Judge that compares the answers of a group.")
    judge_weight: float | None = key(
        None,
        minimum=0.0,
        doc="Weight of the judge's verdict, added to the reward.",
        default_text="required with a judge",
    )
    judge_failure: Literal["drop_group", "fail"] = key(
        "drop_group", doc="What a verdict that fails costs: its group, or the run."
    )
    max_judge_dropped_fraction: float = key(
        0.5, minimum=0.0, maximum=1.0, doc="Largest share of groups an update may lose to judge failures."
    )

    @clip_range_high.validator
    def _check_clip(self, attribute: object, value: float) -> None:
        low = self.clip_range_low
        if isinstance(low, float) and value < low:
            raise ValueError(f"must be at least clip_range_low = {low:g}, got {value:g}")


def check_grpo(config: GRPOConfig, table: ConfigTable, run: Any) -> list[Problem]:
    """What is wrong across keys."""
    problems = check_reward(config, table)

    def add(name: str, message: str, hint: str = "", *, below: str = "") -> None:
        place = table.table(below) if below else table
        problems.append(
            Problem(where=place.where(name), key=f"{place.name}.{name}", message=message, hint=hint)
        )

    if config.judge is not None and config.judge_weight is None:
        add("judge_weight", "required with a judge", "the verdict, from 0 to 1, is multiplied by it")
    if config.judge is None:
        for name in ("judge_weight", "judge_failure", "max_judge_dropped_fraction"):
            if name in table:
                add(name, "has no effect without [grpo.judge]", "leave it out, or add the section")
    elif config.judge_failure == "fail" and "max_judge_dropped_fraction" in table:
        add("max_judge_dropped_fraction", 'has no effect with judge_failure = "fail"', "leave it out")
    if config.kl_coefficient == 0:
        if config.kl_schedule is not None:
            add("kl_schedule", "needs kl_coefficient > 0", "leave it out, or set kl_coefficient")
        if run.reference is not None:
            add("kl_coefficient", "is 0, so [reference] has no effect", "remove the section, or set it")
    elif run.reference is None and not run.shape.frozen_base:
        add("kl_coefficient", *no_reference(run))
    penalty, most = config.overlong_penalty, config.sampling.max_new_tokens
    if penalty is not None and penalty.buffer_tokens > most:
        message = f"{penalty.buffer_tokens} is more than sampling.max_new_tokens = {most}"
        add("buffer_tokens", message, below="overlong_penalty")
    return problems
