"""`retrograd tools list`: what the model of an agentic run can call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrograd.cli.options import config_argument, set_option
from retrograd_hookspecs import Component, ConfigError, NoConfig, Problem, hookimpl

if TYPE_CHECKING:
    from retrograd.agent.mcp import McpTools
    from retrograd.assembly import Assembly, Chosen
    from retrograd_hookspecs import AuditFinding, EnvironmentProvider, ToolSpec

_SHOWN_CHARACTERS = 76


@click.group(name="tools", help="Tools of agentic runs.")
def tools() -> None:
    """Group of tool commands."""


@tools.command(
    name="list",
    help="List the tools that CONFIG exposes, by toolset and MCP server. No model is loaded.",
)
@config_argument
@set_option
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output, with all schemas.")
@click.option(
    "--no-connect",
    is_flag=True,
    help="Start no MCP server and ask no environment server; theirs are left out.",
)
def list_tools(config: Path, overrides: tuple[str, ...], as_json: bool, no_connect: bool) -> int:
    """Exit code 0, or 1 if a server cannot be reached."""
    import json

    import anyio

    from retrograd.assembly import assemble
    from retrograd.cli.document import open_document

    assembly = assemble(open_document(config, overrides=overrides))
    found = anyio.run(_collect, assembly, not no_connect)
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        for line in _lines(found):
            click.echo(line)
    return 0


async def _collect(assembly: Assembly, connect: bool) -> dict[str, Any]:
    from retrograd.agent.mcp import mcp_tools
    from retrograd.agent.world import clashes

    agent = assembly.one("algorithms").config
    if not hasattr(agent, "mcp_servers"):
        raise ConfigError(
            [
                Problem(
                    where=assembly.document.where("run.algorithm"),
                    key="run.algorithm",
                    message="this run calls no tools",
                    hint='tools belong to algorithm = "agent_grpo"',
                )
            ]
        )
    found: dict[str, Any] = {"toolsets": {}, "mcp_servers": {}, "not_connected": [], "notes": []}
    shared = mcp_tools(agent.mcp_servers, agent.mcp_config, assembly.config.base_dir)
    environments = [item for (kind, _), item in assembly.chosen.items() if kind == "environments"]
    for item in environments:
        await _add_environment(found, assembly, item, connect)
    if shared is not None:
        own = {name: [spec["name"] for spec in listed] for name, listed in found["toolsets"].items()}
        await _add_servers(found, shared, connect)
        problems = clashes(own, shared)
        if problems:
            raise ConfigError(problems)
    return found


async def _add_environment(found: dict[str, Any], assembly: Assembly, item: Chosen, connect: bool) -> None:
    from retrograd.agent.tools import InstalledTools, ToolCatalogue, Tools, digest

    own = getattr(item.config, "tools", None)
    if isinstance(own, Tools):
        table = assembly.document.table(f"{item.table}.tools")
        catalogue = ToolCatalogue.load(own, InstalledTools(assembly), table=table)
        for name in catalogue.toolsets:
            found["toolsets"][name] = [
                {"id": tool.label, **_described(tool.spec), "origin": tool.origin, "digest": tool.digest}
                for tool in catalogue.entries(name)
            ]
        found["catalogue_hash"] = catalogue.catalogue_hash
        return
    provider: EnvironmentProvider = assembly.build("environments", item.component.name)
    try:
        specs = provider.catalogue()
        if not specs and connect:
            await provider.prepare([])
            specs = provider.catalogue()
    finally:
        await provider.close()
    if not specs and not connect:
        found["not_connected"].append(f"environment {item.component.name}")
        return
    found["toolsets"] = {name: [_described(spec) for spec in listed] for name, listed in specs.items()}
    found["catalogue_hash"] = digest(found["toolsets"])


async def _add_servers(found: dict[str, Any], shared: McpTools, connect: bool) -> None:
    from retrograd.agent.tools import digest

    if not connect:
        found["not_connected"] += [f"MCP server {server.name}" for server in shared.servers]
        return
    try:
        findings: Sequence[AuditFinding] = await shared.open()
        found["mcp_servers"] = {
            name: [_described(spec) for spec in specs] for name, specs in shared.toolsets().items()
        }
        found["notes"] += [finding.message for finding in findings if finding.level != "ok"]
        found["mcp_hash"] = digest(shared.signature())
    finally:
        await shared.close()


def _described(spec: ToolSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "version": spec.version,
        "description": spec.description,
        "input_schema": dict(spec.input_schema),
    }


def _lines(found: Mapping[str, Any]) -> Sequence[str]:
    lines: list[str] = []
    first = next(iter(found["toolsets"]), "")
    for name, listed in found["toolsets"].items():
        mark = " (default)" if name == first and len(found["toolsets"]) > 1 else ""
        lines += [f"toolset {name}{mark}: {_count(listed)}", *_rows(listed)]
    for name, listed in found["mcp_servers"].items():
        lines += [f"MCP server {name}: {_count(listed)}", *_rows(listed)]
    lines += [f"not asked: {name}" for name in found["not_connected"]]
    lines += [f"note: {note}" for note in found["notes"]]
    lines += [
        f"{key.replace('_', ' ')}: {found[key]}" for key in ("catalogue_hash", "mcp_hash") if key in found
    ]
    return lines or ["this run has no tools"]


def _count(listed: Sequence[Any]) -> str:
    return f"{len(listed)} tool{'s' if len(listed) != 1 else ''}"


def _rows(listed: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    width = max((len(tool["name"]) for tool in listed), default=0)
    label = max((len(tool.get("id", "")) for tool in listed), default=0)
    rows = []
    for tool in listed:
        identity = f"{tool['id']:<{label}}  " if label else ""
        text = " ".join(tool["description"].split())
        cut = f"{text[: _SHOWN_CHARACTERS - 1]}…" if len(text) > _SHOWN_CHARACTERS else text
        rows.append(f"  {tool['name']:<{width}}  {identity}{cut}".rstrip())
    return rows


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`tools`."""
    return [
        Component(
            name="tools",
            config=NoConfig,
            build=lambda config, context: tools,
            summary="List the tools of an agentic run.",
        )
    ]
