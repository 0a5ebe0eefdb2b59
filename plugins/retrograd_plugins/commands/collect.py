"""`retrograd collect`: successful traces of scenarios as training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from retrograd.cli.options import config_argument, model_options, set_option
from retrograd_hookspecs import Component, ConfigError, NoConfig, Problem, RolloutError, hookimpl

if TYPE_CHECKING:
    from retrograd.agent.collect import Rules, ScenarioAttempts
    from retrograd.assembly import Assembly
    from retrograd.config import Document
    from retrograd_plugins.algorithms.agent_grpo import AgenticGRPOConfig

    from ._collecting import Collected, Source
    from ._traces import Trace

MIN_GAP = 0.5


@attrs.frozen(kw_only=True)
class Options:
    """The options that say what is written and where."""

    out: Path
    report: Path | None
    k: int
    keep: int
    min_reward: float | None
    verified: bool | None
    raw: bool
    limit: int | None
    seed: int | None
    force: bool
    api: bool
    pairs: bool
    min_gap: float


@click.command(
    name="collect",
    help="Roll the scenarios of CONFIG out and keep the successful traces as a dataset for sft; with --pairs"
    " the best against the worst of each scenario, as preference pairs.",
)
@config_argument
@click.option("--out", required=True, type=click.Path(path_type=Path), help="JSON Lines file to write.")
@click.option(
    "--k",
    type=click.IntRange(min=1, max=4096),
    default=8,
    show_default=True,
    help="Trajectories per scenario.",
)
@click.option("--keep", type=click.IntRange(min=1), help="Most traces per scenario.  [default: 1]")
@click.option(
    "--min-reward",
    type=float,
    help="Least reward of a kept trace (the judge's score, where it ranks).  [default: that of success:"
    " verify.reward_on_success, else 1]",
)
@click.option(
    "--require-verified/--allow-unverified",
    "verified",
    default=None,
    help="Keep only traces that earned the reward of success, refusing scenarios that nothing verifies; or"
    " keep whatever ended cleanly.  [default: verified where the scenario or its environment gives rewards]",
)
@click.option("--raw", is_flag=True, help="Write every turn raw, with its tokens.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N scenarios.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of all draws.  [default: agent.seed]")
@click.option(
    "--report", type=click.Path(path_type=Path), help="JSON file: pass rates, reasons of refusal, seeds."
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option("--api", is_flag=True, help="Generate with the model of [agent.collect_api].")
@click.option("--pairs", is_flag=True, help="Write preference pairs instead.")
@click.option(
    "--min-gap",
    type=click.FloatRange(min=0.0),
    help=f"Least difference of rewards in a pair.  [default: {MIN_GAP}]",
)
@click.option(
    "--adapter", type=click.Path(path_type=Path), help="LoRA GGUF to generate with; default that of [lora]."
)
@model_options
@set_option
def collect(
    config: Path,
    keep: int | None,
    min_gap: float | None,
    adapter: Path | None,
    model: str | None,
    device: str | None,
    overrides: tuple[str, ...],
    **given: Any,
) -> int:
    """Exit code 1 if nothing was kept, or the collection was interrupted or failed."""
    from retrograd.cli.document import open_document

    options = Options(keep=keep or 1, min_gap=MIN_GAP if min_gap is None else min_gap, **given)
    _check_usage(options, keep=keep, min_gap=min_gap, model=model, device=device, adapter=adapter)
    document = open_document(config, model=model, device=device, overrides=overrides)
    return run_collection(_document(document, options, adapter), options).conclude()


def _check_usage(options: Options, **given: Any) -> None:
    def refuse(message: str) -> None:
        raise click.UsageError(message)

    if options.pairs and given["keep"] is not None:
        refuse("--keep has no effect with --pairs, which writes one pair per scenario")
    if not options.pairs and given["min_gap"] is not None:
        refuse("--min-gap applies to --pairs")
    if options.pairs and options.k < 2:
        refuse("--pairs needs two trajectories per scenario: --k 2 or more")
    if options.api:
        if options.raw:
            refuse("--raw writes tokens, and the model behind --api gives none")
        for name in ("model", "device", "adapter"):
            if given[name] is not None:
                refuse(f"--{name} has no effect with --api")
    for name, value in (("--min-reward", options.min_reward), ("--min-gap", options.min_gap)):
        if value is not None and not abs(value) < float("inf"):
            refuse(f"{name} must be a finite number, got {value}")


def _document(document: Document, options: Options, adapter: Path | None) -> Document:
    from retrograd.answers import with_adapter

    if options.seed is not None:
        document = document.with_value("agent.seed", options.seed, where="--seed")
    if adapter is not None:
        document = with_adapter(document, adapter)
    return document


def _check_outputs(options: Options, scenarios: Path) -> None:
    from retrograd.files import output_problem

    problems: list[Problem] = []
    for name, path in (("--out", options.out), ("--report", options.report)):
        if path is None:
            continue
        problem = output_problem(path, name, force=options.force)
        if path.absolute() == scenarios.absolute():
            problem = Problem(where=name, message=f"{path} is agent.scenarios", hint="give another path")
        if problem is not None:
            problems.append(problem)
    if options.report is not None and options.report.absolute() == options.out.absolute():
        problems.append(Problem(where="--report", message="is the file of --out", hint="give another path"))
    if problems:
        raise ConfigError(problems)


@attrs.frozen(kw_only=True, eq=False)
class Collection:
    """What came out. `scenarios` were to be played; `collected` holds those that were played to the end;
    `spent` counts requests to an endpoint and its tokens."""

    options: Options
    scenarios: int
    collected: Collected
    written: Written
    spent: Mapping[str, float]

    def conclude(self) -> int:
        """Say it; the exit code."""
        if self.spent:
            counts = (f"{name} {value:g}" for name, value in self.spent.items())
            click.echo("spent: " + ", ".join(counts), err=True)
        return _conclude(self.collected, self.written, self.options, self.scenarios)


def run_collection(document: Document, options: Options) -> Collection:
    """Roll out, decide, write the output and the report.

    Raises: `ConfigError`, `DataError` before anything is played.
    """
    import sys

    from retrograd.assembly import assemble
    from retrograd.progress import terminal_reporter

    from ._collecting import agent_config, decide, roll_out, scenarios_of

    assembly = assemble(document, unread=("model.path",) if options.api else ())
    config = agent_config(assembly, "collect")
    _check_outputs(options, config.scenarios)
    reporter = terminal_reporter(sys.stderr, "collecting")
    assembly.services.provide("reporter", reporter)
    scenarios = scenarios_of(config, options.limit)
    rules = _rules(options)
    try:
        with _source(assembly, config, options, scenarios) as source:
            for finding in source.findings:
                if finding.level == "warning":
                    reporter.message(f"warning: {finding.check}: {finding.message}")
            interrupt = assembly.services.get("interrupt")
            collected = roll_out(source, scenarios, options.k, interrupt, reporter)
            decide(collected.groups, rules)
            written = _write(collected.groups, source, options)
            spent = dict(source.model.counts) if source.model is not None else {}
    finally:
        reporter.close()
    count = len(scenarios)
    _write_report(assembly, collected, written, options, rules, count)
    return Collection(options=options, scenarios=count, collected=collected, written=written, spent=spent)


def _rules(options: Options) -> Rules:
    from retrograd.agent.collect import Rules

    # A hosted model is graded by the environment only.
    unsaid = "always" if options.api else "where possible"
    verification = {None: unsaid, True: "always", False: "never"}[options.verified]
    return Rules(
        keep=options.keep,
        min_reward=options.min_reward,
        verification=verification,  # type: ignore[arg-type]
    )


def _source(assembly: Assembly, config: AgenticGRPOConfig, options: Options, scenarios: Sequence[Any]) -> Any:
    from ._collecting import api_source, local_source

    interrupt = assembly.services.get("interrupt")
    if options.api:
        return api_source(assembly, config, interrupt, scenarios, seeded=options.seed is not None)
    return local_source(assembly, config, interrupt, scenarios, options.k)


@attrs.define(eq=False, kw_only=True)
class Written:
    """Lines of the output, and what they hold. `scenarios` counts those with a line."""

    lines: list[str] = attrs.field(factory=list)
    scenarios: int = 0
    turns: int = 0
    raw_turns: int = 0
    without_pair: int = 0

    def add(self, record: dict[str, Any], *traces: Trace) -> None:
        from ._traces import line_of

        self.lines.append(line_of(record))
        self.turns += sum(trace.turns for trace in traces)
        self.raw_turns += sum(trace.raw_turns for trace in traces)


def _write(groups: Sequence[ScenarioAttempts], source: Source, options: Options) -> Written:
    """The lines of all scenarios, which the file is made of; no file if there is none."""
    from retrograd.files import replace_file

    from ._traces import TraceError, Tracer, structured_trace

    player = source.stage.player
    tracer = Tracer(player.encoder, player.chat_format, raw=options.raw)

    def trace(attempt: Any) -> Trace | None:
        trajectory = attempt.played.trajectory
        try:
            return tracer.trace(trajectory) if source.model is None else structured_trace(trajectory)
        except TraceError as error:
            attempt.left_out, attempt.detail = "not reproducible", str(error)
            return None

    written = Written()
    for group in groups:
        before = len(written.lines)
        (_add_pair if options.pairs else _add_traces)(group, trace, written, options)
        written.scenarios += len(written.lines) > before
    if written.lines:
        try:
            replace_file(options.out, "".join(written.lines))
        except OSError as error:
            raise RolloutError(f"{options.out} cannot be written: {error.strerror or error}") from error
    return written


def _add_traces(group: ScenarioAttempts, trace: Any, written: Written, options: Options) -> None:
    kept = 0
    for attempt in group.ranked():
        if kept == options.keep:
            attempt.left_out = "not among the best"
            continue
        found = trace(attempt)
        if found is not None:
            written.add(found.record, found)
            kept += 1


def _add_pair(group: ScenarioAttempts, trace: Any, written: Written, options: Options) -> None:
    """The best success that can be written against the worst attempt that can."""
    from ._traces import preference_record

    chosen = None
    for attempt in group.ranked():
        chosen = chosen or ((found := trace(attempt)) and (attempt, found))
        if chosen is None or chosen[0] is not attempt:
            attempt.left_out = attempt.left_out or "not among the best"
    if chosen is None:
        return
    best, good = chosen
    for attempt in group.worse_than(best, options.min_gap):
        bad = trace(attempt)
        if bad is not None:
            opening = len(best.played.trajectory.opening)
            written.add(preference_record(good, bad, opening), good, bad)
            return
    best.left_out = f"no attempt is worse by {options.min_gap:g}"
    written.without_pair += 1


def _write_report(
    assembly: Assembly,
    collected: Collected,
    written: Written,
    options: Options,
    rules: Rules,
    scenarios: int,
) -> None:
    import json

    from retrograd.agent.collect import totals
    from retrograd.files import replace_file

    if options.report is None:
        return
    config = assembly.one("algorithms").config
    api = config.collect_api if options.api else None
    lines = "pairs" if options.pairs else "traces"
    report = {
        "config": assembly.document.name,
        "model": api.model if api is not None else assembly.config.model.path,
        "out": str(options.out) if written.lines else None,
        "seed": config.seed,
        "k": options.k,
        "rules": attrs.asdict(rules),
        "complete": len(collected.groups) == scenarios,
        "totals": {
            **totals(collected.groups),
            lines: len(written.lines),
            "turns": written.turns,
            "raw_turns": written.raw_turns,
        },
        "scenarios": [group.report() for group in collected.groups],
    }
    try:
        replace_file(options.report, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise RolloutError(f"{options.report} cannot be written: {error.strerror or error}") from error


def _conclude(collected: Collected, written: Written, options: Options, scenarios: int) -> int:
    """Say what came out; the exit code."""
    from retrograd.agent.collect import totals

    found = totals(collected.groups)
    what = "pairs" if options.pairs else "traces"
    complete = len(collected.groups)
    if written.lines:
        click.echo(
            f"wrote {options.out}: {len(written.lines)} {what} of {written.scenarios} of {complete}"
            f" scenarios, {written.turns} assistant turns, {written.raw_turns} of them raw"
        )
    click.echo(f"passed: {found['passed']} of {found['attempts']} trajectories ({found['pass_rate']:.1%})")
    for title, name in (("refused", "refused"), ("left out", "left_out")):
        if found[name]:
            click.echo(f"{title}: " + ", ".join(f"{count} {why}" for why, count in found[name].items()))
    unsolved = [group.scenario.id for group in collected.groups if not group.passed]
    if unsolved and found["passed"]:
        more = f", … ({len(unsolved)})" if len(unsolved) > 10 else ""
        click.echo(f"no attempt solved: {', '.join(unsolved[:10])}{more}")
    if collected.interrupted or collected.failure is not None:
        click.echo(f"{complete} of {scenarios} scenarios were complete", err=True)
    if collected.failure is not None:
        raise collected.failure
    if not written.lines and not collected.interrupted:
        raise RolloutError(_nothing(collected.groups, options, what))
    return 1 if collected.interrupted else 0


def _nothing(groups: Sequence[ScenarioAttempts], options: Options, what: str) -> str:
    """Why there is no output."""
    members = [member for group in groups for member in group.members]
    details = [f"{m.refused or m.left_out}: {m.detail}" for m in members if m.detail]
    first = f"; for example {details[0]}" if details else ""
    best = max((m.score for m in members if m.score is not None), default=None)
    hint = ""
    if best is not None and not any(group.passed for group in groups) and options.min_reward is None:
        hint = f"; the best reward was {best:g}, and --min-reward sets what is enough"
    return f"no {what} to write, so {options.out} is left as it was{first}{hint}"


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`collect`."""
    return [
        Component(
            name="collect",
            config=NoConfig,
            build=lambda config, context: collect,
            summary="Successful traces of scenarios as training data.",
        )
    ]
