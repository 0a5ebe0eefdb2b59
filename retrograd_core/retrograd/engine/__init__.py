"""The engine: packing, training steps, scoring, generation, and the memory they take."""

from .generation import Completion, DecodingBatch, GenerationRequest, Generator
from .memory import estimate_memory
from .packing import Branch, Pass, Piece, Step, plan_epoch, shuffled_order
from .sequences import TrainingSequence, whole_sequence
from .settings import EngineSettings
from .shared_prefix import Fanout, PackingStats, plan_step
from .training import StepStats, TrainingEngine

__all__ = [
    "Branch",
    "Completion",
    "DecodingBatch",
    "EngineSettings",
    "Fanout",
    "GenerationRequest",
    "Generator",
    "PackingStats",
    "Pass",
    "Piece",
    "Step",
    "StepStats",
    "TrainingEngine",
    "TrainingSequence",
    "estimate_memory",
    "plan_epoch",
    "plan_step",
    "shuffled_order",
    "whole_sequence",
]
