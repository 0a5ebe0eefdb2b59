"""Configuration of agentic GRPO: `[agent]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from retrograd.agent.mcp import McpServer
from retrograd.chat_endpoint import check_base_url, check_model
from retrograd_hookspecs import ComponentTable, key


@attrs.frozen(kw_only=True)
class CollectApiConfig:
    """The OpenAI-compatible endpoint that `retrograd collect --api` generates traces with."""

    base_url: str = key(doc="Endpoint, e.g. `https://api.openai.com/v1`.")
    model: str = key(doc="Model name sent with each request.")
    api_key_env: str = key(
        doc="Environment variable that holds the key; the key itself is never in the file."
    )
    timeout_secs: float = key(120.0, above=0.0, unit="s", doc="Timeout of a request.")
    temperature: float | None = key(
        None, minimum=0.0, doc="Sampling temperature.", default_text="the provider's"
    )

    @base_url.validator
    def _is_an_endpoint(self, attribute: Any, value: str) -> None:
        check_base_url(value)

    @model.validator
    def _has_a_name(self, attribute: Any, value: str) -> None:
        check_model(value)


@attrs.frozen(kw_only=True)
class ScenarioGenerationConfig:
    """What `retrograd scenarios generate` asks a model for."""

    model: str = key(doc="Model name sent with each request.")
    base_url: str = key(doc="OpenAI-compatible endpoint.")
    api_key_env: str = key(doc="Environment variable that holds the key.")
    count: int = key(24, minimum=1, unit="scenarios", doc="Scenarios in all.")
    batch_size: int = key(12, minimum=1, unit="scenarios", doc="Scenarios of one request.")
    min_difficulty: int = key(1, minimum=1, maximum=5, doc="Easiest, from 1 to 5.")
    max_difficulty: int = key(5, minimum=1, maximum=5, doc="Hardest, from 1 to 5.")
    custom_instructions: str = key("", doc="Text added to the request.")
    seed: int | None = key(None, minimum=0, doc="Seed sent with each request.", default_text="none")
    shuffle: bool = key(True, doc="Shuffle the scenarios.")
    timeout_secs: float = key(120.0, above=0.0, unit="s", doc="Timeout of a request.")
    max_retries: int = key(2, minimum=0, doc="Retries of a request.")
    max_catalog_bytes: int = key(262144, minimum=1, unit="bytes", doc="Largest tool catalogue that is sent.")

    @base_url.validator
    def _is_an_endpoint(self, attribute: Any, value: str) -> None:
        check_base_url(value)

    @model.validator
    def _has_a_name(self, attribute: Any, value: str) -> None:
        check_model(value)

    @max_difficulty.validator
    def _check_order(self, attribute: object, value: int) -> None:
        if value < self.min_difficulty:
            raise ValueError(f"must be at least min_difficulty = {self.min_difficulty}, got {value}")


@attrs.frozen(kw_only=True)
class AgenticGRPOConfig:
    """Agentic GRPO. A run needs a judge, an environment, or both."""

    scenarios: Path = key(doc="Scenario JSONL file.", input=True)
    updates: int = key(1, minimum=1, may_grow=True, doc="Number of updates.")
    scenarios_per_update: int = key(1, minimum=1, doc="Scenarios per update.")
    group_size: int = key(8, minimum=2, maximum=256, doc="Trajectories per scenario.")
    epochs_per_update: int = key(4, minimum=1, doc="Optimizer passes per update.")
    max_turns: int = key(6, minimum=1, maximum=4096, doc="Assistant turns per trajectory.")
    max_new_tokens_per_turn: int = key(512, minimum=1, unit="tokens", doc="Longest turn.")
    max_trajectory_tokens: int | None = key(
        None,
        minimum=2,
        unit="tokens",
        doc="Token budget of a whole trajectory, its prompt included; at most training.ctx.",
        default_text="training.ctx",
    )
    max_rollout_secs: float = key(
        300.0, minimum=0.0, unit="s", doc="Time budget of a trajectory; 0 disables it."
    )
    end_on_no_tool_call: bool = key(True, doc="End the trajectory on a turn without a tool call.")
    max_failed_turns: int = key(
        0, minimum=0, doc="Cut a trajectory after so many turns in a row without a valid call; 0 never cuts."
    )
    constrain_tool_calls: str | None = key(
        None,
        doc="Constrained decoding: with `llguidance`, a call that the model begins can be read and fits the"
        " tool's schema. Extension.",
        default_text="off",
    )
    truncation: Literal["drop", "min_reward"] = key(
        "drop", doc="What becomes of trajectories that hit a limit: left out, or the group's lowest reward."
    )
    max_dropped_fraction: float = key(
        0.5, minimum=0.0, maximum=1.0, doc="Stop when more than this share of an update is lost."
    )
    skip_empty_updates: bool = key(
        False, doc="Skip, rather than fail, an update with fewer than two usable trajectories."
    )
    judge_failure: Literal["drop_group", "fail"] = key(
        "drop_group", doc="What a verdict that fails costs: its group, or the run."
    )
    drop_degenerate_groups: bool = key(False, doc="Drop groups that the judge scored identically.")
    clip_range_low: float = key(0.2, above=0.0, below=1.0, doc="Lower clip.")
    clip_range_high: float = key(0.28, above=0.0, doc="Upper clip, at least the lower one.")
    importance_sampling_level: Literal["token", "sequence"] = key(
        "token", doc="One ratio a token, or one a trajectory over its own tokens (GSPO)."
    )
    kl_coefficient: float = key(0.0, minimum=0.0, doc="KL penalty toward the reference.")
    system_suffix: str = key("", doc="Text appended to every system message.")
    template_variables: Mapping[str, Any] = key(
        factory=dict, doc="Variables for the chat template, e.g. `{ enable_thinking = false }`."
    )
    seed: int = key(42, minimum=0, doc="Seed of all draws.")
    loss: str = key("grpo", doc="Objective; its options are in `[loss.NAME]`.")
    mcp_config: Path | tuple[Path, ...] | None = key(
        None, doc="`mcp.json` file, or several.", default_text="none"
    )
    mcp_servers: tuple[McpServer, ...] = key((), doc="MCP servers, shared by all trajectories.")
    environment: ComponentTable | None = key(None, doc="Where each trajectory acts.")
    judge: ComponentTable | None = key(None, doc="Judge of groups that no environment grades.")
    collect_api: CollectApiConfig | None = key(None, doc="Endpoint of `retrograd collect --api`.")
    scenario_generation: ScenarioGenerationConfig | None = key(
        None, doc="Model of `retrograd scenarios generate`."
    )

    @clip_range_high.validator
    def _check_clip(self, attribute: object, value: float) -> None:
        if value < self.clip_range_low:
            raise ValueError(f"must be at least clip_range_low = {self.clip_range_low:g}, got {value:g}")

    def trajectory_tokens(self, ctx: int) -> int:
        """Token budget of a trajectory."""
        return self.max_trajectory_tokens or ctx
