"""All errors that retrograd raises; the tree is defined beside the plugin contracts."""

from retrograd_hookspecs.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    KernelError,
    ModelError,
    PluginError,
    Problem,
    RetrogradError,
    RolloutError,
    TokenizerError,
    TrainingError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "KernelError",
    "ModelError",
    "PluginError",
    "Problem",
    "RetrogradError",
    "RolloutError",
    "TokenizerError",
    "TrainingError",
]
