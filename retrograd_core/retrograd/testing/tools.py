"""Contracts of tools and toolsets: each `check_…` raises `AssertionError` where it is broken."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from retrograd_hookspecs import (
    ConfigError,
    Sandbox,
    StepResult,
    Tool,
    ToolDefinition,
    ToolFactory,
    ToolsetDefinition,
    ToolSpec,
)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What model servers take as the name of a function."""


async def check_tool_factory(
    factory: ToolFactory,
    definition: ToolDefinition,
    sandbox: Sandbox,
    *,
    right: Mapping[str, Any],
    wrong: Iterable[Mapping[str, Any]] = (),
) -> None:
    """Check what every factory and its tool promise.

    Args:
        definition: one that the factory can make a tool of.
        sandbox: where it acts.
        right: arguments that fit the schema and are no mistake.
        wrong: arguments that fit the schema, and with which the tool cannot do what is asked.

    A tool has a name that servers take, a description and a JSON Schema, the same each time it is made; the
    definition's own name and description count; parameters that there are not are refused by name; what goes
    wrong for the model is a result with `is_error`.
    """
    tool = factory.make(definition)
    check_spec(tool.spec)
    assert factory.make(definition).spec == tool.spec, "the same definition gives another tool"
    named = attrs.evolve(definition, name="another_name", description="Does something else.")
    spec = factory.make(named).spec
    assert spec.name == "another_name", f"the definition's name does not count: {spec.name}"
    assert spec.description == "Does something else.", "the definition's description does not count"
    builtin = dict(definition.builtin or {})
    builtin["params"] = {**builtin.get("params", {}), "no_such_parameter": 1}
    refused = _refused_keys(factory, attrs.evolve(definition, builtin=builtin))
    assert any("no_such_parameter" in key for key in refused), (
        f"an unknown parameter is refused by its name, not with {sorted(refused)}"
    )
    await _check_call(tool, sandbox, right, error=False)
    for arguments in wrong:
        await _check_call(tool, sandbox, arguments, error=True)


def _refused_keys(factory: ToolFactory, definition: ToolDefinition) -> set[str]:
    try:
        factory.make(definition)
    except ConfigError as error:
        return {problem.key for problem in error.problems}
    raise AssertionError("a parameter that there is not is taken")


async def _check_call(tool: Tool, sandbox: Sandbox, arguments: Mapping[str, Any], *, error: bool) -> None:
    before = json.dumps(arguments)
    result = await tool.call(sandbox, arguments)
    assert isinstance(result, StepResult), f"a call gives a StepResult, not {type(result).__name__}"
    assert isinstance(result.observation, str), "an observation is text"
    assert result.is_error is error, f"{arguments}: is_error is {result.is_error}: {result.observation[:200]}"
    assert json.dumps(arguments) == before, "a call changed its arguments"


def check_spec(spec: ToolSpec) -> None:
    """A tool as models are shown it."""
    assert _NAME.fullmatch(spec.name), f"{spec.name!r} is no name of a function: letters, digits, _ and -"
    assert spec.description.strip(), f"{spec.name}: the description is empty"
    schema = dict(spec.input_schema)
    assert json.loads(json.dumps(schema)) == schema, f"{spec.name}: the schema is not plain JSON"
    assert schema.get("type") == "object", f"{spec.name}: the schema is not that of an object"
    properties = schema.get("properties", {})
    missing = set(schema.get("required", ())) - set(properties)
    assert not missing, f"{spec.name}: required but not among the properties: {sorted(missing)}"


def check_toolset(toolset: ToolsetDefinition, name: str) -> None:
    """Check what every toolset promises. `name` is the component's.

    It has that name and holds something, refers to tools as `id` or `id@version`, to each once; the tools
    that it brings along are whole, with an id and version each of their own.
    """
    assert toolset.name == name, f"the toolset calls itself {toolset.name!r}, not {name!r}"
    assert toolset.include or toolset.tools, f"{name} holds nothing"
    assert name not in toolset.include, f"{name} includes itself"
    for reference in toolset.tools:
        assert re.fullmatch(r"[^@\s]+(@[^@\s]+)?", reference), (
            f"{name}: {reference!r} is not id or id@version"
        )
    ids = [reference.partition("@")[0] for reference in toolset.tools]
    assert len(set(ids)) == len(ids), f"{name} refers to a tool twice"
    labels = [f"{definition.id}@{definition.version}" for definition in toolset.definitions]
    assert len(set(labels)) == len(labels), f"{name} defines a tool twice"
    for definition, label in zip(toolset.definitions, labels, strict=True):
        assert definition.id, f"{name}: a tool has no id"
        assert definition.version, f"{name}: {label} has no version"
        assert (definition.builtin is None) != (definition.exec is None), (
            f"{name}: {label} has either builtin or exec"
        )
        how = dict(definition.builtin or definition.exec or {})
        plain = {"schema": dict(definition.input_schema), "how": how}
        assert json.loads(json.dumps(plain)) == plain, f"{name}: {label} is not plain JSON"
