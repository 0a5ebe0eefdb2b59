"""The model: modules with an explicit forward and backward over the frozen kernel table."""

from .attention import Attention, KeyValueStore
from .batch import PassBatch, Run, build_pass
from .block import DecoderBlock
from .embedding import Embedding
from .head import Head, HeadPlan
from .kv_cache import KVCache, KVGradients
from .mlp import GatedMLP
from .model import CausalLM, Checkpointing
from .norm import RMSNorm
from .projection import LoraFactors, Projection, ProjectionGroup
from .workspace import Scope, Workspace

__all__ = [
    "Attention",
    "CausalLM",
    "Checkpointing",
    "DecoderBlock",
    "Embedding",
    "GatedMLP",
    "Head",
    "HeadPlan",
    "KVCache",
    "KVGradients",
    "KeyValueStore",
    "LoraFactors",
    "PassBatch",
    "Projection",
    "ProjectionGroup",
    "RMSNorm",
    "Run",
    "Scope",
    "Workspace",
    "build_pass",
]
