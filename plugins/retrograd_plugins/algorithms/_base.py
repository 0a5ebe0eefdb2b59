"""What algorithms of rewards share: prompts, evaluation, the loop over updates and optimizer passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from retrograd_hookspecs import (
    AuditFinding,
    EvaluationReport,
    PolicyObjective,
    RolloutGroup,
    SamplingParams,
    StepReport,
    UpdateRule,
)

from ._parts import Collected, Parts
from ._prompts import Prompt, audit_prompts, digest, load_both, load_prompts, spread
from ._rollouts import (
    HELD_OUT_STREAMS,
    Answerer,
    Draw,
    evaluation_metrics,
    lost_rewards,
    reward_metrics,
    why_lost,
)

if TYPE_CHECKING:
    from retrograd.policy_update import EpochStats, PolicyBatch

WARN_TRUNCATED = 0.2
"""Share of answers cut at their budget above which the user is warned."""


class RolloutAlgorithm:
    """The loop over updates: collect rollouts, then some optimizer passes over them.

    A subclass collects and says its objective. An update is drawn from random streams that are a function of
    the number of draws made before it, so that a resumed run draws what it would have drawn.
    """

    answers_per_update: int
    """Answers drawn at once: sizes the generation cache."""

    def __init__(
        self,
        parts: Parts,
        *,
        prompts: Any,
        updates: int,
        epochs: int,
        params: SamplingParams,
        template_variables: Mapping[str, Any],
        judged: bool = False,
    ) -> None:
        self.parts = parts
        self.answerer = Answerer(
            parts.policy, parts.tokenizer, params, parts.reward, parts.interrupt, judged=judged
        )
        self.prompts: list[Prompt] = []
        self.update_number = 0
        """Updates that ended."""
        self.draws = 0
        """Prompts drawn so far."""
        self.stalled_in_a_row = 0
        self._path = prompts
        self._updates = updates
        self._epochs = epochs
        self._params = params
        self._variables = template_variables
        self._judged = judged
        self._held_out: list[Prompt] = []
        self._step = 0
        self._batch: PolicyBatch | None = None
        self._groups: Sequence[RolloutGroup] = ()
        self._collected: Mapping[str, float] = {}
        """What is known of the update's rollouts before training."""
        self._warned: set[str] = set()
        self._digests = ("", "")

    # What a subclass does

    def collect(self) -> Collected:
        """The rollouts of update `update_number`, scored, with advantages."""
        raise NotImplementedError

    def objective(self) -> PolicyObjective:
        """Clip range and KL coefficient of the current update."""
        raise NotImplementedError

    def update_ended(self, metrics: Mapping[str, float]) -> None:
        """An update's last optimizer pass ended with these metrics."""

    def stop_reason(self) -> str:
        """Why the run should end after an update that could not train; "" to go on."""
        return ""

    # The Algorithm protocol

    def prepare(self) -> Sequence[AuditFinding]:
        """Read and tokenise all prompts. Raises `DataError` with every bad line of both files."""
        from retrograd.audit import audit_template
        from retrograd.conversation import ConversationEncoder

        parts = self.parts
        encoder = ConversationEncoder(parts.tokenizer, parts.template, parts.chat_format, self._variables)

        def load(path: Any) -> list[Prompt]:
            return load_prompts(
                path,
                encoder,
                parts.chat_format,
                ctx=parts.training.ctx,
                max_new_tokens=self._params.max_new_tokens,
            )

        held_out = parts.evaluation.data if parts.evaluation is not None else None
        self.prompts, self._held_out = load_both(self._path, held_out, load)
        self._digests = (digest(self.prompts), digest(self._held_out))
        parts.policy.fit(max(self.answers_per_update, len(self._held_out)), self.longest())
        tools = any(prompt.tools for prompt in (*self.prompts, *self._held_out))
        findings = audit_template(encoder, parts.chat_format, tools=tools)
        note = getattr(parts.template, "fallback_note", str)()
        if note:
            findings.insert(0, AuditFinding(level="warning", check="chat template", message=note))
        longest = self.longest()
        findings += audit_prompts(
            self.prompts, self._held_out, judged=self._judged, longest=longest, ctx=parts.training.ctx
        )
        return findings

    def total_steps(self) -> int | None:
        """Optimizer steps if no update stalls."""
        return self._updates * self._epochs

    def longest(self) -> int:
        """The longest prompt with a whole answer."""
        return max(len(p.tokens) for p in (*self.prompts, *self._held_out)) + self._params.max_new_tokens

    def rehearse(self) -> None:
        """Draw the answers of an update and take a gradient of them; no reward is asked."""
        from retrograd.policy_update import PolicyBatch, train_epoch

        groups = self.answerer.draw(self.next_draws(advance=False))
        for group in groups:
            for rollout in group.members:
                rollout.advantage = np.where(rollout.trained, 1.0, 0.0)
        batch = PolicyBatch.of([group.members for group in groups], normalizer=1.0)
        objective = attrs.evolve(self.objective(), kl_coefficient=0.0)
        train_epoch(self.parts.engine, batch, self.parts.loss, objective)
        self.parts.engine.zero_grad()
        self.parts.policy.weights_changed()

    def next_draws(self, *, advance: bool = True) -> list[Draw]:
        """What is drawn next."""
        raise NotImplementedError

    def show(self, count: int) -> Sequence[str]:
        """The first prompts as the model sees them."""
        return [
            f"{prompt.origin}: {len(prompt.tokens)} tokens of prompt\n"
            f"{self.parts.tokenizer.decode(list(prompt.tokens))}"
            for prompt in self.prompts[:count]
        ]

    def run(self, update: UpdateRule) -> Iterator[StepReport]:
        """One report an optimizer pass, and one for each update that cannot train."""
        while self.update_number < self._updates and not self.stop_reason():
            if self._batch is None:
                collected = self._collect()
                self._groups, self._collected = collected.groups, dict(collected.metrics)
                self._warn_of_truncation()
                self._warn_of_lost_rewards()
                self._batch = collected.batch
                if self._batch is None:
                    yield self._stalled(collected.stalled)
                    continue
                self.stalled_in_a_row = 0
            while self._batch is not None:
                yield self._pass(self._batch, update)

    def evaluate(self, limit: int | None = None, samples: int = 1) -> EvaluationReport | None:
        """Mean reward of `samples` answers to each held-out prompt, always from the same random streams."""
        settings = self.parts.evaluation
        if settings is None:
            return None
        limits = [n for n in (limit, settings.max_examples) if n is not None]
        chosen = spread(self._held_out, min(limits, default=None))
        draws = [
            Draw(id=f"eval.{i}", prompt=prompt, count=samples, stream=HELD_OUT_STREAMS + i * samples)
            for i, prompt in enumerate(chosen)
        ]
        self.parts.policy.weights_changed()
        try:
            groups = self.answerer.draw(draws, self._progress("evaluating"))
        finally:
            self.parts.policy.weights_changed()
        self.answerer.score(groups)
        self.parts.policy.take_stats()
        metrics = evaluation_metrics(groups, samples=samples)
        self.parts.observer.evaluation(self.update_number, metrics, groups)
        return EvaluationReport(metrics=metrics, score=metrics["eval/reward"], higher_is_better=True)

    def state(self) -> dict[str, Any]:
        """Counters, and within an update what is trained and what is recorded at its end."""
        from retrograd.rollout_state import pack_rollouts

        within: dict[str, Any] = {}
        if self._batch is not None:
            recorded = self._groups if self.parts.observer.wants(self.update_number + 1) else ()
            within = {f"batch.{name}": value for name, value in self._batch.state().items()}
            within["rollouts"] = pack_rollouts(recorded, self._collected)
        return {
            "update": self.update_number,
            "step": self._step,
            "draws": self.draws,
            "stalled": self.stalled_in_a_row,
            **within,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`."""
        from retrograd.policy_update import PolicyBatch
        from retrograd.rollout_state import unpack_rollouts

        self.update_number, self._step = int(state["update"]), int(state["step"])
        self.draws, self.stalled_in_a_row = int(state["draws"]), int(state["stalled"])
        batch = {k.removeprefix("batch."): v for k, v in state.items() if k.startswith("batch.")}
        self._batch, self._groups, self._collected = None, (), {}
        if batch:
            self._batch = PolicyBatch.load(batch)
            self._groups, self._collected = unpack_rollouts(state["rollouts"])

    def signature(self) -> dict[str, Any]:
        """Hashes of the prompts as they are tokenised, and of what rewards see of them."""
        return {"prompts": self._digests[0], "held-out prompts": self._digests[1]}

    def close(self) -> None:
        """End the reward."""
        self.parts.reward.close()

    # Inside an update

    def _collect(self) -> Collected:
        """Rollouts of the next update. If that fails or is given up, the state is the one before it, so that
        a resumed run draws them again."""
        self.parts.policy.weights_changed()
        before = self.state()
        try:
            return self.collect()
        except BaseException:
            self.load(before)
            raise

    def _pass(self, batch: PolicyBatch, update: UpdateRule) -> StepReport:
        from retrograd.policy_update import train_epoch

        started = time.perf_counter()
        stats = train_epoch(self.parts.engine, batch, self.parts.loss, self.objective())
        computed = time.perf_counter()
        updated = update(self._step + 1)
        finished = time.perf_counter()
        self.parts.policy.weights_changed()
        self._step += 1
        last = batch.epochs >= self._epochs
        metrics = {
            **(self._collected if batch.epochs == 1 else {}),
            **self._trained_metrics(stats, batch),
            "train/epoch": float(batch.epochs),
            "train/update": float(self.update_number + 1),
            "optimizer/lr": updated.lr,
            "optimizer/grad_norm": updated.grad_norm,
            "optimizer/clipped": float(updated.clipped),
            "timing/training_seconds": computed - started,
            "timing/update_seconds": finished - computed,
            "timing/step_seconds": finished - started,
        }
        if last:
            self.update_number += 1
            self.update_ended(metrics)
            self.parts.observer.update(self.update_number, self._groups, {**self._collected, **metrics})
            self._batch, self._groups, self._collected = None, (), {}
        return StepReport(
            step=self._step,
            total_steps=self.total_steps(),
            metrics=metrics,
            tokens=stats.step.tokens,
            boundary=last,
            skipped=updated.skipped,
        )

    def _stalled(self, reason: str) -> StepReport:
        self.update_number += 1
        self.stalled_in_a_row += 1
        metrics = {**self._collected, "train/update": float(self.update_number), "batch/groups_trained": 0.0}
        self.parts.observer.update(self.update_number, self._groups, metrics)
        self._groups, self._collected = (), {}
        return StepReport(
            step=self._step,
            total_steps=self.total_steps(),
            metrics=metrics,
            boundary=True,
            stalled=f"update {self.update_number}: {reason}",
            stop=self.stop_reason(),
        )

    def _trained_metrics(self, stats: EpochStats, batch: PolicyBatch) -> dict[str, float]:
        from retrograd.policy_losses import policy_means

        metrics = {
            "train/loss": stats.step.loss,
            "batch/tokens": float(stats.step.tokens),
            "batch/trained_tokens": float(stats.step.trained_tokens),
            "batch/answers_trained": float(len(batch.sequences)),
            **policy_means(stats.step.metrics),
            **stats.packing.metrics(),
        }
        if stats.sampler_gap is not None and self._draws_from_the_policy():
            metrics["generation/logprob_gap_max"] = float(stats.sampler_gap.max())
            metrics["generation/logprob_gap_mean"] = float(stats.sampler_gap.mean())
        return metrics

    def _draws_from_the_policy(self) -> bool:
        """True if the log-probabilities that were noted when drawing are the policy's own."""
        neutral = self._params.temperature == 1.0 and self._params.top_p == 1.0
        return neutral or not self.parts.training.fast_sampling_context

    def collected_metrics(self, groups: Sequence[RolloutGroup], **more: float) -> dict[str, float]:
        """What is known of an update's rollouts before training; `more` are seconds by phase."""
        return {
            **reward_metrics(groups),
            **self.parts.policy.take_stats(),
            "batch/groups": float(len(groups)),
            **{f"timing/{name}_seconds": seconds for name, seconds in more.items()},
        }

    def progress(self) -> Callable[[int, int], None]:
        """Tells the person who waits how many answers of this update there are."""
        return self._progress(f"update {self.update_number + 1}")

    def _progress(self, what: str) -> Callable[[int, int], None]:
        def tell(done: int, count: int) -> None:
            self.parts.reporter.status(f"{what}: {done} of {count} answers")

        return tell

    def _warn_of_truncation(self) -> None:
        share = self._collected.get("completions/truncated_fraction", 0.0)
        if share > WARN_TRUNCATED:
            self._warn(
                "truncation",
                f"{share:.0%} of the answers were cut at max_new_tokens = {self._params.max_new_tokens};"
                " raise it, or teach the model to end its answers",
            )

    def _warn_of_lost_rewards(self) -> None:
        lost = lost_rewards(self._groups)
        if lost:
            answers = sum(len(group.members) for group in self._groups)
            self._warn(
                "rewards",
                f"{len(lost)} of {answers} answers have no reward and are left out; first: {lost[0].id}:"
                f" {why_lost(lost[0])}",
            )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self.parts.reporter.message(f"warning: {text} (said once)")
