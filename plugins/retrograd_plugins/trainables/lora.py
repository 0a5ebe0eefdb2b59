"""LoRA: a low-rank adapter on frozen, quantised weights.

The effective weight of a target W (N, K) is

    W + (alpha / r) · B·A,    A (r, K), B (N, r)

A starts uniform in ±1/sqrt(K) (Kaiming's rule with a = sqrt(5), as PEFT does), B at zero, so that training
starts at the base model. With `dtype = "f16"` the optimizer updates float32 masters and the forward pass
reads them rounded to f16: what is saved is exactly what was trained. ::

    [lora]
    rank = 16
    targets = ["q", "v", "blk.*.ffn_down.weight"]

Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1; He et al. 2015, section 2.2 (initialisation).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from retrograd_hookspecs import (
    BuildContext,
    Component,
    ConfigError,
    ConfigTable,
    ModelError,
    Problem,
    Trainable,
    hookimpl,
    key,
)

if TYPE_CHECKING:
    from retrograd.nn.model import CausalLM

DEFAULT_TARGETS = ("q", "k", "v", "o", "ffn_up", "ffn_down", "ffn_gate")


@attrs.frozen(kw_only=True)
class LoraConfig:
    """Adapter of `training.trainable = "lora"`: where, how large, and how it is stored."""

    rank: int = key(8, minimum=1, doc="Adapter rank.", excluded_by="init_adapter")
    alpha: float = key(
        16.0, above=0.0, doc="Scale; the effective scale is alpha / rank.", excluded_by="init_adapter"
    )
    seed: int = key(
        42,
        minimum=0,
        doc="Initialization seed, also used to shuffle SFT data.",
        excluded_by="init_adapter",
    )
    targets: tuple[str, ...] = key(
        DEFAULT_TARGETS,
        doc="Aliases, tensor patterns (`blk.*.attn_q.weight`), or `auto` for every projection of the"
        " architecture. `retrograd inspect` lists the candidates.",
        excluded_by="init_adapter",
    )
    dtype: Literal["f16", "f32"] = key(
        "f16", doc="Adapter storage; the optimizer works on a float32 copy.", excluded_by="init_adapter"
    )
    init_adapter: Path | None = key(
        None,
        doc="Start from an existing adapter GGUF (weights only, no optimizer state). Excludes the other keys"
        " and --resume.",
        default_text="none",
    )


def build(config: LoraConfig, context: BuildContext) -> Trainable:
    """Resolve the targets, make or read the factors, and attach them to the model."""
    from retrograd.nn.targets import resolve_targets

    from ._lora_adapter import LoraAdapter, initial_factors

    model: CausalLM = context.service("model")
    if config.init_adapter is not None:
        return LoraAdapter.from_file(model, config.init_adapter)
    try:
        names = resolve_targets(config.targets, model)
    except ModelError as error:
        raise ConfigError([_problem(context, str(error))]) from error
    return LoraAdapter(
        model,
        factors=initial_factors(model, names, rank=config.rank, seed=config.seed),
        alpha=config.alpha,
        dtype=config.dtype,
    )


def _problem(context: BuildContext, message: str) -> Problem:
    document = getattr(context.config, "document", None)
    where = document.where("lora.targets") if document is not None else "LoraConfig"
    return Problem(where=where, key="lora.targets", message=message)


def check(config: LoraConfig, table: ConfigTable, run: Any) -> Iterable[Problem]:
    """`init_adapter` must exist."""
    if config.init_adapter is not None and not config.init_adapter.is_file():
        yield Problem(
            where=table.where("init_adapter"),
            key=f"{table.name}.init_adapter",
            message=f"there is no file {config.init_adapter}",
            hint="give the adapter GGUF that a run wrote, or leave init_adapter out",
        )


@hookimpl
def retrograd_trainables() -> Sequence[Component[Any, Any]]:
    """Offer `lora`."""
    return [
        Component(
            name="lora",
            config=LoraConfig,
            build=build,
            summary="A low-rank adapter on frozen, quantised weights.",
            source="Hu et al. 2021 (arXiv:2106.09685), section 4.1",
            needs=("model",),
            check=check,
            starts_from="init_adapter",
            output_kinds=("adapter",),
            frozen_base=True,
        )
    ]
