"""The memory a run will take, by part, and what to lower where it is too much."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import psutil

from .assembly import Assembly
from .engine import EngineSettings
from .engine.memory import estimate_memory
from .progress import size

PROGRAM_BYTES = 265_000_000
"""Python, NumPy, Numba and compiled kernels, as resident in a run on Linux."""
SMALLEST_SHOWN = 1e5
"""Parts below this many bytes are not listed."""


@attrs.frozen(kw_only=True)
class MemoryReport:
    """Bytes by part, the bytes that are free, and what lowering a key would save: (change, bytes)."""

    parts: Sequence[tuple[str, int]]
    free: int
    savings: Sequence[tuple[str, int]] = ()

    @property
    def total(self) -> int:
        return sum(count for _, count in self.parts)

    def lines(self) -> list[str]:
        """For the user: the estimate, and advice if it does not fit."""
        shown = ", ".join(f"{name} {size(count)}" for name, count in self.parts if count >= SMALLEST_SHOWN)
        lines = [f"memory: about {size(self.total)} ({shown}); {size(self.free)} free"]
        if self.total > self.free:
            best = "; ".join(f"{change} saves about {size(saved)}" for change, saved in self.savings)
            lines.append(f"warning: that is more than is free: {best or 'use a smaller model'}")
        return lines


def memory_report(assembly: Assembly) -> MemoryReport:
    """The estimate of a prepared run."""
    settings = assembly.services.get("engine").settings
    report = MemoryReport(parts=_parts(assembly, settings), free=int(psutil.virtual_memory().available))
    if report.total <= report.free:
        return report
    return attrs.evolve(report, savings=_savings(assembly, settings, report.total))


def _savings(assembly: Assembly, settings: EngineSettings, total: int) -> list[tuple[str, int]]:
    """What each key would save that lowers memory, the most first."""
    half = settings.micro_batch // 2
    changes = {}
    if half:
        changes[f"training.micro_batch = {half}"] = attrs.evolve(
            settings, micro_batch=half, gradient_accumulation=settings.gradient_accumulation * 2
        )
    if not settings.gradient_checkpointing:
        changes["training.gradient_checkpointing = true"] = attrs.evolve(
            settings, gradient_checkpointing=True
        )
    found = [
        (change, total - sum(count for _, count in _parts(assembly, changed)))
        for change, changed in changes.items()
    ]
    if _generates(assembly):
        policy = assembly.services.get("policy")
        found.append(
            (f"training.generation_concurrency = {max(policy.slots // 2, 1)}", policy.cache_bytes() // 2)
        )
    return sorted([(change, saved) for change, saved in found if saved > 0], key=lambda pair: -pair[1])


def _parts(assembly: Assembly, settings: EngineSettings) -> list[tuple[str, int]]:
    services = assembly.services
    parts = estimate_memory(
        services.get("model"),
        services.get("trainable"),
        settings,
        longest=services.get("algorithm").longest(),
        optimizer_bytes_per_parameter=services.get("optimizer").bytes_per_parameter(),
        families=_reads(assembly, "training.shared_prefix_fanout"),
    )
    if _generates(assembly):
        parts.append(("generation cache", services.get("policy").cache_bytes()))
    if assembly.config.reference is not None:
        reference = services.get("reference").model
        parts.append(("reference weights (mapped)", reference.weight_bytes()))
    return [*parts, ("program", PROGRAM_BYTES)]


def _generates(assembly: Assembly) -> bool:
    return _reads(assembly, "training.fast_sampling_context")


def _reads(assembly: Assembly, key: str) -> bool:
    return any(key in item.component.reads for item in assembly.chosen.values())
