"""What trajectories are played with: limits, worlds, servers, the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from retrograd.agent.mcp import McpServer
from retrograd_hookspecs import BuildContext, ConfigError, EnvironmentProvider, Problem, SamplingParams

from ._agent_config import AgenticGRPOConfig

if TYPE_CHECKING:
    from retrograd.agent.constrained import CallConstraints
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


def _constraints(config: AgenticGRPOConfig, context: BuildContext) -> CallConstraints | None:
    """Constrained decoding of calls, if it is asked for. Raises `ConfigError` if the model's format has no
    grammar."""
    if config.constrain_tool_calls is None:
        return None
    from retrograd.agent.constrained import KEY, CallConstraints, has_grammar
    from retrograd.plugins import Catalogue

    chat_format = context.service("chat_format")
    if not has_grammar(chat_format):
        names = Catalogue.installed().names("chat_formats")
        able = [name for name in names if has_grammar(context.build("chat_formats", name))]
        message = f"the chat format {chat_format.name!r} of this model has no grammar to constrain calls with"
        hint = f"leave the key out; formats that have one: {', '.join(able)}"
        raise ConfigError([Problem(where="agent", key=KEY, message=message, hint=hint)])
    return CallConstraints(chat_format, context.build("constraints", config.constrain_tool_calls))


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
        constraints=_constraints(config, context),
    )
    provider, tools = build_worlds(config, context)
    return Stage(
        player=player,
        policy=context.service("policy"),
        provider=provider,
        tools=tools,
        check=check or (lambda: None),
    )
