"""Rolling scenarios out for `retrograd collect`: by the model of the run, or by one behind an endpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from retrograd.agent.collect import Attempt, Rules, ScenarioAttempts
from retrograd.agent.collect_api import CONCURRENCY, MAX_RETRIES, ApiModel, api_player
from retrograd.agent.scenarios import load_scenarios
from retrograd.agent.stage import Part, Stage
from retrograd.assembly import Assembly, build_context
from retrograd.chat_endpoint import Endpoint, api_key
from retrograd.interrupts import Interrupt, StopRequestedError, catch_interrupts
from retrograd.progress import Reporter, duration
from retrograd_hookspecs import (
    AuditFinding,
    ConfigError,
    DataError,
    Judge,
    Problem,
    RetrogradError,
    Scenario,
)
from retrograd_plugins.algorithms._agents import group_of
from retrograd_plugins.algorithms._judging import FAILED, judge_groups, trajectories_of
from retrograd_plugins.algorithms.agent_grpo import (
    STAGE_NEEDS,
    AgenticGRPOConfig,
    CollectApiConfig,
    build_stage,
    build_worlds,
    limits_of,
)

if TYPE_CHECKING:
    from retrograd.agent.play import Played
    from retrograd.config import Document


@attrs.frozen(kw_only=True, eq=False)
class Source:
    """What scenarios are played with. `model` is that of an endpoint, None for the run's own; `at_once` are
    trajectories in play, None for what policy and environment take."""

    stage: Stage
    judge: Judge | None
    model: ApiModel | None
    at_once: int | None
    findings: Sequence[AuditFinding]


@attrs.define(eq=False, kw_only=True)
class Collected:
    """Scenarios whose attempts all ended. `interrupted` and `failure` say why there are not more of them."""

    groups: list[ScenarioAttempts]
    interrupted: bool = False
    failure: RetrogradError | None = None


def agent_config(assembly: Assembly, command: str) -> AgenticGRPOConfig:
    """The `[agent]` section. Raises: `ConfigError` for a run of another algorithm."""
    config = assembly.one("algorithms").config
    if not isinstance(config, AgenticGRPOConfig):
        name = assembly.config.run.algorithm
        problem = Problem(
            where=assembly.document.where("run.algorithm"),
            key="run.algorithm",
            message=f"{command} needs the scenarios of an agentic run, this one is {name!r}",
            hint='algorithm = "agent_grpo" with an [agent] section',
        )
        raise ConfigError([problem])
    return config


def scenarios_of(config: AgenticGRPOConfig, limit: int | None) -> list[Scenario]:
    """The first `limit` scenarios of the run. Raises: `DataError` with every bad line of the file."""
    return load_scenarios(config.scenarios)[:limit]


@contextlib.contextmanager
def local_source(
    assembly: Assembly, config: AgenticGRPOConfig, interrupt: Interrupt, scenarios: Sequence[Scenario], k: int
) -> Iterator[Source]:
    """The run's own model, with its judge. Worlds and servers are closed at the end."""
    from retrograd.audit import audit_template

    stage = build_stage(config, build_context(assembly, STAGE_NEEDS), check=interrupt.check)
    policy = assembly.services.get("policy")
    policy.fit(len(scenarios) * k, config.trajectory_tokens(assembly.config.training.ctx))
    judge = assembly.build("judges", config.judge.type) if config.judge is not None else None
    try:
        findings = [*audit_template(stage.player.encoder, stage.player.chat_format)]
        findings += stage.open(scenarios)
        _refuse(findings)
        yield Source(stage=stage, judge=judge, model=None, at_once=None, findings=findings)
    finally:
        try:
            if judge is not None:
                stage.call(judge.close, checked=False)
        finally:
            stage.close()


@contextlib.contextmanager
def api_source(
    assembly: Assembly,
    config: AgenticGRPOConfig,
    interrupt: Interrupt,
    scenarios: Sequence[Scenario],
    *,
    seeded: bool,
) -> Iterator[Source]:
    """The model of `[agent.collect_api]`. Raises: `ConfigError` if there is none, or nothing grades it."""
    settings = api_settings(assembly.document, config)
    where = assembly.document.where("agent.collect_api")
    endpoint = Endpoint(
        base_url=settings.base_url,
        model=settings.model,
        api_key=api_key(
            settings.base_url, settings.api_key_env, where=where, key="agent.collect_api.api_key_env"
        ),
        api_key_env=settings.api_key_env,
        temperature=settings.temperature,
        timeout_secs=settings.timeout_secs,
        max_retries=MAX_RETRIES,
        max_concurrency=CONCURRENCY,
    )
    model = ApiModel(endpoint, where=where)
    player = api_player(
        model,
        limits=limits_of(config, assembly.config.training.ctx),
        seed=config.seed,
        seeded=seeded,
        system_suffix=config.system_suffix,
    )
    provider, tools = build_worlds(config, build_context(assembly))
    stage = Stage(player=player, policy=None, provider=provider, tools=tools, check=interrupt.check)
    try:
        findings = stage.open(scenarios)
        _refuse(findings)
        places: int | None = getattr(provider, "places", None)
        at_once = min(CONCURRENCY, places or CONCURRENCY)
        yield Source(stage=stage, judge=None, model=model, at_once=at_once, findings=findings)
    finally:
        try:
            stage.call(model.close, checked=False)
        finally:
            stage.close()


