"""`retrograd judge eval`: a judge against groups with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrograd.cli.options import config_argument, set_option
from retrograd_hookspecs import Component, ConfigError, NoConfig, Problem, hookimpl

if TYPE_CHECKING:
    from retrograd.assembly import Assembly
    from retrograd_hookspecs import Judge
    from retrograd_plugins.judges._agreement import GroupReport


@click.group(name="judge", help="Measure a judge.")
def judge() -> None:
    """Group of judge commands."""


@judge.command(
    name="eval",
    help="Judge the groups of a fixtures file twice with CONFIG's judge: rank agreement with the labels, and"
    " of the two passes with each other. The verdict cache is not used.",
)
@config_argument
@set_option
@click.option(
    "--fixtures",
    required=True,
    type=click.Path(path_type=Path),
    help="JSON Lines: groups whose members have a label.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def evaluate(config: Path, overrides: tuple[str, ...], fixtures: Path, as_json: bool) -> int:
    """Exit code 1 if a group has no verdict."""
    import json

    import anyio

    from retrograd.assembly import assemble
    from retrograd.cli.document import open_document
    from retrograd_plugins.judges._agreement import overall
    from retrograd_plugins.judges._fixtures import read_fixtures

    assembly = assemble(open_document(config, overrides=overrides), unread=("model.path",))
    groups = read_fixtures(fixtures)
    reports, spent = anyio.run(_run, judge_of(assembly), groups)
    total = overall(reports)
    if as_json:
        found = {"groups": [report.as_dict() for report in reports], "overall": total, "spent": spent}
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        for line in _lines(reports, total, spent):
            click.echo(line)
    return 1 if total["failed"] else 0


def judge_of(assembly: Assembly) -> Judge:
    """The run's judge, without its cache. Raises `ConfigError` if the run has none."""
    import attrs

    from retrograd.assembly import build_component

    found = [chosen for (kind, _), chosen in assembly.chosen.items() if kind == "judges"]
    if len(found) != 1:
        raise ConfigError(
            [
                Problem(
                    where=assembly.document.where("run.algorithm"),
                    key="run.algorithm",
                    message=f"this run has {len(found) or 'no'} judges",
                    hint='a judge is chosen by a table such as [agent.judge] with type = "ruler"',
                )
            ]
        )
    [chosen] = found
    config = chosen.config
    if hasattr(config, "cache_path"):
        config = attrs.evolve(config, cache_path=None)
    built: Judge = build_component(assembly, chosen.registered, config)
    return built


async def _run(judge: Judge, groups: Sequence[Any]) -> tuple[list[GroupReport], dict[str, float]]:
    from retrograd_plugins.judges._agreement import evaluate as measure

    try:
        reports = await measure(judge, groups)
        return reports, dict(getattr(judge, "metrics", dict)())
    finally:
        await judge.close()


def _lines(
    reports: Sequence[GroupReport], total: Mapping[str, Any], spent: Mapping[str, float]
) -> Sequence[str]:
    width = max(len("group"), *(len(report.id) for report in reports))
    lines = [f"{'group':<{width}}  members  tau      rho      self tau  self rho  self difference"]
    for report in reports:
        row = f"{report.id:<{width}}  {report.members:<7}  "
        if report.error:
            lines.append(f"{row}no verdict: {report.error}")
            continue
        values = (report.labels.tau, report.labels.rho, report.itself.tau, report.itself.rho, report.shift)
        lines.append(f"{row}{_row(values)}".rstrip())
    names = ("kendall_tau", "spearman_rho", "self_kendall_tau", "self_spearman_rho", "self_mean_difference")
    lines.append(f"{'all':<{width}}  {'':<7}  {_row([total[name] for name in names])}".rstrip())
    lines.append(
        f"groups: {total['groups']}, without a verdict: {total['failed']},"
        f" scored all alike (-, not in the means): {total['without_order']}"
    )
    if spent:
        lines.append("spent: " + ", ".join(f"{name} {value:g}" for name, value in spent.items() if value))
    return lines


def _row(values: Sequence[float | None]) -> str:
    shown = ["-" if value is None else f"{round(value, 3) + 0.0:.3f}" for value in values]
    return "  ".join(f"{text:<{width}}" for text, width in zip(shown, (7, 7, 8, 8, 15), strict=True))


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`judge`."""
    return [
        Component(
            name="judge",
            config=NoConfig,
            build=lambda config, context: judge,
            summary="Measure a judge against labels.",
        )
    ]
