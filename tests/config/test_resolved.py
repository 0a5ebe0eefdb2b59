"""`resolved.toml` is a configuration that repeats the run."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.config import (
    SHARED_SECTIONS,
    Document,
    load_document,
    parse_document,
    resolved_text,
    structure,
    to_table,
    write_resolved,
)
from retrograd_hookspecs import ConfigError, key

from .components import ADAMW, GRPO, LORA, SFT, LoraConfig, read_run

Parse = Callable[[str], Document]

FULL = """\
[run]
algorithm = "grpo"
[model]
path = "models/m.gguf"
[output]
path = "out/o.gguf"
[training]
ctx = 96
lr = 3e-05
[evaluation]
data = "eval.jsonl"
max_examples = 7
[observe]
directory = "obs"
[lora]
rank = 4
[grpo]
prompts = "p.jsonl"
[grpo.sampling]
temperature = 1.0
top_p = 1.0
max_new_tokens = 8
"""
COMPONENTS = (("algorithms", GRPO), ("trainables", LORA), ("optimizers", ADAMW))


def test_round_trip(parse: Parse, tmp_path: Path) -> None:
    document = parse(FULL).with_set("training.lr=1e-07")
    config, configs = read_run(document, COMPONENTS)
    tables = {
        "grpo": configs["algorithms"],
        "lora": configs["trainables"],
        "optimizer.adamw": configs["optimizers"],
    }
    target = tmp_path / "elsewhere" / "resolved.toml"
    write_resolved(target, config, tables, {"retrograd": "0.1.0", "numpy": "2.4.6"})
    again, configs_again = read_run(load_document(target), COMPONENTS)
    assert again == config
    assert configs_again == configs
    assert again.training.gradient_accumulation == 3
    assert [path.name for path in target.parent.iterdir()] == ["resolved.toml"]
    text = target.read_text(encoding="utf-8")
    assert resolved_text(again, tables, {}).partition("\n[run]")[2] == text.partition("\n[run]")[2]
    assert "# From run.toml\n#   with --set training.lr\n# numpy 2.4.6\n# retrograd 0.1.0\n" in text
    assert "# threads: automatic\n" in text
    assert f'path = "{tmp_path}/models/m.gguf"' in text


def test_every_shared_key_is_there(parse: Parse) -> None:
    config, configs = read_run(parse(FULL), COMPONENTS)
    text = resolved_text(config, {"grpo": configs["algorithms"]}, {})
    for name, cls in SHARED_SECTIONS.items():
        section = text.partition(f"\n[{name}]\n")[2].partition("\n[")[0]
        if getattr(config, name) is None:
            assert not section
            continue
        for field in attrs.fields(cls):
            assert f"\n{field.name} = " in f"\n{section}" or f"\n# {field.name}: " in f"\n{section}"


def test_excluded_keys_stay_out(parse: Parse) -> None:
    text = """\
[run]
algorithm = "sft"
[model]
path = "m.gguf"
[output]
path = "o.gguf"
[lora]
init_adapter = "a.gguf"
[sft]
data = "d.jsonl"
"""
    components = (("algorithms", SFT), ("trainables", LORA), ("optimizers", ADAMW))
    config, configs = read_run(parse(text), components)
    written = resolved_text(config, {"sft": configs["algorithms"], "lora": configs["trainables"]}, {})
    assert "# rank is left out: init_adapter excludes it\n" in written
    again, configs_again = read_run(parse_document(written, "resolved.toml"), components)
    assert (again, configs_again) == (config, configs)


def test_a_comment_cannot_become_a_value(parse: Parse) -> None:
    config, _ = read_run(parse(FULL).with_set('model.path="x\\u000a[evil]"'), COMPONENTS)
    evil = attrs.evolve(
        config, document=attrs.evolve(config.document, overrides=("--set a=1\n[evil]\nb = 2",))
    )
    assert "evil" not in tomllib.loads(resolved_text(evil, {}, {}))


@attrs.frozen(kw_only=True)
class Server:
    """A server."""

    name: str = key(doc="Name.")
    headers: Mapping[str, str] = key(factory=dict, doc="Headers.", secret=True)
    deep: LoraConfig = key(factory=LoraConfig, doc="A sub-table.")


@attrs.frozen(kw_only=True)
class Agent:
    """Every shape of a table."""

    title: str = key("", doc="Text.")
    ratio: float = key(0.5, doc="Number.")
    count: int = key(1, doc="Integer.")
    flags: tuple[bool, ...] = key((), doc="Flags.")
    free: Mapping[str, Any] = key(factory=dict, doc="Anything.")
    servers: tuple[Server, ...] = key((), doc="An array of tables.")
    first: Server | None = key(None, doc="A table.")


def test_secrets_are_left_out(parse: Parse) -> None:
    config, _ = read_run(parse(FULL), COMPONENTS)
    agent = Agent(servers=(Server(name="a", headers={"Authorization": "Bearer hunter2"}),))
    written = resolved_text(config, {"agent": agent}, {})
    assert "hunter2" not in written
    assert "# headers is left out: it may hold a secret" in written
    assert "hunter2" in str(to_table(agent))
    assert "hunter2" not in str(to_table(agent, secrets=False))


@attrs.frozen(kw_only=True)
class Fleet:
    """Servers by name."""

    servers: Mapping[str, Server] = key(factory=dict, doc="By name.")


def test_secrets_in_inline_tables_are_left_out(parse: Parse) -> None:
    config, _ = read_run(parse(FULL), COMPONENTS)
    fleet = Fleet(servers={"a": Server(name="a", headers={"Authorization": "Bearer hunter2"})})
    assert "hunter2" not in resolved_text(config, {"fleet": fleet}, {})


PLAIN = st.recursive(
    st.text()
    | st.integers(-(2**63), 2**63 - 1)
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SERVERS = st.builds(
    Server,
    name=st.text(),
    deep=st.builds(LoraConfig, rank=st.integers(1, 64), targets=st.lists(st.text()).map(tuple)),
)


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        Agent,
        title=st.text(),
        ratio=st.floats(allow_nan=False, allow_infinity=False),
        count=st.integers(-(2**63), 2**63 - 1),
        flags=st.lists(st.booleans()).map(tuple),
        free=st.dictionaries(st.text(max_size=5), PLAIN, max_size=3),
        servers=st.lists(SERVERS, max_size=3).map(tuple),
        first=st.none() | SERVERS,
    )
)
def test_any_values_come_back(agent: Agent) -> None:
    document = parse_document(FULL, "run.toml")
    config, _ = read_run(document, COMPONENTS)
    written = resolved_text(config, {"agent": agent}, {})
    again, problems = structure(Agent, parse_document(written, "resolved.toml").table("agent"))
    assert problems == []
    assert again == agent
    assert structure(Agent, Document.from_values({"t": to_table(agent)}).table("t")) == (agent, [])


def test_tables_without_defaults() -> None:
    assert to_table(LoraConfig(rank=4), defaults=False) == {"rank": 4}
    assert to_table(LoraConfig(init_adapter=Path("a")), defaults=False) == {"init_adapter": "a"}
    assert to_table(Server(name="x"), defaults=False) == {"name": "x"}


def test_a_file_that_cannot_be_written(parse: Parse, tmp_path: Path) -> None:
    config, _ = read_run(parse(FULL), COMPONENTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the resolved configuration"):
        write_resolved(tmp_path / "file" / "resolved.toml", config, {}, {})
