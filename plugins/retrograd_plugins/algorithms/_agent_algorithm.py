"""The algorithm of agentic GRPO: an update from scenarios to advantages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from retrograd_hookspecs import (
    Answer,
    AuditFinding,
    EvaluationReport,
    Judge,
    PolicyObjective,
    Rollout,
    RolloutError,
    RolloutGroup,
    SamplingParams,
    Scenario,
    Score,
)

from ._agent_config import AgenticGRPOConfig
from ._base import WARN_TRUNCATED, RolloutAlgorithm
from ._parts import Collected, Parts
from ._prompts import PromptOrder, spread
from ._rollouts import HELD_OUT_STREAMS, evaluation_metrics

if TYPE_CHECKING:
    from retrograd.agent.play import Played
    from retrograd.agent.stage import Part, Stage
    from retrograd.reference import Reference


class NoReward:
    """Rewards come from environments and judges."""

    def score(self, answers: Sequence[Answer]) -> Sequence[Score]:
        raise RolloutError("agent_grpo has no reward program")

    def close(self) -> None:
        pass


class AgenticGrpo(RolloutAlgorithm):
    """The algorithm; scenarios are read by `prepare`."""

    def __init__(
        self,
        config: AgenticGRPOConfig,
        parts: Parts,
        *,
        stage: Stage,
        judge: Judge | None,
        reference: Reference | None,
    ) -> None:
        super().__init__(
            parts,
            prompts=config.scenarios,
            updates=config.updates,
            epochs=config.epochs_per_update,
            params=SamplingParams(max_new_tokens=config.max_new_tokens_per_turn, seed=config.seed),
            template_variables=config.template_variables,
            judged=judge is not None,
        )
        self.answers_per_update = config.scenarios_per_update * config.group_size
        self._config = config
        self._stage = stage
        self._judge = judge
        self._reference = reference
        self._scenarios: list[Scenario] = []
        self._held_out_scenarios: list[Scenario] = []
        self._longest = config.trajectory_tokens(parts.training.ctx)

    def prepare(self) -> Sequence[AuditFinding]:
        """Read the scenarios and validate worlds, tools and servers before the first rollout.

        Raises: `DataError` with every bad scenario; `ConfigError`, `RolloutError` for what cannot be reached.
        """
        from retrograd.agent.scenarios import digest, load_scenarios, require_tasks
        from retrograd.audit import audit_template

        parts = self.parts
        self._scenarios = load_scenarios(self._config.scenarios)
        if parts.evaluation is not None:
            self._held_out_scenarios = load_scenarios(parts.evaluation.data)
        self._digests = (digest(self._scenarios), digest(self._held_out_scenarios))
        parts.policy.fit(max(self.answers_per_update, len(self._held_out_scenarios)), self._longest)
        every = [*self._scenarios, *self._held_out_scenarios]
        findings = [*audit_template(self._stage.player.encoder, parts.chat_format)]
        note = getattr(parts.template, "fallback_note", str)()
        if note:
            findings.insert(0, AuditFinding(level="warning", check="chat template", message=note))
        findings += self._stage.open(every)
        findings += self._manifest()
        require_tasks(every, self._too_long)
        message = f"{len(self._scenarios)} scenarios"
        return [*findings, AuditFinding(level="ok", check="scenarios", message=message)]

    def _too_long(self, scenario: Scenario) -> Iterator[tuple[str, str, str]]:
        """A prompt without room for a turn, even without what its world adds to it."""
        from retrograd.agent.play import too_long

        prompt = self._stage.player.prompt_tokens(scenario)
        if prompt >= self._longest:
            yield "user", *too_long(prompt, self._longest)

    def _manifest(self) -> Sequence[AuditFinding]:
        """Are generated scenarios those of this run's tools?"""
        from retrograd.agent.generate import Catalogue, check_manifest

        config, provider = self._config, self._stage.provider
        return check_manifest(
            config.scenarios,
            self._scenarios,
            Catalogue(
                toolsets=provider.catalogue() if provider is not None else {},
                shared=self._stage.player.shared_tools.specs(),
            ),
            settings=config.scenario_generation,
            provider=provider,
        )

    def longest(self) -> int:
        """The budget of a trajectory."""
        return self._longest

    def show(self, count: int) -> Sequence[str]:
        """The first scenarios as the model would see them, without what their worlds add."""
        shown = []
        for scenario in self._scenarios[:count]:
            opening = self._stage.player.opening(scenario)
            shown.append(
                f"{scenario.origin}: {scenario.id}\n" + "\n".join(f"[{m.role}] {m.content}" for m in opening)
            )
        return shown

    def rehearse(self) -> None:
        """Play an update's trajectories and take a gradient of them; no judge is asked.

        Raises: `RolloutError` if a world cannot be set up.
        """
        from retrograd.policy_update import PolicyBatch, train_epoch

        groups, _, _ = self._played_groups(self._next_parts(advance=False))
        for group in groups:
            if group.dropped:
                raise RolloutError(f"{group.source}: {group.dropped}")
        for rollout in (rollout for group in groups for rollout in group.members):
            rollout.advantage = np.where(rollout.trained, 1.0, 0.0)
        members = [[r for r in group.members if r.trained.any()] for group in groups]
        batch = PolicyBatch.of([group for group in members if group], normalizer=1.0)
        if batch.sequences:
            objective = attrs.evolve(self.objective(), kl_coefficient=0.0)
            train_epoch(self.parts.engine, batch, self.parts.loss, objective)
        self.parts.engine.zero_grad()
        self.parts.policy.weights_changed()

    def collect(self) -> Collected:
        """Play groups; grade, judge, take advantages."""
        from retrograd.agent.stage import agent_metrics
        from retrograd.policy_update import PolicyBatch

        from ._agents import EQUAL, Losses, take_advantages, usable

        config = self._config
        self._stage.metrics()
        groups, played, wall = self._played_groups(self._next_parts())
        judged = self._score(groups)
        self.parts.rollouts_ready(groups)
        for group in groups:
            take_advantages(group, judged=group.id in judged, drop_degenerate=config.drop_degenerate_groups)
        losses = Losses.of(groups, config.truncation)
        metrics = self.collected_metrics(groups, **self._seconds)
        generation = metrics["timing/generation_seconds"]
        metrics |= agent_metrics(
            played,
            wall_seconds=wall,
            generation_seconds=generation,
            constrained=self._stage.player.constraints is not None,
        )
        metrics |= {**self._stage.metrics(), **self._judge_metrics(groups, judged)}
        metrics["agent/dropped_fraction"] = losses.fraction
        metrics["agent/unscored_fraction"] = losses.unscored / losses.total
        losses.check(config.max_dropped_fraction, groups, self.update_number + 1)
        self._warn_of_worlds(played)
        useful = [group for group in groups if not group.dropped]
        members = [[r for r in group.members if not r.excluded] for group in useful]
        metrics["batch/groups_trained"] = float(len(useful))
        left = sum(usable(group) for group in groups)
        if left < 2:
            why = "; ".join(sorted({group.dropped for group in groups if group.dropped})) or "no trajectories"
            if not config.skip_empty_updates:
                raise RolloutError(
                    f"update {self.update_number + 1} has {left} usable trajectories, and two are needed:"
                    f" {why}; skip_empty_updates = true would go on with the next one"
                )
            return Collected(groups=groups, metrics=metrics, batch=None, stalled=f"skipped: {why}")
        signal = any(np.any(r.advantage) for group in members for r in group)
        if not useful or not (signal or config.kl_coefficient):
            metrics["batch/groups_trained"] = 0.0
            return Collected(groups=groups, metrics=metrics, batch=None, stalled=EQUAL)
        count = sum(len(group) for group in members)
        divisor = self._stage.player.limits.token_budget
        batch = PolicyBatch.of(members, normalizer=float(count * divisor))
        if self._reference is not None:
            started = time.perf_counter()
            batch.add_reference(self._reference)
            metrics["timing/reference_seconds"] = time.perf_counter() - started
        self._stage.warm_up(self.answers_per_update)
        return Collected(groups=groups, metrics=metrics, batch=batch)

    def objective(self) -> PolicyObjective:
        """Clip range and KL coefficient."""
        config = self._config
        return PolicyObjective(
            clip_low=config.clip_range_low,
            clip_high=config.clip_range_high,
            level=config.importance_sampling_level,
            kl_coefficient=config.kl_coefficient,
        )

    def evaluate(self, limit: int | None = None, samples: int = 1) -> EvaluationReport | None:
        """Mean reward of the environment on held-out scenarios; no judge is asked.

        Trajectories that a limit of turns or tokens cut are graded as they stand: left out, they would raise
        the mean of a policy that does not come to an end.
        """
        from retrograd.agent.stage import agent_metrics

        settings = self.parts.evaluation
        if settings is None:
            return None
        limits = [n for n in (limit, settings.max_examples) if n is not None]
        chosen = spread(self._held_out_scenarios, min(limits, default=None))
        parts = [
            self._part(scenario, member, HELD_OUT_STREAMS + number * samples + member, grade_cut=True)
            for number, scenario in enumerate(chosen)
            for member in range(samples)
        ]
        self.parts.policy.weights_changed()
        try:
            groups, played, wall = self._played_groups(parts, "evaluating")
        finally:
            self.parts.policy.weights_changed()
        stats = self.parts.policy.take_stats()
        metrics = evaluation_metrics(groups, samples=samples)
        own = agent_metrics(played, wall_seconds=wall, generation_seconds=stats["timing/generation_seconds"])
        for name in ("turns_mean", "tool_calls_per_turn", "failed_fraction"):
            metrics[f"eval/{name}"] = own[f"agent/{name}"]
        self.parts.observer.evaluation(self.update_number, metrics, groups)
        return EvaluationReport(metrics=metrics, score=metrics["eval/reward"], higher_is_better=True)

    def signature(self) -> dict[str, Any]:
        """Scenarios, and what the model's tools are made of."""
        provider = self._stage.provider
        return {
            "scenarios": self._digests[0],
            "held-out scenarios": self._digests[1],
            "environment": dict(provider.signature()) if provider is not None else {},
            "shared tools": dict(self._stage.player.shared_tools.signature()),
        }

    def close(self) -> None:
        """End worlds, servers and the judge."""
        super().close()
        judge, self._judge = self._judge, None
        try:
            if judge is not None:
                self._stage.call(judge.close, checked=False)
        finally:
            self._stage.close()

    def _warn_of_truncation(self) -> None:
        share = self._collected.get("agent/truncated_fraction", 0.0)
        if share > WARN_TRUNCATED:
            cut = Counter(r.excluded.removeprefix("truncated: ") for r in self._rollouts("truncated"))
            limits = ", ".join(f"{count} by {name}" for name, count in cut.most_common())
            self._warn(
                "truncation",
                f"{share:.0%} of the trajectories were cut{f' ({limits})' if limits else ''}; raise the"
                ' limits, or keep such trajectories with truncation = "min_reward"',
            )

    def _warn_of_lost_rewards(self) -> None:
        lost = self._rollouts("unscored")
        if lost:
            total = sum(len(group.members) for group in self._groups)
            self._warn(
                "rewards",
                f"{len(lost)} of {total} trajectories have no reward and are left out; first: {lost[0].id}:"
                f" {lost[0].excluded}",
            )

    def _warn_of_worlds(self, played: Sequence[Played]) -> None:
        unclosed = [one.unclosed for one in played if one.unclosed]
        if unclosed:
            self._warn("worlds", f"{len(unclosed)} environments could not be closed; first: {unclosed[0]}")

    def _rollouts(self, excluded: str) -> list[Rollout]:
        return [r for group in self._groups for r in group.members if r.excluded.startswith(excluded)]

    _seconds: Mapping[str, float] = {}

    def _next_parts(self, *, advance: bool = True) -> list[Part]:
        config = self._config
        order = PromptOrder(count=len(self._scenarios), seed=config.seed, shuffled=False)
        numbers = range(self.draws, self.draws + config.scenarios_per_update)
        if advance:
            self.draws = numbers.stop
        return [
            self._part(self._scenarios[order.at(number)], member, number * config.group_size + member)
            for number in numbers
            for member in range(config.group_size)
        ]

    def _part(self, scenario: Scenario, member: int, stream: int, *, grade_cut: bool = False) -> Part:
        from retrograd.agent.stage import Part

        return Part(scenario=scenario, member=member, stream=stream, grade_cut=grade_cut)

    def _played_groups(
        self, parts: Sequence[Part], what: str = ""
    ) -> tuple[list[RolloutGroup], list[Any], float]:
        """Play parts, which stand in the order of their groups."""
        from ._agents import group_of

        label = what or f"update {self.update_number + 1}"

        def tell(done: int, count: int) -> None:
            self.parts.reporter.status(f"{label}: {done} of {count} trajectories")

        played, wall = self._stage.play(parts, tell)
        groups: list[RolloutGroup] = []
        first = 0
        while first < len(played):
            last = next((n for n in range(first + 1, len(parts)) if parts[n].member == 0), len(parts))
            scenario = parts[first].scenario
            id = f"{'eval' if what else self.update_number + 1}.{len(groups)}"
            groups.append(group_of(scenario, played[first:last], id))
            first = last
        return groups, played, wall

    def _score(self, groups: Sequence[RolloutGroup]) -> set[str]:
        """Give every trajectory its total; ids of the groups that the judge compared."""
        from ._agents import cut_members, graded, take_totals, take_verdicts
        from ._judging import FAILED

        started = time.perf_counter()
        to_judge = [
            group
            for group in groups
            if self._judge is not None
            and not group.dropped
            and not graded(group)
            and sum(not rollout.excluded for rollout in group.members) > 1
        ]
        if to_judge:
            self._stage.call(self._judge_all, to_judge)
        for group in groups:
            if group.dropped.startswith(FAILED) and self._config.judge_failure == "fail":
                hint = 'judge_failure = "drop_group" would leave the group out'
                raise RolloutError(f"{group.source}: {group.dropped}; {hint}")
            if group in to_judge:
                take_verdicts(group)
            else:
                take_totals(group)
            cut_members(group, self._config.truncation)
        self._seconds = {"judge": time.perf_counter() - started}
        return {group.id for group in to_judge}

    async def _judge_all(self, groups: Sequence[RolloutGroup]) -> None:
        from ._judging import judge_groups, trajectories_of

        assert self._judge is not None
        await judge_groups(self._judge, groups, trajectories_of)

    def _judge_metrics(self, groups: Sequence[RolloutGroup], judged: set[str]) -> dict[str, float]:
        if self._judge is None:
            return {}
        own: Mapping[str, float] = getattr(self._judge, "metrics", dict)()
        metrics = {f"judge/{name}": float(value) for name, value in own.items()}
        verdicts = [
            [
                r.judgement.value
                for r in group.members
                if r.judgement is not None and r.judgement.kind == "value"
            ]
            for group in groups
            if group.id in judged
        ]
        known = [values for values in verdicts if values]
        metrics["judge/failed_fraction"] = 1.0 - len(known) / len(verdicts) if verdicts else 0.0
        if known:
            metrics["judge/degenerate_group_fraction"] = sum(len(set(v)) == 1 for v in known) / len(known)
            metrics["judge/score_mean"] = float(np.mean(np.concatenate(known)))
        return metrics
