"""Models, kernels and adapters for tests of the model and the engine, without a configuration file."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from retrograd.engine import EngineSettings, TrainingEngine, TrainingSequence, plan_epoch
from retrograd.gguf import open_model
from retrograd.kernel_table import FrozenKernelTable
from retrograd.nn import CausalLM
from retrograd_hookspecs import (
    Architecture,
    Backend,
    BuildContext,
    Component,
    KernelImpl,
    LossBatch,
    LossResult,
    NoConfig,
    Parameter,
)

LORA_TENSORS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def plugin_modules(package: Any) -> Iterable[Any]:
    """The registering modules of a plugin package."""
    for info in pkgutil.iter_modules(package.__path__):
        if not info.name.startswith("_") and not info.ispkg:
            yield importlib.import_module(f"{package.__name__}.{info.name}")


def build_backend(name: str, **options: Any) -> Backend:
    """The backend `name`; `options` are keys of its configuration."""
    module = importlib.import_module(f"retrograd_plugins.backends.{name}")
    component: Component[Any, Any] = module.retrograd_backends()[0]
    context = BuildContext(config=_RUN_CONFIG, base_dir=Path.cwd())
    backend: Backend = component.build(component.config(**options), context)
    return backend


def build_kernels(backend: Backend, variants: Mapping[str, str] | str = "") -> FrozenKernelTable:
    """All kernels of the backend. `variants` forces a variant where an op has it."""
    package = importlib.import_module(f"retrograd_plugins.kernels.{backend.name}")
    context = BuildContext(config=_RUN_CONFIG, base_dir=Path.cwd(), services={"backend": backend})
    impls: list[KernelImpl] = []
    for module in plugin_modules(package):
        for component in module.retrograd_kernels():
            impls += component.build(component.config(), context)

    def select(op: str, format: str, candidates: Any) -> KernelImpl | None:
        wanted = variants if isinstance(variants, str) else variants.get(op, "")
        return next((impl for impl in candidates if wanted and impl.variant == wanted), None)

    return FrozenKernelTable(impls, backend.device, select)


def architecture(name: str) -> Architecture:
    """The built-in architecture `name`."""
    module = importlib.import_module(f"retrograd_plugins.architectures.{name}")
    component = module.retrograd_architectures()[0]
    built: Architecture = component.build(NoConfig(), BuildContext(config=None, base_dir=Path.cwd()))
    return built


def load_model(path: Path, backend: Backend, kernels: FrozenKernelTable) -> CausalLM:
    """The model in `path`."""
    file = open_model(path)
    return CausalLM(file, architecture(file.architecture).describe(file), kernels, backend)


def reference_factors(model: CausalLM, *, rank: int = 8, seed: int = 1234) -> dict[str, tuple[Any, Any]]:
    """The adapter of the reference gradients; see `ref/README.md`."""
    rng = np.random.default_rng(seed)
    factors = {}
    for block in range(model.spec.block_count):
        for tensor in LORA_TENSORS:
            name = f"blk.{block}.{tensor}.weight"
            rows, columns = model.projections[name].weight.shape
            a = rng.standard_normal((rank, columns)) / np.sqrt(columns)
            b = rng.standard_normal((rows, rank)) * 0.01
            factors[name] = (a.astype(np.float32), b.astype(np.float32))
    return factors


def engine_for(model: CausalLM, **settings: Any) -> TrainingEngine:
    """An engine for what is attached to the model; its passes hold 4096 tokens unless `settings` differ."""
    options: dict[str, Any] = {"micro_batch": 4096, "kv_dtype": "compute", **settings}
    return TrainingEngine(model, None, EngineSettings(**options))


def gradients(
    model: CausalLM,
    parameters: Sequence[Parameter],
    sequences: Sequence[TrainingSequence],
    **settings: Any,
) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one epoch over `sequences` in one step each, with fresh gradients."""
    engine = engine_for(model, **settings)
    for parameter in parameters:
        parameter.grad[...] = 0
    total = sum(sequence.trained_tokens for sequence in sequences)
    steps = plan_epoch(
        [sequence.predicts for sequence in sequences],
        range(len(sequences)),
        micro_batch=engine.settings.micro_batch,
        gradient_accumulation=engine.settings.gradient_accumulation,
    )
    loss = sum(engine.train_step(step, sequences, mean_nll, total).loss for step in steps)
    return loss, {p.name: np.array(model.backend.to_host(p.grad)) for p in parameters}


def relative_gap(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Largest difference in norm of any array, relative to the expected one's norm."""
    return max(
        float(np.linalg.norm(found[name] - value) / np.linalg.norm(value)) for name, value in expected.items()
    )


def mean_nll(batch: LossBatch) -> LossResult:
    """Weighted negative log-likelihood over the normaliser."""
    value = -float(np.dot(batch.weight, batch.logp)) / batch.normalizer
    dlogp = (-batch.weight / batch.normalizer).astype(batch.logp.dtype)
    return LossResult(value=value, dlogp=dlogp, metrics={"count": float(len(batch.logp))})


@attrs.frozen
class _TrainingThreads:
    threads: int | None = min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)


@attrs.frozen
class _RunConfigStub:
    """What backends and kernels read from the run's configuration."""

    training: _TrainingThreads = attrs.field(factory=_TrainingThreads)


_RUN_CONFIG = _RunConfigStub()
