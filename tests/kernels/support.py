"""Built backends and kernels for the tests of kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

from retrograd_hookspecs import BuildContext, KernelImpl, NoConfig
from retrograd_plugins.backends.cpu import CpuConfig
from retrograd_plugins.backends.cpu import build as build_cpu
from retrograd_plugins.backends.reference import build as build_reference

REFERENCE_GROUPS = (
    "matmul",
    "rms_norm",
    "rope",
    "attention",
    "gated_activation",
    "elementwise",
    "cross_entropy",
    "lora",
    "optimizers",
)
CPU_GROUPS = REFERENCE_GROUPS[1:]


def build_context(**services: Any) -> BuildContext:
    """A context of a run with default threads."""
    config: Any = SimpleNamespace(training=SimpleNamespace(threads=None))
    return BuildContext(config=config, base_dir=None, services=services)  # type: ignore[arg-type]


@cache
def backend(name: str) -> Any:
    """The backend `cpu` or `reference`."""
    if name == "cpu":
        return build_cpu(CpuConfig(), build_context())
    return build_reference(NoConfig(), build_context())


@cache
def kernels(name: str, group: str) -> tuple[KernelImpl, ...]:
    """Implementations of one component, `<name>.<group>`."""
    module = importlib.import_module(f"retrograd_plugins.kernels.{name}.{group}")
    (component,) = module.retrograd_kernels()
    assert component.name == f"{name}.{group}"
    assert component.needs == ("backend",)
    return tuple(component.build(component.config(), build_context(backend=backend(name))))


def all_kernels(name: str, groups: Iterable[str]) -> list[KernelImpl]:
    """Implementations of several components."""
    return [impl for group in groups for impl in kernels(name, group)]


def op(name: str, op_name: str) -> Any:
    """The function that serves an op that reads no weights."""
    groups = CPU_GROUPS if name == "cpu" else REFERENCE_GROUPS
    return next(impl.fn for impl in all_kernels(name, groups) if impl.op == op_name)