def api_settings(document: Document, config: AgenticGRPOConfig) -> CollectApiConfig:
    """The section for `--api`. Raises: `ConfigError` if there is none, or no environment to grade by."""
    problems: list[Problem] = []
    if config.environment is None:
        problems.append(
            Problem(
                where=document.where("agent"),
                key="agent.environment",
                message="--api needs an environment that gives rewards: a judge ranks trajectories of the"
                " model that is trained, and a hosted model does not produce those",
                hint="add [agent.environment], or collect with a local model (--model teacher.gguf)",
            )
        )
    if config.collect_api is None:
        problems.append(
            Problem(
                where=document.where("agent"),
                key="agent.collect_api",
                message="--api needs this section",
                hint="base_url, model and api_key_env of an OpenAI-compatible endpoint",
            )
        )
    if problems:
        raise ConfigError(problems)
    assert config.collect_api is not None
    return config.collect_api


def roll_out(
    source: Source,
    scenarios: Sequence[Scenario],
    k: int,
    interrupt: Interrupt,
    reporter: Reporter,
) -> Collected:
    """Play every scenario `k` times and let the judge compare what no environment grades.

    Asked to stop, or where the endpoint refuses everything, what is complete is returned.
    """
    parts = [
        Part(scenario=scenario, member=member, stream=number * k + member)
        for number, scenario in enumerate(scenarios)
        for member in range(k)
    ]
    ended: dict[int, Played] = {}
    collected = Collected(groups=[])

    def announce(text: str) -> None:
        reporter.message("stopping: what is complete will be written; once more stops at once and loses it")

    with catch_interrupts(interrupt, announce):
        try:
            source.stage.play(
                parts,
                _progress(reporter, "trajectories"),
                at_once=source.at_once,
                on_played=ended.__setitem__,
            )
        except StopRequestedError:
            collected.interrupted = True
        except BaseException as error:
            if not isinstance(error, RetrogradError) or not ended:
                raise
            collected.failure = error
        for number, scenario in enumerate(scenarios):
            numbers = range(number * k, number * k + k)
            if all(index in ended for index in numbers):
                members = [Attempt(number=i % k, stream=parts[i].stream, played=ended[i]) for i in numbers]
                collected.groups.append(ScenarioAttempts.of(scenario, members))
        _judge(source, collected.groups, reporter)
    return collected


def decide(groups: Sequence[ScenarioAttempts], rules: Rules) -> None:
    """Refuse what the rules do not let pass."""
    for group in groups:
        group.decide(rules)


def _judge(source: Source, groups: Sequence[ScenarioAttempts], reporter: Reporter) -> None:
    """Scores of the judge for clean attempts at scenarios that the environment does not grade."""
    judge = source.judge
    waiting = [group for group in groups if not group.rewarded and len(group.passed) > 1]
    if judge is None or not waiting:
        return
    reporter.status(f"judging {len(waiting)} scenarios")
    judged = [
        group_of(group.scenario, [member.played for member in group.passed], f"collect.{group.scenario.id}")
        for group in waiting
    ]
    # A stop was answered already: what is complete is judged too.
    source.stage.call(judge_groups, judge, judged, trajectories_of, checked=False)
    for group, found in zip(waiting, judged, strict=True):
        for member, rollout in zip(group.passed, found.members, strict=True):
            if found.dropped.startswith(FAILED):
                member.refuse(FAILED, found.dropped.removeprefix(f"{FAILED}: "))
            elif rollout.judgement is not None:
                member.score = rollout.judgement.value


def _progress(reporter: Reporter, what: str) -> Callable[[int, int], None]:
    started = time.monotonic()

    def tell(done: int, count: int) -> None:
        left = (time.monotonic() - started) / done * (count - done)
        reporter.status(f"{done} of {count} {what}, {duration(left)} left")

    return tell


def _refuse(findings: Sequence[AuditFinding]) -> None:
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise DataError(Problem(where=finding.check, message=finding.message) for finding in errors)
