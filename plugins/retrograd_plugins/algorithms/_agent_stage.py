"""What trajectories are played with: limits, worlds, servers, the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from retrograd.agent.mcp import McpServer
from retrograd_hookspecs import BuildContext, ConfigError, EnvironmentProvider, Problem, SamplingParams

from ._agent_config import AgenticGRPOConfig

if TYPE_CHECKING:
    from retrograd.agent.play import Limits
    from retrograd.agent.stage import OpenTools, Stage

SHARED = (
    "is shared by all trajectories, and with an environment each must be isolated: stateless must be true"
)
STATELESS = "set stateless = true if its calls do not depend on each other"
STAGE_NEEDS = ("policy", "tokenizer", "template", "chat_format")


def limits_of(config: AgenticGRPOConfig, ctx: int) -> Limits:
    """What ends a trajectory of a run with contexts of `ctx` tokens."""
    from retrograd.agent.play import Limits

    return Limits(
        max_turns=config.max_turns,
        max_new_tokens_per_turn=config.max_new_tokens_per_turn,
        max_trajectory_tokens=config.trajectory_tokens(ctx),
        max_rollout_secs=config.max_rollout_secs,
        end_on_no_tool_call=config.end_on_no_tool_call,
        max_failed_turns=config.max_failed_turns,
    )


def build_worlds(
    config: AgenticGRPOConfig, context: BuildContext
) -> tuple[EnvironmentProvider | None, OpenTools | None]:
    """Environment and MCP servers of a run; no service is needed."""
    environment = config.environment
    provider = context.build("environments", environment.type) if environment is not None else None
    if not config.mcp_servers and config.mcp_config is None:
        return provider, None
    from retrograd.agent.mcp import mcp_tools

    tools = mcp_tools(config.mcp_servers, config.mcp_config, context.base_dir)
    if provider is not None and tools is not None:
        _require_stateless(tools.servers, "agent.mcp_config")
    return provider, tools


def _require_stateless(servers: Sequence[McpServer], key: str) -> None:
    """Raise `ConfigError` for servers that trajectories in worlds of their own would meet through."""
    problems = [
        Problem(where=f"MCP server {server.name!r}", key=key, message=SHARED, hint=STATELESS)
        for server in servers
        if not server.stateless
    ]
    if problems:
        raise ConfigError(problems)


def build_stage(config: AgenticGRPOConfig, context: BuildContext, *, check: Any = None) -> Stage:
    """What trajectories are played with. The context has the services of `STAGE_NEEDS`."""
    from retrograd.agent.play import Player
    from retrograd.agent.stage import Stage
    from retrograd.conversation import ConversationEncoder

    tokenizer = context.service("tokenizer")
    player = Player(
        speaker=context.service("policy"),
        encoder=ConversationEncoder(
            tokenizer, context.service("template"), context.service("chat_format"), config.template_variables
        ),
        chat_format=context.service("chat_format"),
        stop_ids=tokenizer.stop_ids,
        limits=limits_of(config, context.config.training.ctx),
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens_per_turn, seed=config.seed),
        system_suffix=config.system_suffix,
    )
    provider, tools = build_worlds(config, context)
    return Stage(
        player=player,
        policy=context.service("policy"),
        provider=provider,
        tools=tools,
        check=check or (lambda: None),
    )
