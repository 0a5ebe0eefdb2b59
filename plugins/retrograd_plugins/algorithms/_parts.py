"""Parts of the run that algorithms of rewards use, shared keys that they read, the rollouts of an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from retrograd_hookspecs import Loss, Reward, RolloutGroup, Tokenizer

if TYPE_CHECKING:
    from retrograd.engine import TrainingEngine
    from retrograd.engine.policy import Policy
    from retrograd.interrupts import Interrupt
    from retrograd.observe import Recorder
    from retrograd.policy_update import PolicyBatch
    from retrograd.progress import Reporter

ROLLOUT_KEYS = (
    "training.generation_concurrency",
    "training.generation_batch",
    "training.shared_prefix_fanout",
    "training.fast_sampling_context",
    "training.kv_dtype",
    "training.chunked_cross_entropy",
    "training.chunked_ce_tiles",
    "training.chunked_ce_seq_chunk",
    "evaluation.max_examples",
)
"""Shared keys that algorithms of rewards read."""


@attrs.frozen(kw_only=True, eq=False)
class Parts:
    """Parts of the run that every algorithm of rewards uses; `of` takes them from a build context."""

    engine: TrainingEngine
    policy: Policy
    tokenizer: Tokenizer
    template: Any
    chat_format: Any
    observer: Recorder
    reporter: Reporter
    interrupt: Interrupt
    rollouts_ready: Callable[[Sequence[RolloutGroup]], None]
    loss: Loss
    reward: Reward
    training: Any
    evaluation: Any

    NEEDS = (
        "engine",
        "policy",
        "tokenizer",
        "template",
        "chat_format",
        "observer",
        "reporter",
        "interrupt",
        "rollouts_ready",
    )


@attrs.frozen(kw_only=True, eq=False)
class Collected:
    """Rollouts of an update. `batch` is None if nothing of them can be trained, and `stalled` says why."""

    groups: Sequence[RolloutGroup]
    metrics: Mapping[str, float]
    batch: PolicyBatch | None
    stalled: str = ""
