"""Sub-tables that another component reads: `[contest.judge] type = "lenient"`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from retrograd.assembly import Assembly, assemble
from retrograd.config import Document, json_schema, resolved_text
from retrograd.errors import ConfigError
from retrograd.installed import installed_classes, installed_variants

MakeModel = Callable[..., Path]

HOOKS = """
import attrs
from retrograd_hookspecs import Component, ComponentTable, hookimpl, key


@attrs.frozen(kw_only=True)
class ContestConfig:
    prize: int = key(doc="Prize.")
    judge: ComponentTable | None = key(None, doc="Judge.")


@attrs.frozen(kw_only=True)
class Scale:
    top: float = key(1.0, doc="Best score.")


@attrs.frozen(kw_only=True)
class LenientConfig:
    mercy: float = key(0.5, minimum=0.0, doc="Mercy.")
    scale: Scale = key(factory=Scale, doc="Scale.")


@hookimpl
def retrograd_algorithms():
    build = lambda config, context: context.build("judges", config.judge.type)
    selects = {"judge": "judges"}
    return [Component(name="contest", config=ContestConfig, build=build, summary="Test.", selects=selects)]


@hookimpl
def retrograd_judges():
    build = lambda config, context: config.mercy * config.scale.top
    return [Component(name="lenient", config=LenientConfig, build=build, summary="Lenient.")]
"""


@pytest.fixture
def contest(tmp_path: Path, tiny_model: MakeModel) -> Callable[[Mapping[str, Any]], Assembly]:
    """The assembly of a run of the algorithm above."""

    def make(table: Mapping[str, Any]) -> Assembly:
        (tmp_path / "hooks.py").write_text(HOOKS)
        values = {
            "run": {"algorithm": "contest"},
            "model": {"path": str(tiny_model()), "device": "reference"},
            "output": {"path": "a.gguf"},
            "lora": {},
            "plugins": {"load": ["hooks.py"]},
            "contest": table,
        }
        return assemble(Document.from_values(values, base_dir=tmp_path))

    return make


def test_the_component_reads_its_keys_and_is_built(contest: Callable[..., Assembly]) -> None:
    assembly = contest({"prize": 3, "judge": {"type": "lenient", "mercy": 0.25, "scale": {"top": 2.0}}})
    assert assembly.services.get("algorithm") == 0.5
    assert assembly.settings()["contest.judge.mercy"] == 0.25


def test_without_the_table_there_is_no_component(contest: Callable[..., Assembly]) -> None:
    assert ("judges", "lenient") not in contest({"prize": 3}).chosen


@pytest.mark.parametrize(
    ("judge", "problem"),
    [
        ({"type": "lenient", "merci": 1.0}, "contest.judge.merci: unknown key"),
        ({"type": "lenient", "mercy": -1.0}, "contest.judge.mercy: must be"),
        ({"mercy": 1.0}, "contest.judge.type: required key is missing"),
        ({"type": 3}, "contest.judge.type: expected a string"),
        ({"type": "strict"}, "contest.judge.type:"),
        ("lenient", "expected a table [contest.judge]"),
    ],
)
def test_mistakes_name_the_key(contest: Callable[..., Assembly], judge: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        contest({"prize": 3, "judge": judge})
    assert problem in str(refused.value)


def test_resolved_configuration_repeats_the_table(contest: Callable[..., Assembly]) -> None:
    assembly = contest({"prize": 3, "judge": {"type": "lenient", "mercy": 0.25}})
    text = resolved_text(assembly.config, assembly.components(), {})
    expected = {"type": "lenient", "mercy": 0.25, "scale": {"top": 1.0}}
    assert tomllib.loads(text)["contest"] == {"prize": 3, "judge": expected}


def test_schema_has_one_alternative_a_component(contest: Callable[..., Assembly]) -> None:
    session = contest({"prize": 3}).session
    variants = installed_variants(session)
    assert "lenient" in variants["contest.judge"]
    schema = json_schema(installed_classes(session), variants=variants)["properties"]["contest"]
    jsonschema.validate({"prize": 1, "judge": {"type": "lenient", "mercy": 1.0}}, schema)
    for wrong in ({"type": "lenient", "merci": 1.0}, {"mercy": 1.0}, {"type": "other"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"prize": 1, "judge": wrong}, schema)
