"""Starting a run: everything between a configuration and the first step."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from retrograd_hookspecs import (
    CheckpointError,
    ConfigError,
    LossBatch,
    LossResult,
    Schedule,
    TrainingError,
    UpdateRule,
)

from .assembly import Assembly, assemble
from .checkpoint import CheckpointStore, signature_differences
from .config import Document, table_name
from .config.resolved import write_resolved
from .config.rules import start_and_resume
from .engine import TrainingEngine, TrainingSequence, plan_epoch
from .memory_report import memory_report
from .metrics import JsonlMetrics, SinkSet
from .progress import Reporter
from .run import Run
from .run_lock import check_unused
from .update import Updater

_PROBE_TOKENS = 16
KERNELS_MESSAGE = "preparing kernels: compiled once for this processor (about a minute), then loaded …"
_NOT_SIGNED = frozenset(
    {"checkpoint", "metrics", "sink", "plugins", "observe", "output", "run.verbose", "model.path"}
)
"""Sections and keys that may differ when a run is resumed: they change no weight. The model is known by
its content, data by the algorithm's own hashes."""


def start_run(
    document: Document, reporter: Reporter, *, resume: str | None = None
) -> tuple[Run, Path | None]:
    """Assemble, load, audit; returns the run and the checkpoint to go on from, if any.

    `resume`: a `.state` directory, or "" for the newest of `[checkpoint].directory`.
    """
    if resume and document.table("checkpoint").given:
        document = document.with_value("checkpoint.resume_from", resume, where="--resume")
    assembly = assemble(document)
    start = assembly.config.shape.starts_from
    if resume is not None and start and document.get(start) is not None:
        raise ConfigError([start_and_resume(document, start, "--resume")])
    checkpoint = find_checkpoint(assembly, resume)
    run = make_run(assembly, reporter)
    if resume == "" and checkpoint is not None:
        checkpoint = newest_of_run(checkpoint, run.signature(), may_grow(assembly), reporter)
    return run, checkpoint


def make_run(assembly: Assembly, reporter: Reporter) -> Run:
    """The run of an assembly: loads the model, reads the data, prints what was found."""
    config, services = assembly.config, assembly.services
    services.provide("reporter", reporter)
    output = Path(config.output.path)
    check_unused(output, config.checkpoint.directory if config.checkpoint is not None else None)
    if output.exists():
        reporter.message(f"note: {output} exists and will be replaced at the end")
    write_resolved(output.with_suffix(".resolved.toml"), config, assembly.components(), assembly.versions())
    sinks: dict[str, Any] = {"metrics.jsonl": JsonlMetrics(output.with_suffix(".metrics.jsonl"))}
    for (kind, name), chosen in assembly.chosen.items():
        if kind == "sinks":
            sinks[name] = assembly.build(kind, chosen.component.name)
    trainable = services.get("trainable")

    def schedule(total_steps: int | None) -> Schedule:
        services.provide("total_steps", total_steps)
        built: Schedule = assembly.build("schedules", assembly.one("schedules").component.name)
        return built

    def update(schedule: Schedule) -> UpdateRule:
        return Updater(
            trainable=trainable,
            optimizer=services.get("optimizer"),
            schedule=schedule,
            kernels=services.get("kernels"),
            max_grad_norm=config.training.max_grad_norm,
        )

    run = Run(
        config=config,
        session=assembly.session,
        algorithm=services.get("algorithm"),
        trainable=trainable,
        schedule=schedule,
        update=update,
        optimizer=services.get("optimizer"),
        sinks=SinkSet(sinks, reporter.message),
        reporter=reporter,
        signature=signature(assembly),
        may_grow=may_grow(assembly),
        verify_output=lambda path: verify_output(assembly, path),
        observer=services.get("observer"),
        interrupt=services.get("interrupt"),
        settings=assembly.settings,
    )
    services.provide("run", run)
    reporter.message(f"{trainable.summary()}")
    if config.run.verbose:
        reporter.message(services.get("backend").device.description)
    try:
        findings = run.prepare()  # first: mistakes in data and rewards need no kernels to be found
        with slow_message(reporter, KERNELS_MESSAGE):
            warm_up(services.get("engine"))
    except BaseException:
        run.algorithm.close()  # a reward program runs already
        raise
    for finding in findings:
        if finding.level != "ok" or config.run.verbose:
            reporter.message(f"{finding.level}: {finding.check}: {finding.message}")
    for line in memory_report(assembly).lines():
        reporter.message(line)
    services.get("sampler")  # evaluations and callbacks may generate
    assembly.session.freeze()
    return run


