"""The sections that every run shares, one attrs class each: the whole of what the core reads itself.

An algorithm's section, `[lora]`, `[trainable]` and the tables of optimizers, schedules, losses, sinks and
hook plugins belong to the components that read them. Names of components are plain strings here:
which exist depends on what is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import attrs

from retrograd_hookspecs import key


@attrs.frozen(kw_only=True)
class RunSection:
    """What the run does."""

    algorithm: str = key(doc="Training algorithm; its own section must be present.")
    verbose: bool = key(False, doc="Also say which device is used and which checks of the audit passed.")


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The base model and the device."""

    path: str = key(
        doc="Base model: a GGUF file, or a locator such as `pypi:NAME==VERSION/file.gguf`. `--model`"
        " overrides it.",
        locator=True,
    )
    device: str = key(
        "auto",
        doc="`auto` (a GPU if there is one, else the CPU), `cpu`, `gpu` (fail without one), or the name of"
        " an installed backend.",
    )


@attrs.frozen(kw_only=True)
class OutputConfig:
    """Where the result goes, and in which form."""

    path: Path = key(doc="File that the result is written to.")
    kind: Literal["adapter", "trainable", "model"] | None = key(
        None,
        doc="`adapter`: a LoRA GGUF for llama.cpp (with lora). `trainable`: the trained base tensors, and the"
        " adapter of hybrid (with full, partial, hybrid). `model`: a standalone GGUF (with full, partial).",
        default_text="`adapter` for lora, else `trainable`",
    )


@attrs.frozen(kw_only=True)
class TrainingConfig:
    """How the weights are updated, and how much memory that may take."""

    trainable: str = key("lora", doc="What is trained: `lora`, `full`, `partial` or `hybrid`.")
    optimizer: str = key("adamw", doc="Optimizer; its options are in `[optimizer.NAME]`.")
    lr: float = key(1e-4, minimum=0.0, doc="Learning rate.")
    lr_scheduler: str = key(
        "constant",
        doc="Learning-rate schedule: `constant`, or `linear` and `cosine`, which decay to zero by the end of"
        " the run. Its options are in `[lr_scheduler.NAME]`.",
    )
    warmup_steps: int = key(
        0, minimum=0, unit="steps", doc="Steps over which the learning rate rises from zero."
    )
    weight_decay: float = key(0.0, minimum=0.0, maximum=1.0, doc="Decoupled weight decay.")
    max_grad_norm: float = key(
        1.0, above=0.0, doc="Largest global gradient norm; a longer gradient is scaled down."
    )
    epochs: int = key(
        1,
        minimum=1,
        may_grow=True,
        doc="Passes over the dataset. Rollout algorithms have their own counters.",
    )
    ctx: int = key(128, minimum=2, unit="tokens", doc="Context length.")
    micro_batch: int = key(
        32, minimum=1, unit="tokens", doc="Tokens of one forward and backward pass: the main memory setting."
    )
    gradient_accumulation: int = key(
        1,
        minimum=1,
        unit="passes",
        doc="Passes of one optimizer step; micro_batch × gradient_accumulation must divide ctx. Rollout and"
        " preference algorithms fix it to ctx / micro_batch: leave it out.",
    )
    threads: int | None = key(None, minimum=1, doc="CPU threads.", default_text="automatic")
    generation_concurrency: int | None = key(
        None,
        minimum=1,
        unit="sequences",
        doc="Answers generated at once; fewer take less memory.",
        default_text="derived",
    )
    generation_batch: int | None = key(
        None, minimum=1, unit="tokens", doc="Batch size of generation.", default_text="derived"
    )
    shared_prefix_fanout: int | Literal["auto", "off", "max"] = key(
        "auto", minimum=2, doc="How many sequences that share a prompt are packed together."
    )
    fast_sampling_context: bool = key(
        True, doc="F16 key/value cache and flash attention for generation; false samples bit-exactly."
    )
    kv_dtype: Literal["f16", "f32"] = key(
        "f16", doc="Type of the key/value cache in training; f32 where the device requires it."
    )
    gradient_checkpointing: bool = key(False, doc="Recompute activations to save memory.")
    checkpoint_every_n_layers: int = key(
        4, minimum=1, unit="layers", doc="Distance of kept activations with gradient_checkpointing."
    )
    checkpoint_dtype: Literal["f32", "f16", "bf16"] = key(
        "f32", doc="Precision of kept activations; needs gradient_checkpointing."
    )
    chunked_cross_entropy: bool = key(
        True, doc="Compute the loss in tiles of the vocabulary, so that the full logits never exist."
    )
    chunked_ce_tiles: int = key(8, minimum=1, doc="Tiles of the vocabulary with chunked_cross_entropy.")
    chunked_ce_seq_chunk: int = key(
        512, minimum=0, unit="tokens", doc="Tokens of one tile's chunk; 0 takes all at once."
    )
    master_weights: Literal["auto", "f32", "off"] = key(
        "auto", doc="F32 master copy of F16 and BF16 base weights; costs 4 bytes a trained parameter."
    )
    require_gpu_resident: bool = key(False, doc="Fail if any training operation would run on the CPU.")
    max_gpu_duty_cycle: float = key(
        1.0, above=0.0, maximum=1.0, doc="Largest share of the time spent on the GPU."
    )


