"""Models, kernels and adapters for tests of the model and the engine, without a configuration file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from retrograd.engine import EngineSettings, TrainingEngine
from retrograd.gguf import open_model
from retrograd.kernel_table import FrozenKernelTable
from retrograd.nn import CausalLM, LoraFactors
from retrograd_hookspecs import (
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


def describe(path: Path) -> tuple[Any, Any]:
    """The file and the description its architecture gives."""
    file = open_model(path)
    module = importlib.import_module(f"retrograd_plugins.architectures.{file.architecture}")
    component = module.retrograd_architectures()[0]
    architecture = component.build(NoConfig(), BuildContext(config=None, base_dir=path.parent))
    return file, architecture.describe(file)


def load_model(path: Path, backend: Backend, kernels: FrozenKernelTable) -> CausalLM:
    """The model in `path`."""
    file, spec = describe(path)
    return CausalLM(file, spec, kernels, backend)


@attrs.define(eq=False)
class PlainLora:
    """A trainable with given factors, for tests that need to know every value."""

    factors: Mapping[str, tuple[Any, Any]]
    scale: float
    parameters: list[Parameter] = attrs.field(factory=list)
    compute: Any = None

    def attach(self, model: CausalLM) -> None:
        self.compute = model.backend.compute_dtype
        for name, (a, b) in self.factors.items():
            pair = [self._parameter(f"{name}.{suffix}", value) for suffix, value in (("a", a), ("b", b))]
            self.parameters += pair
            model.projections[name].lora = LoraFactors(a=pair[0], b=pair[1], scale=self.scale)

    def _parameter(self, name: str, value: Any) -> Parameter:
        weight = np.ascontiguousarray(value, dtype=self.compute)
        return Parameter(
            name=name, value=value.astype(np.float32), grad=np.zeros_like(weight), weight=weight, dtype="f32"
        )

    def refresh(self) -> None:
        for parameter in self.parameters:
            parameter.weight[...] = parameter.value

    def save(self, path: Path) -> None:
        raise AssertionError("not used in these tests")

    load = save

    def summary(self) -> str:
        return "plain"

    def grads(self) -> dict[str, Any]:
        """Copies of all gradients by name."""
        return {p.name: np.array(p.grad) for p in self.parameters}


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


def engine_for(model: CausalLM, lora: PlainLora | None = None, **settings: Any) -> TrainingEngine:
    """An engine whose passes hold 4096 tokens unless `settings` say otherwise."""
    return TrainingEngine(
        model, lora, EngineSettings(**{"micro_batch": 4096, "kv_dtype": "compute"} | settings)
    )


def mean_nll(batch: LossBatch) -> LossResult:
    """Weighted negative log-likelihood over the normaliser."""
    value = -float(np.dot(batch.weight, batch.logp)) / batch.normalizer
    return LossResult(value=value, dlogp=-batch.weight / batch.normalizer, metrics={"count": len(batch.logp)})


@attrs.frozen
class _TrainingThreads:
    threads: int | None = 2


@attrs.frozen
class _RunConfigStub:
    """What backends and kernels read from the run's configuration."""

    training: _TrainingThreads = attrs.field(factory=_TrainingThreads)


_RUN_CONFIG = _RunConfigStub()
MakeModel = Callable[..., CausalLM]
