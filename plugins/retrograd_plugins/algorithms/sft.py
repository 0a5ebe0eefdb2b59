"""Supervised fine-tuning: cross-entropy on the tokens that the assistant should write.

L = −Σ_t w_t · log p(x_t | x_<t) / N, over the trained tokens of an optimizer step and their number N, so
that every trained token counts the same however a step is cut into passes. Conversations train the
assistant's turns and the stop token after each; plain text trains every token.

Minimal TOML::

    [run]
    algorithm = "sft"
    [model]
    path = "model.gguf"
    [output]
    path = "adapter.gguf"
    [lora]
    [sft]
    data = "train.jsonl"
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from retrograd_hookspecs import (
    Algorithm,
    AuditFinding,
    BuildContext,
    Component,
    ConfigTable,
    DataError,
    Dataset,
    EvaluationReport,
    Loss,
    Problem,
    StepReport,
    TokenExample,
    Tokenizer,
    UpdateRule,
    hookimpl,
    key,
)

if TYPE_CHECKING:
    from retrograd.engine import Step, StepStats, TrainingEngine, TrainingSequence

_FORMATS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl"}


@attrs.frozen(kw_only=True)
class SftConfig:
    """Supervised fine-tuning on conversations or plain text."""

    data: Path = key(doc="Training file.", input=True)
    data_format: str | None = key(
        None,
        doc="`jsonl` (chat JSONL), `text`, or the name of an installed dataset.",
        default_text="inferred: `.jsonl`, `.ndjson` and `.json` are jsonl, anything else text",
    )
    shuffle: bool = key(True, doc="Shuffle rows at each epoch, seeded from lora.seed.")
    template_variables: Mapping[str, Any] = key(
        factory=dict,
        doc="Variables for the chat template, e.g. `{ enable_thinking = false }`. Use those of the agentic"
        " run that a warm start precedes.",
    )
    loss: str = key("cross_entropy", doc="Loss over the trained tokens; its options are in `[loss.NAME]`.")

    def format_of(self, path: Path) -> str:
        """The data format of a file."""
        return self.data_format or _FORMATS.get(path.suffix.lower(), "text")


class Sft:
    """The algorithm; data is read by `prepare`."""

    def __init__(
        self,
        config: SftConfig,
        *,
        engine: TrainingEngine,
        loss: Loss,
        dataset: Dataset,
        tokenizer: Tokenizer,
        seed: int,
        training: Any,
        evaluation: Any,
    ) -> None:
        self._config = config
        self._engine = engine
        self._loss = loss
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._seed = seed
        self._training = training
        self._evaluation = evaluation
        self._examples: Sequence[TokenExample] = ()
        self._sequences: list[TrainingSequence] = []
        self._held_out: list[TrainingSequence] = []
        self._steps_before: list[int] = []
        """Optimizer steps before each epoch, and of the whole run."""
        self._digests = ["", ""]
        self._position = 0
        """Optimizer steps done."""

    def prepare(self) -> Sequence[AuditFinding]:
        """Read, tokenise and audit all data. Raises `DataError` with every bad line."""
        from retrograd.audit import audit_examples, overlap, within_context
        from retrograd.engine import TrainingSequence

        ctx = self._training.ctx
        examples, notes, held_out = self._load(ctx)
        findings = [*self._dataset.findings()]
        findings += [AuditFinding(level="note", check="data", message=note) for note in notes]
        findings += audit_examples(examples, self._tokenizer, ctx=ctx, chat=self._dataset.turns)
        findings.append(within_context(examples, self._engine.model.spec.context_length))
        self._examples = examples
        self._sequences = [TrainingSequence.of(example) for example in examples]
        if self._evaluation is not None:
            findings += _of_held_out(
                audit_examples(held_out, self._tokenizer, ctx=ctx, chat=self._dataset.turns)
            )
            findings.append(overlap(examples, held_out))
            self._held_out = [TrainingSequence.of(example) for example in held_out]
        self._steps_before = [0]
        for epoch in range(self._training.epochs):
            self._steps_before.append(self._steps_before[-1] + len(self._plan(epoch)))
        self._digests = [_digest(examples), _digest(held_out) if self._evaluation is not None else ""]
        return findings

    def _load(self, ctx: int) -> tuple[Sequence[TokenExample], Sequence[str], Sequence[TokenExample]]:
        """Training data, its notes, held-out data. Raises `DataError` with the bad lines of both files."""
        problems: list[Problem] = []

        def load(path: Path) -> Sequence[TokenExample]:
            try:
                return self._dataset.load(path, ctx=ctx)
            except DataError as error:
                problems.extend(error.problems)
                return ()

        examples = load(self._config.data)
        notes = self._dataset.notes()
        held_out = load(self._evaluation.data) if self._evaluation is not None else ()
        if problems:
            raise DataError(problems)
        return examples, notes, held_out

    def total_steps(self) -> int | None:
        """Known once the data is read."""
        return self._steps_before[-1]

    def run(self, update: UpdateRule) -> Iterator[StepReport]:
        """One report a step; a step that was reported is behind `state()`."""
        total = self._steps_before[-1]
        while self._position < total:
            epoch = next(e for e, first in enumerate(self._steps_before[1:]) if self._position < first)
            first = self._steps_before[epoch]
            steps = self._plan(epoch)
            for index in range(self._position - first, len(steps)):
                number = first + index + 1
                report = self._step(number, steps[index], epoch, (index + 1) / len(steps), update)
                self._position = number
                yield report

    def longest(self) -> int:
        """Of training and held-out data."""
        return max(len(s.tokens) for s in (*self._sequences, *self._held_out))

    def rehearse(self) -> None:
        """The gradient of the first step, discarded."""
        self._gradient(self._plan(0)[0])
        self._engine.zero_grad()

    def show(self, count: int) -> Sequence[str]:
        """The first examples with their trained tokens in brackets."""
        from retrograd.audit import describe_masks

        return [describe_masks(example, self._tokenizer) for example in self._examples[:count]]

    def evaluate(self, limit: int | None = None, samples: int = 1) -> EvaluationReport | None:
        """Mean negative log-likelihood of the held-out trained tokens, and its exponential."""
        if self._evaluation is None:
            return None
        loss, tokens = mean_loss(self._engine, self._held_out[:limit])
        return EvaluationReport(
            metrics={
                "eval/loss": loss,
                "eval/perplexity": _exp(loss),
                "eval/tokens": float(tokens),
            },
            score=loss,
            higher_is_better=False,
        )

    def state(self) -> dict[str, Any]:
        """The number of steps done: order and packing follow from it and the seed."""
        return {"position": self._position}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`."""
        self._position = int(state["position"])

    def close(self) -> None:
        """Nothing is open."""

    def signature(self) -> dict[str, Any]:
        """Hashes of the tokenised data, and the seed of its order."""
        return {"data": self._digests[0], "held-out data": self._digests[1], "shuffle seed": self._seed}

    def _plan(self, epoch: int) -> list[Step]:
        from retrograd.engine import plan_epoch, shuffled_order

        order = shuffled_order(
            len(self._sequences), seed=self._seed, epoch=epoch, shuffle=self._config.shuffle
        )
        return plan_epoch(
            [sequence.predicts for sequence in self._sequences],
            order,
            micro_batch=self._training.micro_batch,
            gradient_accumulation=self._training.gradient_accumulation,
        )

    def _gradient(self, step: Step) -> StepStats:
        trained = sum(
            int(self._sequences[p.sequence].predicts[p.start : p.stop].sum()) for p in step.pieces()
        )
        return self._engine.train_step(step, self._sequences, self._loss, float(trained))

    def _step(self, number: int, step: Step, epoch: int, part: float, update: UpdateRule) -> StepReport:
        started = time.perf_counter()
        stats = self._gradient(step)
        computed = time.perf_counter()
        updated = update(number)
        finished = time.perf_counter()
        metrics = {
            "train/loss": stats.loss,
            "train/perplexity": _exp(stats.loss),
            "train/epoch": epoch + part,
            "batch/tokens": float(stats.tokens),
            "batch/trained_tokens": float(stats.trained_tokens),
            "packing/efficiency": stats.tokens / (len(step.passes) * self._training.micro_batch),
            "optimizer/lr": updated.lr,
            "optimizer/grad_norm": updated.grad_norm,
            "optimizer/clipped": float(updated.clipped),
            "timing/gradient_seconds": computed - started,
            "timing/update_seconds": finished - computed,
            "timing/step_seconds": finished - started,
            **{f"train/{name}": value for name, value in stats.metrics.items()},
        }
        return StepReport(
            step=number,
            total_steps=self._steps_before[-1],
            metrics=metrics,
            tokens=stats.tokens,
            boundary=part == 1.0,
            skipped=updated.skipped,
        )


