"""Scenario files: the tasks of agentic runs, one JSON object a line.

::

    {"id": "math-1", "system": "Use tools when useful.", "user": "What is 37 + 5?"}
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrograd.records import RecordError, kind_of, read_records
from retrograd_hookspecs import DataError, Problem, Scenario

_KEYS = ("id", "user", "system", "metadata")
_METADATA = ("rubric", "env")


def load_scenarios(path: Path) -> list[Scenario]:
    """All scenarios of a file, in the order of its lines.

    `metadata` may hold further keys for whoever reads them; `rubric` and `env` are checked.

    Raises: `DataError` with one problem a bad line, among them an id that an earlier line has.
    """
    first: dict[str, str] = {}

    def parse(record: dict[str, Any], origin: str) -> Scenario:
        scenario = scenario_of(record, origin)
        if scenario.id in first:
            raise RecordError(f"the id {scenario.id!r} is that of {first[scenario.id]} too", key="id")
        first[scenario.id] = origin
        return scenario

    return read_records(path, parse)


def scenario_of(record: Mapping[str, Any], origin: str = "") -> Scenario:
    """A scenario from its record. Raises: `RecordError`."""
    for name in record:
        if name not in _KEYS:
            meant = difflib.get_close_matches(name, _KEYS, n=1)
            hint = f"did you mean {meant[0]!r}?" if meant else f"known: {', '.join(_KEYS)}"
            hint = f"{hint}; further data goes into metadata"
            raise RecordError(f"has the unknown key {name!r}", hint=hint)
    metadata = record.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise RecordError(f"must be an object, is {kind_of(metadata)}", key="metadata")
    metadata = metadata or {}
    for name in metadata:
        meant = difflib.get_close_matches(name, _METADATA, n=1, cutoff=0.75)
        if name not in _METADATA and meant:
            raise RecordError(
                f"has the unknown key {name!r}", key="metadata", hint=f"did you mean {meant[0]!r}?"
            )
    if not isinstance(metadata.get("rubric", ""), str):
        raise RecordError("must be a string", key="metadata.rubric")
    if not isinstance(metadata.get("env", {}), dict):
        raise RecordError(f"must be an object, is {kind_of(metadata['env'])}", key="metadata.env")
    return Scenario(
        id=_text(record, "id", required=True),
        user=_text(record, "user", required=True),
        system=_text(record, "system", required=False),
        metadata=metadata,
        origin=origin,
    )


def scenario_record(scenario: Scenario) -> dict[str, Any]:
    """The record of a scenario, as a file has it: what environments and programs outside get."""
    record: dict[str, Any] = {"id": scenario.id, "user": scenario.user}
    if scenario.system:
        record["system"] = scenario.system
    if scenario.metadata:
        record["metadata"] = dict(scenario.metadata)
    return record


def digest(scenarios: Sequence[Scenario]) -> str:
    """Hash of all that a run reads of scenarios."""
    text = json.dumps([scenario_record(s) for s in scenarios], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_records(path: Path, scenarios: Sequence[Scenario]) -> None:
    """Write a scenario file."""
    lines = (json.dumps(scenario_record(s), ensure_ascii=False) + "\n" for s in scenarios)
    path.write_text("".join(lines), encoding="utf-8")


def require_tasks(scenarios: Sequence[Scenario], check: Any) -> None:
    """Raise `DataError` with what `check(scenario)` finds wrong: messages, each with the key it is about."""
    problems = [
        Problem(where=scenario.origin or scenario.id, key=key, message=message, hint=hint)
        for scenario in scenarios
        for key, message, hint in check(scenario)
    ]
    if problems:
        raise DataError(problems)


def _text(record: Mapping[str, Any], name: str, *, required: bool) -> str:
    value = record.get(name)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        message = "is missing" if name not in record else f"must be a string, is {kind_of(value)}"
        raise RecordError(message, key=name)
    if required and not value.strip():
        raise RecordError("is empty", key=name)
    return value
