"""What `retrograd check` finds: the audit, an estimate of memory, the time of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

import attrs

from retrograd_hookspecs import Algorithm, AuditFinding

from .assembly import Assembly, assemble
from .config import Document
from .memory_report import MemoryReport, memory_report
from .observe import NullObserver
from .progress import Reporter, duration
from .session import KERNELS_MESSAGE, slow_message


@attrs.frozen(kw_only=True)
class Preview:
    """Everything that is known before the first step."""

    plugins: int
    summary: str
    findings: Sequence[AuditFinding]
    memory: MemoryReport
    total_steps: int | None
    step_seconds: float | None
    examples: Sequence[str]

    @property
    def failed(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)

    def lines(self) -> list[str]:
        """Text for the user."""
        lines = [f"configuration: no problems ({self.plugins} plugins)", self.summary]
        lines += [f"{f.level:<7} {f.check}: {f.message}" for f in self.findings]
        lines += list(self.examples)
        lines += self.memory.lines()
        if self.step_seconds is not None and self.total_steps:
            lines.append(
                f"time: about {self.step_seconds:.2f} s a step here,"
                f" {duration(self.step_seconds * self.total_steps)} for {self.total_steps} steps"
            )
        return lines


def preview(document: Document, reporter: Reporter, *, examples: int = 1) -> Preview:
    """Check a configuration to the end.

    Raises: `ConfigError`, `DataError` or `ModelError`, as `train` would.
    """
    assembly = assemble(document)
    services = assembly.services
    services.provide("reporter", reporter)
    services.provide("observer", NullObserver())
    algorithm = services.get("algorithm")
    with closing(algorithm):
        return _preview(assembly, algorithm, reporter, examples)


def _preview(assembly: Assembly, algorithm: Algorithm, reporter: Reporter, examples: int) -> Preview:
    services = assembly.services
    findings = algorithm.prepare()
    failed = any(finding.level == "error" for finding in findings)
    services.provide("total_steps", algorithm.total_steps())
    services.get("schedule")  # may refuse a run of so many steps
    seconds = None
    if not failed:
        with slow_message(reporter, KERNELS_MESSAGE):
            algorithm.rehearse()
        started = time.perf_counter()
        algorithm.rehearse()
        seconds = time.perf_counter() - started
    return Preview(
        plugins=len(assembly.session.loaded()),
        summary=services.get("trainable").summary(),
        findings=findings,
        memory=memory_report(assembly),
        total_steps=algorithm.total_steps(),
        step_seconds=seconds,
        examples=algorithm.show(examples),
    )
