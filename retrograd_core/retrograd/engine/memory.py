"""How much memory a run takes, found by running it on arrays that have a shape but no memory.

The very code that allocates is run once on a backend whose arrays repeat a single element and whose kernels
do nothing, so the estimate cannot drift away from what is allocated. Memory of kernels (packed panels) and
of the program itself is not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.nn.model import CausalLM
from retrograd.nn.projection import LoraFactors
from retrograd_hookspecs import (
    OPTIONAL,
    DeviceInfo,
    KernelImpl,
    KernelTable,
    LossBatch,
    LossResult,
    Parameter,
    QuantMatrix,
    Trainable,
)

from .layout import lay_out
from .packing import plan_epoch
from .sequences import TrainingSequence, whole_sequence
from .settings import EngineSettings
from .training import TrainingEngine

PARTS = {
    "kept": "activations",
    "checkpoints": "checkpointed activations",
    "kv": "key/value cache",
    "kv_gradients": "key/value cache",
    "generation_kv": "key/value cache",
    "logits": "logits tile",
}
"""First part of an array's name in the workspace -> part of the estimate; the rest is "workspace"."""


def estimate_memory(
    model: CausalLM,
    trainable: Trainable,
    settings: EngineSettings,
    *,
    longest: int,
    optimizer_bytes_per_parameter: float,
    families: bool = False,
) -> list[tuple[str, int]]:
    """Bytes by part, of a run whose longest sequence has `longest` tokens, all of them trained.

    `families`: the algorithm takes steps of `TrainingEngine.plan`, with sequences that share prompts.
    """
    count = sum(int(parameter.value.size) for parameter in trainable.parameters)
    item = int(model.backend.compute_dtype.itemsize)
    parts = {
        "weights (mapped)": model.weight_bytes(),
        "adapter": count * (4 + item),
        "gradients": count * item,
        "optimizer": int(count * optimizer_bytes_per_parameter),
    }
    for name, size in workspace_sizes(model, settings, longest=longest, families=families):
        part = PARTS.get(name.split("/", 1)[0], "workspace")
        parts[part] = parts.get(part, 0) + size
    return list(parts.items())


def workspace_sizes(
    model: CausalLM, settings: EngineSettings, *, longest: int, families: bool = False
) -> Iterable[tuple[str, int]]:
    """Name and bytes of every array that training and evaluation allocate in the workspace of a model like
    this, with its adapters."""
    shadow = CausalLM(
        model.file,
        model.spec,
        _IdleKernels(model.kernels),
        _ShapeBackend(model.backend.compute_dtype),
        token_capacity=max(model.workspace.token_capacity, settings.micro_batch),
    )
    for name, projection in model.projections.items():
        if projection.lora is not None:
            shadow.projections[name].lora = _shadow_of(projection.lora)
    engine = TrainingEngine(shadow, None, settings)
    sequences = [_all_trained(longest), _all_trained(settings.micro_batch + 1)]
    steps = plan_epoch(
        [sequence.predicts for sequence in sequences],
        range(len(sequences)),
        micro_batch=settings.micro_batch,
        gradient_accumulation=settings.gradient_accumulation,
    )
    with np.errstate(all="ignore"):
        if families:
            engine.reserve(longest - 1, families=True)
        # What needs most comes first: the cache is sized by it.
        for step in sorted(steps, key=lambda step: -lay_out(step, sequences).rows):
            engine.train_step(step, sequences, _idle_loss, 1.0)
        engine.log_probabilities(sequences)
    yield from shadow.workspace.sizes()
    yield "rope/tables", shadow.rope_tables.nbytes()


def _all_trained(tokens: int) -> TrainingSequence:
    return whole_sequence(np.zeros(max(tokens, 2), dtype=np.int32))


def _idle_loss(batch: LossBatch) -> LossResult:
    return LossResult(value=0.0, dlogp=np.zeros_like(batch.logp))


def _shadow_of(lora: LoraFactors) -> LoraFactors:
    def parameter(original: Parameter) -> Parameter:
        idle = _without_memory(original.value.shape, np.float32)
        return Parameter(name=original.name, value=idle, grad=idle, weight=idle)

    return LoraFactors(a=parameter(lora.a), b=parameter(lora.b), scale=lora.scale)


def _without_memory(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A writeable array of any shape, all of whose elements are one."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, (0,) * len(shape))


class _ShapeBackend:
    """A backend whose arrays cost nothing."""

    name = "shape"

    def __init__(self, compute_dtype: np.dtype[Any]) -> None:
        self.compute_dtype = compute_dtype
        self.device = DeviceInfo(backend=self.name, description="shapes without memory")

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return _without_memory(shape, dtype)

    def from_host(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def to_host(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(array)

    def upload(self, matrix: QuantMatrix) -> QuantMatrix:
        return matrix


class _IdleKernels:
    """A kernel table whose ops do nothing; it has those that `kernels` has."""

    def __init__(self, kernels: KernelTable) -> None:
        self._kernels = kernels

    def get(self, op: str, format: str = "") -> Callable[..., Any]:
        return _idle

    def serving(self, op: str, format: str = "") -> KernelImpl:
        variant = self._kernels.serving(op, format).variant if op in OPTIONAL else ""
        return KernelImpl(op=op, format=format, fn=_idle, variant=variant)


def _idle(*_: Any) -> None:
    return None
