"""The engine: packing, training steps, scoring, generation, and the memory they take."""

from .generation import Completion, DecodingBatch, GenerationRequest, Generator
from .memory import estimate_memory
from .packing import Pass, Piece, Step, plan_epoch, plan_forward, shuffled_order
from .sequences import TrainingSequence, whole_sequence
from .settings import EngineSettings
from .training import StepStats, TrainingEngine

__all__ = [
    "Completion",
    "DecodingBatch",
    "EngineSettings",
    "GenerationRequest",
    "Generator",
    "Pass",
    "Piece",
    "Step",
    "StepStats",
    "TrainingEngine",
    "TrainingSequence",
    "estimate_memory",
    "plan_epoch",
    "plan_forward",
    "shuffled_order",
    "whole_sequence",
]
