"""Agentic GRPO: the model works on multi-turn tasks with tools, and whole trajectories are compared.

J = 1/(N·L) · Σ_i Σ_t [ min(r_{i,t}·A_{i,t}, clip(r_{i,t}, 1 − ε_low, 1 + ε_high)·A_{i,t}) − β·k3(π_ref/π) ]
A_{i,t} = R_i − mean of the group + (G_{i,t} − mean of the trajectory)

over the tokens that the policy wrote; prompts, framing and tool results are context. R_i is the final reward
with the rewards of steps, G_{i,t} the sum of the rewards of steps that start at or after token t. L = min(
max_turns × max_new_tokens_per_turn, max_trajectory_tokens). The reward is the environment's; a group that it
does not grade is compared by the judge. One optimizer step is one pass over all trajectories of the update.

Minimal TOML::

    [run]
    algorithm = "agent_grpo"
    [model]
    path = "model.gguf"
    [output]
    path = "agent.gguf"
    [lora]
    [training]
    ctx = 4096
    micro_batch = 512
    lr = 1e-5
    [agent]
    scenarios = "scenarios.jsonl"
    updates = 100
    scenarios_per_update = 2
    [agent.environment]
    type = "container"
    [agent.environment.tools]
    default = "python"

Sources: as `grpo`; Zheng et al. 2025 (GSPO-token) for the sequence level with advantages of their own per
token.
"""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import Algorithm, BuildContext, Component, ConfigTable, Problem, hookimpl

from ._agent_algorithm import AgenticGrpo, NoReward
from ._agent_config import AgenticGRPOConfig, CollectApiConfig, ScenarioGenerationConfig
from ._agent_stage import SHARED, STAGE_NEEDS, STATELESS, build_stage, build_worlds, limits_of
from ._kl import no_reference
from ._parts import ROLLOUT_KEYS, Parts

__all__ = [
    "STAGE_NEEDS",
    "AgenticGRPOConfig",
    "AgenticGrpo",
    "CollectApiConfig",
    "ScenarioGenerationConfig",
    "build_stage",
    "build_worlds",
    "limits_of",
]


def _build(config: AgenticGRPOConfig, context: BuildContext) -> Algorithm:
    run = context.config
    parts = Parts(
        **{name: context.service(name) for name in Parts.NEEDS},
        loss=context.build("losses", config.loss),
        reward=NoReward(),
        training=run.training,
        evaluation=run.evaluation,
    )
    return AgenticGrpo(
        config,
        parts,
        stage=build_stage(config, context, check=parts.interrupt.check),
        judge=context.build("judges", config.judge.type) if config.judge is not None else None,
        reference=context.service("reference") if config.kl_coefficient > 0 else None,
    )


def _check(config: AgenticGRPOConfig, table: ConfigTable, run: Any) -> list[Problem]:
    problems: list[Problem] = []

    def add(name: str, message: str, hint: str = "") -> None:
        problems.append(
            Problem(where=table.where(name), key=f"{table.name}.{name}", message=message, hint=hint)
        )

    if config.environment is None and config.judge is None:
        add(
            "environment",
            "nothing gives a reward: a run needs [agent.environment], [agent.judge], or both",
            "prefer an environment that verifies the task",
        )
    if config.judge is None:
        for name in ("judge_failure", "drop_degenerate_groups"):
            if name in table:
                add(name, "has no effect without [agent.judge]", "leave it out, or add the section")
    budget = config.max_trajectory_tokens
    if budget is not None and budget > run.training.ctx:
        add(
            "max_trajectory_tokens",
            f"{budget} is more than training.ctx = {run.training.ctx}",
            "raise training.ctx, or lower it",
        )
    if run.evaluation is not None and config.environment is None:
        add("environment", "[evaluation] reports the environment's reward, and there is none", "remove it")
    if config.kl_coefficient == 0 and run.reference is not None:
        add("kl_coefficient", "is 0, so [reference] has no effect", "remove the section, or set it")
    elif config.kl_coefficient > 0 and run.reference is None and not run.shape.frozen_base:
        add("kl_coefficient", *no_reference(run))
    if config.environment is not None:
        for number, server in enumerate(config.mcp_servers):
            if not server.stateless:
                add(
                    f"mcp_servers[{number}].stateless",
                    f"the MCP server {server.name!r} {SHARED}",
                    STATELESS,
                )
    return problems


@hookimpl
def retrograd_algorithms() -> list[Component[AgenticGRPOConfig, Algorithm]]:
    """`agent_grpo`."""
    return [
        Component(
            name="agent_grpo",
            config=AgenticGRPOConfig,
            section="agent",
            build=_build,
            summary="Learning from whole trajectories with tools.",
            source="Shao et al. 2024, equation 3; Liu et al. 2025, section 3.2",
            needs=(*Parts.NEEDS, "reference"),
            selects={
                "loss": "losses",
                "environment": "environments",
                "judge": "judges",
                "constrain_tool_calls": "constraints",
            },
            check=_check,
            applies=("evaluation", "observe", "reference"),
            reads=ROLLOUT_KEYS,
            fixed_accumulation=True,
        )
    ]