@attrs.frozen(kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out data."""

    data: Path = key(doc="Held-out file, in the format of the training data.", input=True)
    every_iterations: int = key(
        1, minimum=1, doc="Evaluate after every N epochs (sft) or updates (rollout algorithms)."
    )
    max_examples: int | None = key(
        None,
        minimum=1,
        doc="Most prompts that a rollout algorithm evaluates, spread evenly over the file.",
        default_text="all",
    )
    patience: int | None = key(
        None,
        minimum=1,
        unit="evaluations",
        may_grow=True,
        doc="Stop after so many evaluations without improvement.",
        default_text="never",
    )
    min_delta: float = key(0.0, minimum=0.0, doc="Smallest change that counts as an improvement.")


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """Checkpoints, and where to go on from."""

    directory: Path = key(doc="Directory of the checkpoints.")
    mode: Literal["steps", "best_eval", "steps_and_best_eval"] = key(
        doc="When to save; `best_eval` and `steps_and_best_eval` need `[evaluation]`."
    )
    every_steps: int | None = key(
        None,
        minimum=1,
        unit="optimizer steps",
        doc="Save after every N optimizer steps.",
        default_text="required for the modes with steps",
    )
    resume_from: Path | None = key(
        None, doc="Checkpoint to go on from; `--resume` overrides.", default_text="none"
    )


@attrs.frozen(kw_only=True)
class MetricsConfig:
    """Where metrics go, besides the `metrics.jsonl` that is always written."""

    tensorboard_dir: Path | None = key(None, doc="Directory of TensorBoard logs.", default_text="none")
    wandb_export_dir: Path | None = key(
        None, doc="Directory of an offline export for Weights & Biases.", default_text="none"
    )
    sinks: tuple[str, ...] = key(
        (), doc="Further installed sinks; the options of each are in `[sink.NAME]`.", default_text="none"
    )


@attrs.frozen(kw_only=True)
class ObserveConfig:
    """Rollouts recorded for reading; for ppo, grpo and agent_grpo."""

    directory: Path = key(doc="Directory of the records.")
    every: int = key(1, minimum=1, unit="updates", doc="Record the rollouts of every N-th update.")
    max_text_chars: int = key(
        0, minimum=0, unit="characters", doc="Longest text that is kept; 0 keeps texts whole."
    )
    enabled: bool = key(True, doc="false keeps the table and writes nothing.")


@attrs.frozen(kw_only=True)
class ReferenceConfig:
    """The frozen model of a KL penalty, or of a dpo or ipo run."""

    model: str = key(doc="Reference GGUF, or a locator; it must share the model's tokenizer.", locator=True)
    ctx: int | None = key(
        None,
        minimum=2,
        unit="tokens",
        doc="Context length; at least training.ctx.",
        default_text="`training.ctx`",
    )


@attrs.frozen(kw_only=True)
class PluginsConfig:
    """Which plugins a run may use."""

    load: tuple[Path, ...] = key((), doc="Python files with hooks, loaded for this run.", default_text="none")
    disable: tuple[str, ...] = key(
        (),
        doc="Distributions (`retrograd-optimizer-lion`) or single entries (`optimizers.lion`) to leave out. A"
        " command that is left out (`commands.chat`) refuses the file.",
        default_text="none",
    )
    require: tuple[str, ...] = key(
        (), doc="Distributions that must be installed, as `NAME>=VERSION`.", default_text="none"
    )


SHARED_SECTIONS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "run": RunSection,
        "model": ModelConfig,
        "output": OutputConfig,
        "training": TrainingConfig,
        "evaluation": EvaluationConfig,
        "checkpoint": CheckpointConfig,
        "metrics": MetricsConfig,
        "observe": ObserveConfig,
        "reference": ReferenceConfig,
        "plugins": PluginsConfig,
    }
)
"""Class of each shared section, in the order of the reference."""

OPTIONAL_SECTIONS = frozenset({"evaluation", "checkpoint", "observe", "reference"})
"""Shared sections that are None in a run whose file leaves them out."""


@attrs.frozen
class NamedTable:
    """`[TABLE.NAME]`: options of one component."""

    kind: str
    """Kind of the component, as in `retrograd_hookspecs.KINDS`."""
    singular: str
    selector: str
    """The key that names the component."""


NAMED_TABLES: Mapping[str, NamedTable] = MappingProxyType(
    {
        "optimizer": NamedTable("optimizers", "optimizer", "training.optimizer"),
        "lr_scheduler": NamedTable("schedules", "learning-rate schedule", "training.lr_scheduler"),
        "reward": NamedTable("rewards", "reward", "the reward key of the algorithm"),
        "loss": NamedTable("losses", "loss", "the loss key of the algorithm"),
        "sink": NamedTable("sinks", "sink", "[metrics]"),
        "plugin": NamedTable("hooks", "hook plugin", "[plugins]"),
    }
)
"""Tables whose second part is the name of a component."""

PLANNED_SECTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "algorithms": {"distill": ("distill",), "preference": ("preference",)},
        "trainables": {"trainable": ("full", "partial", "hybrid")},
    }
)
"""Sections of the reference whose components are still to come, with their names."""
