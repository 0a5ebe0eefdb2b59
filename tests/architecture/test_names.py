"""The core names no component: what it has to know of one, the component says itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from retrograd_hookspecs import KINDS

from .entry_points import ROOT, modules_on_disk

CORE = ROOT / "retrograd_core" / "retrograd"
WORDS = {
    "text": "the type of a content block in chat APIs and MCP, and a protocol of programs",
    "prompt": "a key of records",
    "default": "a key of JSON Schema and of tools.toml",
    "command": "a key of mcp.json",
    "http": "a scheme of URLs, and a type in mcp.json",
    "reference": "a section and a part of every run",
    "base": "a side of a comparison",
}
"""Names that are ordinary words: what else they are in the core."""
PLACES = {
    "config/sections.py": {"lora", "adamw", "constant"},  # defaults that the reference gives
    "gguf/adapter.py": {"lora"},  # `adapter.type` as the GGUF format spells it
    "trainer.py": {"sft", "grpo", "ppo", "agent_grpo"},  # the facade's methods, named after algorithms
}
"""Files that name components, and which."""


def component_names() -> set[str]:
    """Names of all built-in components. Commands are left out: nothing but the user calls one, and their
    names are words like `tools`."""
    commands = KINDS["commands"].group
    return {name for group, names in modules_on_disk().items() if group != commands for name in names}


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first part of every string that is a name or a dotted key."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and re.fullmatch(r"\w+(\.\w+)?", str(node.value)):
            yield node.lineno, str(node.value).partition(".")[0]


def named_by_kind(path: Path) -> Iterator[tuple[int, str]]:
    """Calls such as `build("samplers", "default")`: whatever the word, there it is a component's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if words[1:] and words[0] in KINDS and words[1] in component_names():
                yield node.lineno, words[1]


def test_the_core_names_no_component() -> None:
    """`retrograd.testing` may: it holds small models and cases for the built-in components."""
    names = component_names() - set(WORDS)
    seen: dict[str, set[str]] = {}
    wrong = []
    for path in sorted(CORE.rglob("*.py")):
        place = path.relative_to(CORE).as_posix()
        if place.startswith("testing/"):
            continue
        wrong += [f"{place}:{line}: {name}" for line, name in named_by_kind(path)]
        for line, name in literals(path):
            if name not in names:
                continue
            if name in PLACES.get(place, ()):
                seen.setdefault(place, set()).add(name)
            else:
                wrong.append(f"{place}:{line}: {name}")
    assert not wrong, "a field of Component, or the kind's own hook, should say this: " + ", ".join(wrong)
    assert seen == PLACES, "PLACES allows what is no longer there"
    assert set(WORDS) <= component_names(), "WORDS allows what is no component's name"
