"""retrograd: fine-tune GGUF language models on one machine.

The names below are loaded when they are first used, so that `import retrograd` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograd_hookspecs import Scenario
    from retrograd_plugins.algorithms._critic import CriticConfig
    from retrograd_plugins.algorithms._sampling import SamplingConfig
    from retrograd_plugins.algorithms.agent_grpo import AgenticGRPOConfig
    from retrograd_plugins.algorithms.grpo import GRPOConfig
    from retrograd_plugins.algorithms.ppo import PPOConfig
    from retrograd_plugins.algorithms.sft import SftConfig
    from retrograd_plugins.environments.container import ContainerEnvironment
    from retrograd_plugins.environments.local import LocalEnvironment
    from retrograd_plugins.judges.command import CommandJudge
    from retrograd_plugins.judges.ruler import RulerJudge
    from retrograd_plugins.trainables.lora import LoraConfig

    from .agent.mcp import McpServer
    from .agent.tools import Tools
    from .batch_training import AnswerGroup
    from .config import EvaluationConfig, TrainingConfig
    from .errors import ConfigError, DataError, RetrogradError
    from .run import RunResult
    from .trainer import Trainer

_EXPORTS = {
    "AgenticGRPOConfig": "retrograd_plugins.algorithms.agent_grpo",
    "AnswerGroup": "retrograd.batch_training",
    "CommandJudge": "retrograd_plugins.judges.command",
    "CriticConfig": "retrograd_plugins.algorithms._critic",
    "GRPOConfig": "retrograd_plugins.algorithms.grpo",
    "PPOConfig": "retrograd_plugins.algorithms.ppo",
    "RulerJudge": "retrograd_plugins.judges.ruler",
    "SamplingConfig": "retrograd_plugins.algorithms._sampling",
    "ConfigError": "retrograd.errors",
    "DataError": "retrograd.errors",
    "EvaluationConfig": "retrograd.config",
    "McpServer": "retrograd.agent.mcp",
    "Scenario": "retrograd_hookspecs",
    "LoraConfig": "retrograd_plugins.trainables.lora",
    "RetrogradError": "retrograd.errors",
    "RunResult": "retrograd.run",
    "SftConfig": "retrograd_plugins.algorithms.sft",
    "Trainer": "retrograd.trainer",
    "TrainingConfig": "retrograd.config",
    "ContainerEnvironment": "retrograd_plugins.environments.container",
    "LocalEnvironment": "retrograd_plugins.environments.local",
    "Tools": "retrograd.agent.tools",
}
"""The facade: the one place in the core that names plugin modules."""

__all__ = [
    "AgenticGRPOConfig",
    "AnswerGroup",
    "CommandJudge",
    "ConfigError",
    "ContainerEnvironment",
    "CriticConfig",
    "DataError",
    "EvaluationConfig",
    "GRPOConfig",
    "LocalEnvironment",
    "LoraConfig",
    "McpServer",
    "PPOConfig",
    "RetrogradError",
    "RulerJudge",
    "RunResult",
    "SamplingConfig",
    "Scenario",
    "SftConfig",
    "Tools",
    "Trainer",
    "TrainingConfig",
]


def __getattr__(name: str) -> Any:
    try:
        module = _EXPORTS[name]
    except KeyError:
        raise AttributeError(f"module 'retrograd' has no attribute {name!r}") from None
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
