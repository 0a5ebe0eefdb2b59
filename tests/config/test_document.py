"""Reading TOML, its syntax errors, and overrides from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrograd.config import Document, load_document, parse_document, parse_value
from retrograd_hookspecs import ConfigError


def test_values_and_lines(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes("\ufeff[training]\r\nctx = 64\r\n\r\n[optimizer.muon]\r\nmomentum = 0.9\r\n".encode())
    document = load_document(file)
    assert document.get("training.ctx") == 64
    assert document.where("training.ctx") == f"{file}:2"
    assert document.base_dir == tmp_path
    muon = document.table("optimizer.muon")
    assert (muon.name, muon.given, dict(muon.values)) == ("optimizer.muon", True, {"momentum": 0.9})
    assert muon.where() == f"{file}:4"
    assert "momentum" in muon
    assert "nesterov" not in muon


def test_what_is_not_given_is_placed_at_its_nearest_parent() -> None:
    document = parse_document("x = 1\n[training]\n", "run.toml")
    assert document.where("training.lr") == "run.toml:2"
    assert document.where("sft.data") == "run.toml"
    assert not document.table("sft").given
    assert document.get("sft.data", "none") == "none"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[run]\nkind = adapter\n", ["run.toml:2:8", "kind = adapter", 'strings need quotes: "adapter"']),
        ("a = True\n", ["run.toml:1:5", "write true"]),
        ("a = None\n", ["run.toml:1:5", "leave the key out"]),
        ("a = \nb = 1\n", ["run.toml:1:", "a value is missing after ="]),
        ('path = "C:\\models"\n', ["run.toml:1:", "single quotes"]),
        ('a = "open\nb = 1\n', ["run.toml:1:", "the closing quote is missing"]),
        ("a = “smart”\n", ["run.toml:1:5", "straight quotes"]),
        ("a = .5\n", ["run.toml:1:", "write 0.5"]),
        ("training.lr: 3\n", ["run.toml:1:", "one key = value a line"]),
        ("[t]\nlr = 1\nx = 2\nlr = 3\n", ["run.toml:4: t.lr: given twice, first at line 2"]),
        ("[t]\n[u]\n[t]\n", ["run.toml:3: t: given twice, first at line 1"]),
        ("a = [1, 2", ["run.toml:1:10", "unclosed array"]),
        ("a = " + "[" * 50_000, ["run.toml", "nested too deeply"]),
    ],
)
def test_syntax_errors_say_where_and_what_was_meant(text: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "run.toml")
    for part in expected:
        assert part in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot read the configuration: No such file"):
        load_document(missing)
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_document(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[run]\nalgorithm = 'caf\xe9'\n")
    with pytest.raises(ConfigError, match=r"latin\.toml:2: not UTF-8: byte 0xe9"):
        load_document(latin)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("64", 64),
        ("true", True),
        ('"7"', "7"),
        ('["q", "v"]', ["q", "v"]),
        ("{ a = 1 }", {"a": 1}),
        ("sgd", "sgd"),
        ("models/a b.gguf", "models/a b.gguf"),
        ("", ""),
        ("1\n[training]\nlr = 2", "1\n[training]\nlr = 2"),
        ("1 # comment", 1),
    ],
)
def test_values_of_overrides(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_set_replaces_and_creates() -> None:
    before = parse_document("[training]\nlr = 1\n[lora]\nrank = 4\n", "run.toml")
    after = before.with_set("training.lr=1e-5").with_set("checkpoint.mode=steps").with_set('"lora".rank = 16')
    assert after.get("training.lr") == 1e-5
    assert after.get("checkpoint.mode") == "steps"
    assert after.get("lora.rank") == 16
    assert after.where("training.lr") == "--set training.lr"
    assert after.where("training") == "run.toml:1"
    assert after.where("checkpoint") == "--set checkpoint.mode"
    assert after.overrides == (
        "--set training.lr",
        "--set checkpoint.mode",
        '--set "lora".rank',
    )
    assert before.get("training.lr") == 1
    assert before.where("training.lr") == "run.toml:2"


def test_a_value_on_the_command_line_may_be_a_secret() -> None:
    document = parse_document("", "run.toml").with_set("plugin.tracker.token=hunter2")
    assert document.get("plugin.tracker.token") == "hunter2"
    assert "hunter2" not in f"{document.overrides} {document.where('plugin.tracker.token')}"


def test_replacing_a_table_forgets_the_lines_of_its_keys() -> None:
    document = parse_document("[sft]\ndata = 'x'\n", "run.toml").with_set("sft={ data = 'y' }")
    assert document.where("sft.data") == "--set sft"


def test_set_reaches_into_arrays() -> None:
    document = parse_document("[[agent.servers]]\nname = 'a'\n[[agent.servers]]\n", "run.toml")
    assert document.with_set("agent.servers.1.name=b").get("agent.servers")[1] == {"name": "b"}
    with pytest.raises(ConfigError, match=r"agent\.servers is an array; its elements are 0 to 1"):
        document.with_set("agent.servers.2.name=b")
    with pytest.raises(ConfigError, match=r"agent\.servers is an array"):
        document.with_set("agent.servers.name=b")


@pytest.mark.parametrize("assignment", ["training.lr", "=3", "a b=3", "a..b=1", "[t]=1"])
def test_malformed_assignments_are_refused(assignment: str) -> None:
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        parse_document("", "run.toml").with_set(assignment)


def test_set_below_a_scalar_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set run\.a\.b: run\.a: .* it is not a table"):
        parse_document("run.a = 3\n", "run.toml").with_set("run.a.b=1")


def test_documents_built_in_python() -> None:
    values = {"training": {"lr": 0.1}}
    document = Document.from_values(values)
    values["training"]["lr"] = 0.2
    assert document.get("training.lr") == 0.1
    assert document.where("training.lr") == "Trainer(...)"
    assert document.base_dir == Path.cwd()
