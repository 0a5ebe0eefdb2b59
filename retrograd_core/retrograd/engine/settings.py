"""What the engine needs to know from the configuration."""

from __future__ import annotations

from typing import Any, Literal

import attrs
import numpy as np

from retrograd.nn.head import HeadPlan
from retrograd.nn.model import Checkpointing

from .shared_prefix import Fanout

KVFormat = Literal["f16", "f32", "compute"]


@attrs.frozen(kw_only=True)
class EngineSettings:
    """Settings of `[training]` that the engine reads; see the configuration reference for each.

    `kv_dtype` "compute" keeps keys and values as the backend computes them (tests).
    """

    micro_batch: int
    gradient_accumulation: int = 1
    kv_dtype: KVFormat = "f16"
    gradient_checkpointing: bool = False
    checkpoint_every_n_layers: int = 4
    checkpoint_dtype: Literal["f32", "f16", "bf16"] = "f32"
    chunked_cross_entropy: bool = True
    chunked_ce_tiles: int = 8
    chunked_ce_seq_chunk: int = 512
    shared_prefix_fanout: Fanout = "auto"

    @classmethod
    def from_training(cls, training: Any) -> EngineSettings:
        """From `retrograd.config.TrainingConfig` (or anything with the same attributes)."""
        return cls(**{name: getattr(training, name) for name in attrs.fields_dict(cls)})

    def kv_type(self, compute: np.dtype[Any]) -> np.dtype[Any]:
        """Array type of cached keys and values."""
        if self.kv_dtype == "compute":
            return compute
        return np.dtype(np.float16 if self.kv_dtype == "f16" else np.float32)

    def checkpointing(self) -> Checkpointing | None:
        """Gradient checkpointing, or None."""
        if not self.gradient_checkpointing:
            return None
        return Checkpointing(stride=self.checkpoint_every_n_layers, dtype=self.checkpoint_dtype)

    def head_plan(self) -> HeadPlan:
        """How head and cross-entropy are cut."""
        if not self.chunked_cross_entropy:
            return HeadPlan(tiles=1, rows=0)
        return HeadPlan(tiles=self.chunked_ce_tiles, rows=self.chunked_ce_seq_chunk)
