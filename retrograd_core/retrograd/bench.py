"""Evaluation without training: the base model and the adapter on the same held-out examples."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from retrograd_hookspecs import Algorithm, ConfigError, ModelError, Problem

from .answers import adapter_document
from .assembly import assemble
from .config import Document
from .nn.model import CausalLM
from .observe import NullObserver
from .progress import Reporter


def bench_config(
    document: Document,
    *,
    data: Path | None,
    adapter: Path | None,
    limit: int | None,
    reporter: Reporter,
    samples: int = 1,
) -> dict[str, dict[str, float]]:
    """Metrics by side, "base" and "adapter"; only "base" if there is no adapter.

    Raises: `ConfigError` if no held-out data is named, `DataError` for bad lines.
    """
    if data is not None:
        document = document.with_value("evaluation.data", str(data), where="--data")
    if not document.table("evaluation").given:
        where = document.where("evaluation")
        raise ConfigError(
            [Problem(where=where, key="evaluation.data", message="no held-out data", hint="use --data FILE")]
        )
    document, path = adapter_document(document, adapter)
    assembly = assemble(document)
    assembly.services.provide("reporter", reporter)
    assembly.services.provide("observer", NullObserver())
    algorithm, model = assembly.services.get("algorithm"), assembly.services.get("model")
    with closing(algorithm):
        return _evaluated(document, algorithm, model, path, limit, samples, reporter)


def _evaluated(
    document: Document,
    algorithm: Algorithm,
    model: CausalLM,
    path: Path | None,
    limit: int | None,
    samples: int,
    reporter: Reporter,
) -> dict[str, dict[str, float]]:
    for finding in algorithm.prepare():
        if finding.level in ("warning", "error"):
            reporter.message(f"{finding.level}: {finding.check}: {finding.message}")
    if path is None:
        reporter.message("there is no adapter yet: only the base model is evaluated")
    rows: dict[str, dict[str, float]] = {}
    sides = {"base": False, "adapter": True} if path is not None else {"base": False}
    for name, with_adapter in sides.items():
        reporter.message(f"evaluating {name} {path if with_adapter else document.get('model.path')} …")
        if with_adapter:
            report = algorithm.evaluate(limit, samples)
        else:
            with model.without_adapter():
                report = algorithm.evaluate(limit, samples)
        if report is None:
            raise ModelError("this algorithm has no evaluation")
        rows[name] = dict(report.metrics)
    return rows
