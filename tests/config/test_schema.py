"""The JSON Schema agrees with what the reader accepts."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest

from retrograd.config import SHARED_SECTIONS, json_schema, keys_of
from retrograd_hookspecs import PluginError, key

from .components import GrpoConfig, LoraConfig, SftConfig, SgdConfig

SECTIONS = {"sft": SftConfig, "grpo": GrpoConfig, "lora": LoraConfig, "optimizer.sgd": SgdConfig}
CHOICES = {"run.algorithm": {"sft": "Supervised.", "grpo": "Rollouts."}, "metrics.sinks": {"x": "A sink."}}

VALID = """
[run]
algorithm = "sft"
[model]
device = "cpu"
[output]
path = "o.gguf"
kind = "adapter"
[training]
ctx = 256
shared_prefix_fanout = "max"
optimizer = "sgd"
[optimizer.sgd]
momentum = 0.9
[lora]
targets = ["q", "v"]
[sft]
data = "d.jsonl"
template_variables = { enable_thinking = false, nested = [1, { a = 2 }] }
[metrics]
sinks = ["x"]
[checkpoint]
directory = "c"
mode = "steps"
every_steps = 5
"""


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json_schema(SECTIONS, CHOICES)
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def faults(validator: Any, text: str) -> list[str]:
    return [".".join(map(str, error.absolute_path)) for error in validator.iter_errors(tomllib.loads(text))]


def test_a_valid_file(validator: Any) -> None:
    assert faults(validator, VALID) == []


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ('algorithm = "sft"', 'algorithm = "stf"', "run.algorithm"),
        ('algorithm = "sft"', "", "run"),
        ('kind = "adapter"', 'kind = "adaptor"', "output.kind"),
        ("ctx = 256", "ctx = 1", "training.ctx"),
        ("ctx = 256", "ctx = 25.5", "training.ctx"),
        ("ctx = 256", 'ctx = "256"', "training.ctx"),
        ("ctx = 256", "ctxx = 256", "training"),
        ('fanout = "max"', 'fanout = "mx"', "training.shared_prefix_fanout"),
        ('fanout = "max"', "fanout = 1", "training.shared_prefix_fanout"),
        ("momentum = 0.9", "momentum = 1.0", "optimizer.sgd.momentum"),
        ("[optimizer.sgd]", "[optimizer.sgdd]", "optimizer"),
        ('targets = ["q", "v"]', 'targets = "q"', "lora.targets"),
        ('data = "d.jsonl"', "", "sft"),
        ('sinks = ["x"]', 'sinks = ["y"]', "metrics.sinks.0"),
        ("[lora]", "[loar]", ""),
        ("every_steps = 5", "every_steps = 0", "checkpoint.every_steps"),
    ],
)
def test_mistakes(validator: Any, old: str, new: str, where: str) -> None:
    assert old in VALID
    assert where in faults(validator, VALID.replace(old, new))


def test_seven_mistakes_file(validator: Any) -> None:
    text = Path(__file__).with_name("seven_mistakes.toml").read_text(encoding="utf-8")
    # What concerns several keys at once is beyond the schema.
    assert sorted(faults(validator, text)) == [
        "lora.rank",
        "output.kind",
        "sft",
        "training",
        "training.lr",
        "training.weight_decay",
    ]


def test_every_key_is_documented_with_its_default() -> None:
    schema = json_schema(SECTIONS)
    for name, cls in SHARED_SECTIONS.items():
        table = schema["properties"][name]
        assert table["description"]
        assert list(table["properties"]) == [k.name for k in keys_of(cls)]
        for config_key in keys_of(cls):
            entry = table["properties"][config_key.name]
            assert entry["description"].startswith(config_key.info.doc)
            assert ("default" in entry) == (config_key.default is not None)
    training = schema["properties"]["training"]["properties"]
    assert training["weight_decay"] == {
        "type": "number",
        "minimum": 0.0,
        "maximum": 1.0,
        "default": 0.0,
        "description": "Decoupled weight decay.",
    }
    assert training["shared_prefix_fanout"]["anyOf"] == [
        {"type": "integer", "minimum": 2},
        {"enum": ["auto", "off", "max"]},
    ]
    assert "Unit: tokens." in training["ctx"]["description"]


def test_names_of_components_are_choices_with_documentation() -> None:
    run = json_schema(SECTIONS, CHOICES)["properties"]["run"]["properties"]["algorithm"]
    assert run["enum"] == ["sft", "grpo"]
    assert run["x-taplo"] == {"docs": {"enumValues": ["Supervised.", "Rollouts."]}}


def test_nested_tables_and_json() -> None:
    schema = json_schema({"grpo": GrpoConfig, "a.b.c": SgdConfig})
    sampling = schema["properties"]["grpo"]["properties"]["sampling"]
    assert sampling["required"] == ["temperature", "top_p", "max_new_tokens"]
    assert schema["properties"]["a"]["properties"]["b"]["properties"]["c"]["properties"]["momentum"]
    assert json.loads(json.dumps(schema)) == schema


@attrs.frozen(kw_only=True)
class Endless:
    """A class that contains itself."""

    inner: Endless | None = key(None, doc="Itself.")


def test_a_class_that_contains_itself_is_refused() -> None:
    with pytest.raises(PluginError, match="Endless: a configuration class contains itself"):
        json_schema({"endless": Endless})
