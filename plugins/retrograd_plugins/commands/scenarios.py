"""`retrograd scenarios generate`: scenarios written by a language model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from retrograd.cli.options import config_argument, set_option
from retrograd_hookspecs import (
    Component,
    ConfigError,
    DataError,
    NoConfig,
    Problem,
    RetrogradError,
    RolloutError,
    hookimpl,
)

if TYPE_CHECKING:
    from retrograd.agent.generate import Catalogue, Writer
    from retrograd.agent.stage import OpenTools
    from retrograd.assembly import Assembly
    from retrograd.chat_api import ChatClient
    from retrograd_hookspecs import EnvironmentProvider, Scenario
    from retrograd_plugins.algorithms.agent_grpo import AgenticGRPOConfig, ScenarioGenerationConfig

MOST_EMPTY_BATCHES = 2
"""Replies in a row without anything new that end the work."""


@click.group(name="scenarios", help="Scenarios of agentic runs.")
def scenarios() -> None:
    """Group of scenario commands."""


@scenarios.command(
    name="generate",
    help="Ask the model of [agent.scenario_generation] for scenarios, and write agent.scenarios with its"
    " manifest.",
)
@config_argument
@set_option
@click.option("--dry-run", is_flag=True, help="Print the first request; nothing is sent or written.")
@click.option("--force", is_flag=True, help="Replace a scenario file that exists.")
def generate(config: Path, overrides: tuple[str, ...], dry_run: bool, force: bool) -> int:
    """Exit code 1 if there are fewer scenarios than were asked for."""
    import anyio

    from retrograd.assembly import assemble
    from retrograd.cli.document import open_document

    from ._collecting import agent_config

    document = open_document(config, overrides=overrides)
    assembly = assemble(document, unread=("model.path", "agent.scenarios"))
    agent = agent_config(assembly, "scenarios generate")
    settings = _settings(assembly, agent)
    if not dry_run:
        _check_output(agent.scenarios, force)
    return anyio.run(_generate, assembly, agent, settings, dry_run)


def _settings(assembly: Assembly, agent: AgenticGRPOConfig) -> ScenarioGenerationConfig:
    if agent.scenario_generation is None:
        problem = Problem(
            where=assembly.document.where("agent"),
            key="agent.scenario_generation",
            message="scenarios generate needs this section",
            hint="model, base_url and api_key_env of an OpenAI-compatible endpoint",
        )
        raise ConfigError([problem])
    return agent.scenario_generation


def _check_output(path: Path, force: bool) -> None:
    from retrograd.files import output_problem

    problem = output_problem(path, "agent.scenarios", force=force)
    if problem is not None:
        raise ConfigError([problem])


async def _generate(
    assembly: Assembly, agent: AgenticGRPOConfig, settings: ScenarioGenerationConfig, dry_run: bool
) -> int:
    from retrograd.agent.generate import Writer
    from retrograd.assembly import build_context
    from retrograd_plugins.algorithms.agent_grpo import build_worlds

    provider, tools = build_worlds(agent, build_context(assembly))
    try:
        catalogue = await _catalogue(provider, tools)
        _check_size(assembly, settings, catalogue)
        writer = Writer(settings=settings, catalogue=catalogue, provider=provider)
        if dry_run:
            _show(writer, settings)
            return 0
        client = _client(assembly, settings)
        try:
            failure = await _fill(writer, client, settings)
        finally:
            await client.close()
        found, invalid = await _valid(provider, writer.scenarios)
    finally:
        try:
            if provider is not None:
                await provider.close()
        finally:
            if tools is not None:
                await tools.close()
    writer.refused += invalid
    return _finish(agent.scenarios, settings, writer, found, failure, client)


async def _catalogue(provider: EnvironmentProvider | None, tools: OpenTools | None) -> Catalogue:
    """The tools that scenarios can be about; servers are started and asked."""
    from retrograd.agent.generate import Catalogue

    toolsets = provider.catalogue() if provider is not None else {}
    if provider is not None and not toolsets:
        await provider.prepare([])
        toolsets = provider.catalogue()
    if tools is not None:
        for finding in await tools.open():
            if finding.level != "ok":
                click.echo(f"{finding.level}: {finding.check}: {finding.message}", err=True)
    return Catalogue(toolsets=toolsets, shared=tools.specs() if tools is not None else ())


def _check_size(assembly: Assembly, settings: ScenarioGenerationConfig, catalogue: Catalogue) -> None:
    size = len(catalogue.text().encode())
    if size > settings.max_catalog_bytes:
        key = "agent.scenario_generation.max_catalog_bytes"
        message = f"the tools take {size} bytes, more than {settings.max_catalog_bytes}"
        hint = "raise it, or expose fewer tools (denied_tools, another toolset)"
        raise ConfigError([Problem(where=assembly.document.where(key), key=key, message=message, hint=hint)])


def _show(writer: Writer, settings: ScenarioGenerationConfig) -> None:
    """The first request as it would be sent."""
    import json

    body: dict[str, Any] = {
        "model": settings.model,
        "messages": writer.messages(min(settings.batch_size, settings.count)),
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "scenarios", "strict": True, "schema": writer.schema()},
        },
    }
    if settings.seed is not None:
        body["seed"] = settings.seed
    click.echo(json.dumps(body, indent=2, ensure_ascii=False))
    requests = -(-settings.count // settings.batch_size)
    click.echo(f"{requests} requests to {settings.base_url} would be sent; none was", err=True)


def _client(assembly: Assembly, settings: ScenarioGenerationConfig) -> ChatClient:
    from retrograd.chat_api import ChatClient
    from retrograd.chat_endpoint import Endpoint, api_key

    name = "agent.scenario_generation"
    key = api_key(
        settings.base_url,
        settings.api_key_env,
        where=assembly.document.where(name),
        key=f"{name}.api_key_env",
    )
    return ChatClient(
        Endpoint(
            base_url=settings.base_url,
            model=settings.model,
            api_key=key,
            api_key_env=settings.api_key_env,
            timeout_secs=settings.timeout_secs,
            max_retries=settings.max_retries,
        )
    )


async def _fill(writer: Writer, client: ChatClient, settings: ScenarioGenerationConfig) -> str:
    """Ask until there are enough scenarios; why there are not, "" if there are."""
    from retrograd.chat_api import Form
    from retrograd.chat_replies import ChatError

    form = Form(name="scenarios", schema=writer.schema())
    fields = {"seed": settings.seed} if settings.seed is not None else {}
    empty = 0
    while len(writer.scenarios) < settings.count:
        most = min(settings.batch_size, settings.count - len(writer.scenarios))
        try:
            value = await client.ask(writer.messages(most), form, _reader(writer, most), **fields)
        except ChatError as error:
            return str(error)
        added = writer.take(value, most)
        empty = 0 if added else empty + 1
        click.echo(f"{len(writer.scenarios)} of {settings.count} scenarios", err=True)
        if empty == MOST_EMPTY_BATCHES:
            return f"{empty} replies in a row held nothing new"
    return ""


def _reader(writer: Writer, most: int) -> Callable[[str], Any]:
    """Reads a reply, and refuses one of which `writer.take` could use nothing."""
    from retrograd.chat_replies import read_reply

    def usable(value: Any) -> Any:
        attrs.evolve(writer, scenarios=list(writer.scenarios), refused=Counter()).take(value, most)
        return value

    return lambda text: read_reply(text, usable)


async def _valid(
    provider: EnvironmentProvider | None, written: list[Scenario]
) -> tuple[list[Scenario], Counter[str]]:
    """The scenarios that the environment takes, and why others are left out."""
    if provider is None or not written:
        return written, Counter()
    named = [attrs.evolve(scenario, origin=scenario.id) for scenario in written]
    try:
        await provider.prepare(named)
    except DataError as error:
        bad = {problem.where for problem in error.problems}
        for problem in error.problems:
            click.echo(f"left out: {problem}", err=True)
        kept = [scenario for scenario in written if scenario.id not in bad]
        return kept, Counter({"refused by the environment": len(written) - len(kept)})
    except RetrogradError as error:
        click.echo(f"warning: the environment could not check the scenarios: {error}", err=True)
    return written, Counter()


def _finish(
    path: Path,
    settings: ScenarioGenerationConfig,
    writer: Writer,
    found: list[Scenario],
    failure: str,
    client: ChatClient,
) -> int:
    from retrograd.agent.generate import manifest_path, write_generated

    if not found:
        why = failure or ", ".join(f"{count} {reason}" for reason, count in writer.refused.items())
        raise RolloutError(f"there is no scenario to write: {why}")
    if settings.shuffle:
        random.Random(settings.seed or 0).shuffle(found)
    write_generated(
        path,
        writer,
        found,
        model=settings.model,
        asked_for=settings.count,
        refused=dict(writer.refused),
    )
    levels = Counter(scenario.metadata["difficulty"] for scenario in found)
    shown = ", ".join(f"{count} of difficulty {level}" for level, count in sorted(levels.items()))
    click.echo(f"wrote {path}: {len(found)} scenarios ({shown}), and {manifest_path(path).name}")
    if writer.refused:
        click.echo("left out: " + ", ".join(f"{n} {why}" for why, n in writer.refused.most_common()))
    click.echo("spent: " + ", ".join(f"{name} {value:g}" for name, value in client.counts.items()))
    if len(found) < settings.count:
        why = f": {failure}" if failure else ""
        click.echo(f"error: {len(found)} of {settings.count} scenarios were written{why}", err=True)
        return 1
    return 0


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`scenarios`."""
    return [
        Component(
            name="scenarios",
            config=NoConfig,
            build=lambda config, context: scenarios,
            summary="Scenarios written by a language model.",
        )
    ]
