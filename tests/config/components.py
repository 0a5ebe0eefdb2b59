"""Components as a third party writes them, for the tests of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import attrs

from retrograd.config import (
    Document,
    RunConfig,
    RunShape,
    check_component,
    check_rules,
    read_component,
    read_shared,
    table_name,
)
from retrograd_hookspecs import Component, NoConfig, key


@attrs.frozen(kw_only=True)
class SftConfig:
    """Supervised fine-tuning."""

    data: Path = key(doc="Training file.")
    data_format: Literal["text", "jsonl"] | None = key(None, doc="Format.", default_text="inferred")
    shuffle: bool = key(True, doc="Shuffle at each epoch.")
    template_variables: dict[str, Any] = key(factory=dict, doc="Variables of the chat template.")


@attrs.frozen(kw_only=True)
class LoraConfig:
    """A low-rank adapter."""

    rank: int = key(8, minimum=1, doc="Rank.", excluded_by="init_adapter")
    alpha: float = key(16.0, above=0.0, doc="The scale is alpha / rank.", excluded_by="init_adapter")
    seed: int = key(42, minimum=0, doc="Seed.", excluded_by="init_adapter")
    targets: tuple[str, ...] = key(("q", "k", "v"), doc="What is adapted.", excluded_by="init_adapter")
    dtype: Literal["f16", "f32"] = key("f16", doc="Storage.", excluded_by="init_adapter")
    init_adapter: Path | None = key(None, doc="Adapter to start from.", default_text="none")


@attrs.frozen(kw_only=True)
class SamplingConfig:
    """How answers are drawn."""

    temperature: float = key(doc="Temperature.", minimum=0.0)
    top_p: float = key(doc="Nucleus.", above=0.0, maximum=1.0)
    max_new_tokens: int = key(doc="Longest answer.", minimum=1, unit="tokens")


@attrs.frozen(kw_only=True)
class GrpoConfig:
    """A rollout algorithm."""

    prompts: Path = key(doc="Prompts.")
    sampling: SamplingConfig = key(doc="Sampling.")


@attrs.frozen(kw_only=True)
class SgdConfig:
    """Momentum."""

    momentum: float = key(0.0, minimum=0.0, below=1.0, doc="Momentum coefficient.")


def _build(config: Any, context: Any) -> None:
    return None


SFT = Component(
    name="sft",
    config=SftConfig,
    build=_build,
    summary="supervised fine-tuning",
    applies=("evaluation",),
    reads=("training.epochs", "training.chunked_cross_entropy", "training.chunked_ce_tiles"),
)
GRPO = Component(
    name="grpo",
    config=GrpoConfig,
    build=_build,
    summary="a rollout algorithm",
    applies=("evaluation", "observe", "reference"),
    reads=("training.generation_concurrency", "evaluation.max_examples"),
    fixed_accumulation=True,
)
LORA = Component(
    name="lora",
    config=LoraConfig,
    build=_build,
    summary="LoRA",
    starts_from="init_adapter",
    output_kinds=("adapter",),
    frozen_base=True,
)
FULL = Component(
    name="full", config=NoConfig, build=_build, summary="all weights", output_kinds=("trainable", "model")
)
ADAMW = Component(name="adamw", config=NoConfig, build=_build, summary="AdamW")
SGD = Component(name="sgd", config=SgdConfig, build=_build, summary="SGD")

INSTALLED = {"algorithms": (SFT, GRPO), "trainables": (LORA, FULL)}
SFT_RUN = (("algorithms", SFT), ("trainables", LORA), ("optimizers", ADAMW))


def read_run(
    document: Document, components: tuple[tuple[str, Component[Any, Any]], ...] = SFT_RUN
) -> tuple[RunConfig, dict[str, Any]]:
    """Read a document the way an assembly does; raises ConfigError with every problem."""
    shared = read_shared(document)
    shape = RunShape.of(components, lambda kind: INSTALLED[kind])
    problems = check_rules(shared, shape)
    configs: dict[str, Any] = {}
    read = {kind: read_component(kind, component, document) for kind, component in components}
    for structured in read.values():
        problems.extend(structured.problems)
    config = shared.config(problems, shape=shape)
    for kind, component in components:
        configs[kind] = read[kind].value
        problems.extend(check_component(component, table_name(kind, component), configs[kind], config))
    shared.config(problems)
    return config, configs