def warm_up(engine: TrainingEngine) -> None:
    """Run every kernel once on three tokens, so that all are compiled; gradients are cleared."""
    tokens = np.zeros(3, np.int32)
    sequence = TrainingSequence(tokens=tokens, trained=np.array([False, True, True]))
    [step] = plan_epoch([sequence.predicts], [0], micro_batch=2, gradient_accumulation=1)
    engine.train_step(step, [sequence], _plain_loss, 2.0)
    engine.zero_grad()


def _plain_loss(batch: LossBatch) -> LossResult:
    return LossResult(
        value=-float(batch.logp.sum()) / batch.normalizer,
        dlogp=np.full_like(batch.logp, -1 / batch.normalizer),
    )


def open_run(document: Document, reporter: Reporter) -> tuple[Run, Assembly]:
    """A new run together with its parts."""
    assembly = assemble(document)
    return make_run(assembly, reporter), assembly


def find_checkpoint(assembly: Assembly, resume: str | None) -> Path | None:
    """The checkpoint that `--resume` or `checkpoint.resume_from` names."""
    settings = assembly.config.checkpoint
    if resume is None:
        return Path(settings.resume_from) if settings is not None and settings.resume_from else None
    if resume:
        path = Path(resume)
        if not path.is_dir():
            raise CheckpointError(f"--resume {path}: there is no such checkpoint directory")
        return path
    output = Path(assembly.config.output.path)
    directory = settings.directory if settings else output.with_name(output.stem + ".checkpoints")
    store = CheckpointStore(Path(directory))
    store.recover()  # a kill in the middle of replacing a checkpoint
    newest = store.newest()
    if newest is None:
        raise CheckpointError(f"--resume: {directory} holds no checkpoint; leave --resume out to start anew")
    return newest


def newest_of_run(
    newest: Path, signature: Mapping[str, Any], may_grow: Collection[str], reporter: Reporter
) -> Path:
    """The newest checkpoint that a run with this signature can go on from, or `newest` if there is none.

    An earlier run with other settings may have left checkpoints of higher steps in the directory.
    """
    store = CheckpointStore(newest.parent)
    for path in store.paths():
        try:
            fits = not signature_differences(store.signature(path), signature, may_grow=may_grow)
        except CheckpointError:
            fits = True  # damaged: the run says so rather than going on from an older one
        if fits:
            if path != newest:
                reporter.message(f"note: {newest} is newer, but was written by a run with other settings")
            return path
    return newest


def signature(assembly: Assembly) -> dict[str, Any]:
    """What must be equal for a checkpoint to continue this run."""
    services, trainable = assembly.services, assembly.one("trainables").component
    described = table_name("trainables", trainable)
    settings = {
        key: value
        for key, value in assembly.settings().items()
        if key.partition(".")[0] not in {*_NOT_SIGNED, described} and key not in _NOT_SIGNED
    }
    settings["model.device"] = services.get("backend").name
    return {
        "model": services.get("model_file").fingerprint(),
        "settings": settings,
        trainable.name: services.get("trainable").signature(),
    }


def may_grow(assembly: Assembly) -> frozenset[str]:
    """Fields of `signature` that say only when a run ends."""
    return frozenset(f"settings.{key}" for key in assembly.growing_keys())


def verify_output(assembly: Assembly, path: Path) -> str:
    """Read the written file back and compare its logits with the trainer's.

    The file holds exactly the weights that the forward pass used, so any difference is an error.
    """
    engine, trainable = assembly.services.get("engine"), assembly.services.get("trainable")
    vocabulary = assembly.services.get("architecture").vocabulary_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, _PROBE_TOKENS).astype(np.int32)
    before = np.array(engine.logits(tokens), copy=True)
    masters = [parameter.value.copy() for parameter in trainable.parameters]
    try:
        trainable.load(path)
        after = np.array(engine.logits(tokens), copy=True)
    finally:
        for parameter, master in zip(trainable.parameters, masters, strict=True):
            parameter.value[...] = master
        trainable.refresh()
    gap = float(np.abs(after - before).max())
    if not gap == 0.0:
        raise TrainingError(
            f"{path}: read back, the adapter gives logits that differ from the trainer's by {gap:.3g};"
            " the file is not what was trained"
        )
    return f"wrote {path}: read back, its logits equal the trainer's"


@contextmanager
def slow_message(reporter: Reporter, text: str, after: float = 1.5) -> Iterator[None]:
    """Say `text` if the block takes longer than `after` seconds, and how long it took in the end."""
    started = time.monotonic()
    timer = threading.Timer(after, reporter.message, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    elapsed = time.monotonic() - started
    if elapsed >= after:
        reporter.message(f"ready after {elapsed:.1f} s")
