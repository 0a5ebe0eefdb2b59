"""Scenarios that a language model writes: the request, what is taken from the replies, and the manifest.

The manifest stands beside the scenario file. It holds hashes of what the scenarios came from (the request,
the tools) and of the scenarios themselves, so that a run sees whether they still belong together.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from retrograd.chat_replies import ReplyError
from retrograd.files import replace_file
from retrograd.records import RecordError, parse_object
from retrograd_hookspecs import AuditFinding, EnvironmentProvider, RolloutError, Scenario, ToolSpec

from .scenarios import digest, scenario_of, scenario_record

MANIFEST_VERSION = 1
SHOWN_BEFORE = 200
"""Tasks written earlier that a request names, the newest."""

_SYSTEM = """\
You write tasks that train a language model to work with tools. Each task is for one conversation: the model \
reads it, calls tools in several turns, and finishes.

A good task
- can be done with the tools that are listed and nothing else, and cannot be done well without them;
- says all that is needed, and is clear about what counts as done;
- has one outcome that can be checked;
- differs from the others in what is asked and in the tools that it takes, not only in names and numbers.

Difficulty goes from 1 (one call) to 5 (many calls that build on each other, with traps).

Reply with JSON alone, of this form:
{form}

`id` is short, of lower-case letters, digits and hyphens, and unique. `user` is the task as its user would \
word it. `system` is a system message, or "". `rubric` says in a sentence or two what a judge should look \
at, or is "".{env}"""
_FORM = {
    "id": "short-name",
    "difficulty": 3,
    "system": "",
    "user": "the task",
    "rubric": "",
}
_ENV = """ `env` is JSON text for the environment, or "": an object whose keys are {keys}."""
_OTHER_KEYS = "those that the instructions below speak of"
_IDS = re.compile(r"[^a-z0-9]+")


class Settings(Protocol):
    """What is asked for (`[agent.scenario_generation]`)."""

    @property
    def min_difficulty(self) -> int: ...

    @property
    def max_difficulty(self) -> int: ...

    @property
    def custom_instructions(self) -> str: ...


@attrs.frozen(kw_only=True)
class Catalogue:
    """The tools of a run by toolset, and those that all trajectories share."""

    toolsets: Mapping[str, Sequence[ToolSpec]]
    shared: Sequence[ToolSpec]

    def described(self) -> dict[str, Any]:
        """What a request shows."""
        found: dict[str, Any] = {}
        if self.toolsets:
            found["toolsets"] = {
                name: [_tool(spec) for spec in specs] for name, specs in self.toolsets.items()
            }
        if self.shared:
            found["tools"] = [_tool(spec) for spec in self.shared]
        return found

    def text(self) -> str:
        """`described()` as JSON."""
        return json.dumps(self.described(), ensure_ascii=False, sort_keys=True)

    @property
    def hash(self) -> str:
        """SHA-256 of the text, hexadecimal."""
        return _hash(self.text())


@attrs.define(eq=False, kw_only=True)
class Writer:
    """Requests for scenarios, and what has come of them.

    Args:
        provider: the run's environments, None for none. What it says in `scenario_keys` is asked for.
    """

    settings: Settings
    catalogue: Catalogue
    provider: EnvironmentProvider | None
    scenarios: list[Scenario] = attrs.field(factory=list)
    refused: Counter[str] = attrs.field(factory=Counter)

    def messages(self, count: int) -> list[dict[str, str]]:
        """The request for `count` further scenarios."""
        settings = self.settings
        parts = [f"The tools:\n{self.catalogue.text()}", self.instructions()]
        before = [
            f"- {scenario.id}: {' '.join(scenario.user.split())[:160]}"
            for scenario in self.scenarios[-SHOWN_BEFORE:]
        ]
        if before:
            parts.append("These exist already; write none like them:\n" + "\n".join(before))
        levels = f"{settings.min_difficulty} to {settings.max_difficulty}"
        parts.append(f"Write {count} tasks of difficulty {levels}, as many of each.")
        return [
            {"role": "system", "content": self.system()},
            {"role": "user", "content": "\n\n".join(part for part in parts if part)},
        ]

    def system(self) -> str:
        """The system message."""
        form = {**_FORM, **({"env": ""} if self.provider is not None else {})}
        keys = getattr(self.provider, "scenario_keys", "") or _OTHER_KEYS
        return _SYSTEM.format(
            form=json.dumps({"scenarios": [form]}),
            env=_ENV.replace("{keys}", keys) if self.provider is not None else "",
        )

    def instructions(self) -> str:
        """What the user added."""
        added = self.settings.custom_instructions.strip()
        return f"Instructions:\n{added}" if added else ""

    def schema(self) -> dict[str, Any]:
        """JSON Schema of a reply, in what strict modes of servers take."""
        kinds: dict[str, Any] = {name: {"type": "string"} for name in _FORM}
        kinds["difficulty"] = {"type": "integer"}
        if self.provider is not None:
            kinds["env"] = {"type": "string"}
        return _object(scenarios={"type": "array", "items": _object(**kinds)})

    def take(self, value: Any, most: int) -> int:
        """Add the scenarios of a reply, at most `most`; how many were new.

        Raises: `ReplyError` if none of its entries can be used.
        """
        entries = value.get("scenarios") if isinstance(value, dict) else None
        if not isinstance(entries, list) or not entries:
            raise ReplyError('the reply has no array "scenarios" with entries')
        refused: Counter[str] = Counter()
        first = ""
        added = 0
        texts = {_text_key(scenario) for scenario in self.scenarios}
        for entry in entries:
            if added == most:
                refused["more than were asked for"] += 1
                continue
            try:
                scenario = self._scenario(entry)
            except RecordError as error:
                message = f"{error.key}: {error.message}" if error.key else error.message
                refused[f"invalid {error.key}" if error.key else "invalid"] += 1
                first = first or message
                continue
            if _text_key(scenario) in texts:
                refused["duplicate"] += 1
                continue
            texts.add(_text_key(scenario))
            self.scenarios.append(self._with_own_id(scenario))
            added += 1
        if not added and first:
            raise ReplyError(f"no entry can be used; {first}")
        self.refused += refused
        return added

    def _scenario(self, entry: Any) -> Scenario:
        if not isinstance(entry, dict):
            raise RecordError("an entry is no object")
        known = {*_FORM, "env"}
        for name in entry:
            if name not in known:
                raise RecordError(f"has the unknown key {name!r}")
        difficulty = entry.get("difficulty")
        low, high = self.settings.min_difficulty, self.settings.max_difficulty
        if type(difficulty) is not int or not low <= difficulty <= high:
            raise RecordError(f"is {difficulty!r}, not a number from {low} to {high}", key="difficulty")
        metadata: dict[str, Any] = {"difficulty": difficulty}
        if entry.get("rubric"):
            metadata["rubric"] = entry["rubric"]
        env = _env(entry.get("env"))
        if env:
            metadata["env"] = env
        record = {"id": entry.get("id"), "user": entry.get("user"), "metadata": metadata}
        if entry.get("system"):
            record["system"] = entry["system"]
        return scenario_of(record)

    def _with_own_id(self, scenario: Scenario) -> Scenario:
        """Ids are lower case with hyphens; a second one gets a number."""
        taken = {other.id for other in self.scenarios}
        wanted = _IDS.sub("-", scenario.id.lower()).strip("-") or "scenario"
        names = (wanted if n == 1 else f"{wanted}-{n}" for n in range(1, len(taken) + 2))
        return attrs.evolve(scenario, id=next(name for name in names if name not in taken))

    def prompt_hash(self) -> str:
        """SHA-256 of what is asked, the tools and earlier tasks apart."""
        settings = self.settings
        levels = f"{settings.min_difficulty}-{settings.max_difficulty}"
        return _hash("\n".join([self.system(), self.instructions(), levels]))


def manifest_path(scenarios: Path) -> Path:
    """`scenarios.jsonl.manifest.json`."""
    return scenarios.with_name(f"{scenarios.name}.manifest.json")


def write_generated(path: Path, writer: Writer, scenarios: Sequence[Scenario], **more: Any) -> None:
    """Write the scenario file and its manifest; `more` goes into the manifest. A manifest that is there is
    removed first: it never stands beside scenarios that it does not describe.

    Raises: `RolloutError` if a file cannot be written.
    """
    manifest = {
        "version": MANIFEST_VERSION,
        "prompt": writer.prompt_hash(),
        "catalogue": writer.catalogue.hash,
        "corpus": digest(scenarios),
        "scenarios": len(scenarios),
        **more,
    }
    lines = "".join(json.dumps(scenario_record(s), ensure_ascii=False) + "\n" for s in scenarios)
    try:
        manifest_path(path).unlink(missing_ok=True)
        replace_file(path, lines)
        replace_file(manifest_path(path), json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise RolloutError(f"{path} cannot be written: {error.strerror or error}") from error


def check_manifest(
    path: Path,
    scenarios: Sequence[Scenario],
    catalogue: Catalogue,
    *,
    settings: Settings | None,
    provider: EnvironmentProvider | None,
) -> list[AuditFinding]:
    """Do generated scenarios still belong to this run? Nothing is found if there is no manifest.

    Args:
        settings: what would be asked for now; None if the run does not say.
    """
    manifest = manifest_path(path)
    if not manifest.is_file():
        return []
    check = "scenario manifest"
    try:
        held = parse_object(manifest.read_bytes())
    except (OSError, RecordError) as error:
        return [AuditFinding(level="error", check=check, message=f"{manifest} cannot be read: {error}")]
    if held.get("version") != MANIFEST_VERSION:
        message = f"{manifest} has the version {held.get('version')!r}, not {MANIFEST_VERSION}"
        return [AuditFinding(level="error", check=check, message=message)]
    now = {
        "corpus": (digest(scenarios), f"the scenarios in {path.name} are not those that were written"),
        "catalogue": (catalogue.hash, "the tools of this run are not those that the scenarios were made for"),
    }
    if settings is not None:
        writer = Writer(settings=settings, catalogue=catalogue, provider=provider)
        what = "[agent.scenario_generation] asks for other scenarios than those that were written"
        now["prompt"] = (writer.prompt_hash(), what)
    findings = [
        AuditFinding(
            level="error",
            check=check,
            message=f"{name} hash differs from {manifest.name}: {what}; generate them anew, or delete the"
            " manifest to train on them as they are",
        )
        for name, (found, what) in now.items()
        if held.get(name) != found
    ]
    ok = AuditFinding(level="ok", check=check, message=f"{manifest.name} describes scenarios and tools")
    return findings or [ok]


def _tool(spec: ToolSpec) -> dict[str, Any]:
    return {"name": spec.name, "description": spec.description, "parameters": dict(spec.input_schema)}


def _env(value: Any) -> dict[str, Any]:
    if isinstance(value, str) and value.strip():
        try:
            value = parse_object(value.encode("utf-8", "surrogatepass"))
        except RecordError as error:
            raise RecordError(error.message, key="env") from error
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise RecordError("must be JSON text of an object", key="env")
    return value


def _text_key(scenario: Scenario) -> str:
    return " ".join(f"{scenario.system}\n{scenario.user}".casefold().split())


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