def mean_loss(engine: TrainingEngine, sequences: Sequence[TrainingSequence]) -> tuple[float, int]:
    """Mean −log p of all trained tokens (float64 sums), and their number."""
    import numpy as np

    total, count = 0.0, 0
    for logp in engine.log_probabilities(sequences):
        total -= float(np.sum(logp, dtype=np.float64))
        count += int(logp.size)
    return total / max(count, 1), count


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _digest(examples: Sequence[TokenExample]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example.tokens).to_bytes(8, "little"))
        digest.update(example.tokens.tobytes())
        digest.update(example.trained.tobytes())
    return digest.hexdigest()


def _of_held_out(findings: Sequence[AuditFinding]) -> list[AuditFinding]:
    return [attrs.evolve(finding, check=f"held-out {finding.check}") for finding in findings]


def _build(config: SftConfig, context: BuildContext) -> Algorithm:
    run = context.config
    keys = {"template_variables": config.template_variables} if config.template_variables else {}
    return Sft(
        config,
        engine=context.service("engine"),
        loss=context.build("losses", config.loss),
        dataset=context.build("datasets", config.format_of(config.data), **keys),
        tokenizer=context.service("tokenizer"),
        seed=context.service("seed"),
        training=run.training,
        evaluation=run.evaluation,
    )


def _check(config: SftConfig, table: ConfigTable, run: Any) -> list[Problem]:
    """Template variables need data that goes through the template."""
    if config.template_variables and config.format_of(config.data) == "text":
        return [
            Problem(
                where=table.where("template_variables"),
                key="sft.template_variables",
                message="plain text goes through no chat template",
                hint='remove it, or set data_format = "jsonl"',
            )
        ]
    return []


@hookimpl
def retrograd_algorithms() -> list[Component[SftConfig, Algorithm]]:
    """`sft`."""
    return [
        Component(
            name="sft",
            config=SftConfig,
            build=_build,
            summary="Supervised fine-tuning on conversations or plain text.",
            needs=("engine", "tokenizer", "seed"),
            selects={"loss": "losses", "data_format": "datasets"},
            check=_check,
            applies=("evaluation",),
            reads=(
                "training.epochs",
                "training.kv_dtype",
                "training.chunked_cross_entropy",
                "training.chunked_ce_tiles",
                "training.chunked_ce_seq_chunk",
            ),
        )
    ]
