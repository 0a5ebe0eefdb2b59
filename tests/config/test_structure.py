"""Strict structuring: what is accepted, what is refused, and how it is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from retrograd.config import Document, read_table, structure
from retrograd_hookspecs import ConfigError, PluginError, Problem, key

Parse = Callable[[str], Document]


@attrs.frozen(kw_only=True)
class Inner:
    """A sub-table."""

    depth: int = key(doc="Depth.", minimum=1, unit="layers")
    label: str = key("none", doc="Label.")


@attrs.frozen(kw_only=True)
class Example:
    """One key of every type."""

    integer: int = key(1, doc="An integer.", minimum=0, below=100)
    number: float = key(1.0, doc="A number.", above=0.0, maximum=2.0)
    flag: bool = key(False, doc="A flag.")
    text: str = key("", doc="A text.")
    path: Path | None = key(None, doc="A path.")
    locator: str = key("", doc="A locator.", locator=True)
    choice: Literal["auto", "off", "max"] = key("auto", doc="A choice.")
    mixed: int | Literal["auto", "off", "max"] = key("auto", doc="Either.", minimum=2)
    names: tuple[str, ...] = key((), doc="Names.")
    numbers: Sequence[float] = key((), doc="Numbers.", minimum=0.0)
    one_or_more: Path | tuple[Path, ...] | None = key(None, doc="Paths.")
    inner: Inner | None = key(None, doc="A sub-table.")
    many: tuple[Inner, ...] = key((), doc="An array of tables.")
    table: Mapping[str, int] = key(factory=dict, doc="A mapping.")
    anything: Mapping[str, Any] = key(factory=dict, doc="A free mapping.")
    token: str = key("", doc="A credential.", secret=True)


def read(parse: Parse, body: str) -> Example:
    value, problems = structure(Example, parse(f"[t]\n{body}").table("t"))
    assert problems == []
    assert value is not None
    return value


def problems_of(parse: Parse, body: str, cls: type[Any] = Example) -> list[str]:
    value, problems = structure(cls, parse(f"[t]\n{body}").table("t"))
    assert value is None
    return [str(problem) for problem in problems]


def test_every_type(parse: Parse, tmp_path: Path) -> None:
    value = read(
        parse,
        'integer = 7\nnumber = 2\nflag = true\ntext = "x"\npath = "data/a.jsonl"\n'
        'locator = "pypi:m==1/f.gguf"\n'
        'choice = "max"\nmixed = 4\nnames = ["a"]\nnumbers = [0, 0.5]\none_or_more = ["a", "/b"]\n'
        "table = { a = 1 }\nanything = { a = [1, { b = false }] }\n"
        "[t.inner]\ndepth = 2\n[[t.many]]\ndepth = 3\n[[t.many]]\ndepth = 4\n",
    )
    assert value == Example(
        integer=7,
        number=2.0,
        flag=True,
        text="x",
        path=tmp_path / "data/a.jsonl",
        locator="pypi:m==1/f.gguf",
        choice="max",
        mixed=4,
        names=("a",),
        numbers=[0.0, 0.5],
        one_or_more=(tmp_path / "a", Path("/b")),
        inner=Inner(depth=2),
        many=(Inner(depth=3), Inner(depth=4)),
        table={"a": 1},
        anything={"a": [1, {"b": False}]},
    )
    assert type(value.number) is float
    assert type(value.numbers[0]) is float


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("integer = 7.9", "t.integer: expected an integer, got 7.9"),
        ("integer = 7.0", "t.integer: expected an integer, got 7.0 (write 7)"),
        ('integer = "7"', 't.integer: expected an integer, got the string "7" (write 7 without quotes)'),
        ("integer = true", "t.integer: expected an integer, got true"),
        ("integer = -1", "t.integer: must be at least 0 and below 100, got -1"),
        ("integer = 100", "t.integer: must be at least 0 and below 100, got 100"),
        ("number = 0.0", "t.number: must be above 0 and at most 2, got 0.0"),
        ("number = true", "t.number: expected a number, got true"),
        ("number = nan", "t.number: must be a finite number, got nan"),
        ("number = -inf", "t.number: must be a finite number, got -inf"),
        (f"number = 1{'0' * 400}", "t.number: must be a finite number, got inf"),
        ('number = "1e-4"', 't.number: expected a number, got the string "1e-4" (write 1e-4 without quotes)'),
        (
            'flag = "false"',
            't.flag: expected true or false, got the string "false" (write false without quotes)',
        ),
        ("flag = 1", "t.flag: expected true or false, got 1 (write true)"),
        ("text = 7", 't.text: expected a string, got 7 (write "7")'),
        ("text = 2020-01-01", "t.text: expected a string, got the date or time 2020-01-01"),
        ("path = 3", "t.path: expected a path in quotes, got 3"),
        ('path = ""', 't.path: expected a path, got ""'),
        ('choice = "of"', 't.choice: must be one of "auto", "off", "max", got "of" (did you mean "off"?)'),
        ("choice = true", 't.choice: must be one of "auto", "off", "max", got true'),
        (
            'mixed = "mx"',
            't.mixed: expected an integer or one of "auto", "off", "max", got the string "mx"'
            ' (did you mean "max"?)',
        ),
        ("mixed = 1", "t.mixed: must be at least 2, got 1"),
        (
            'mixed = "4"',
            't.mixed: expected an integer or one of "auto", "off", "max", got the string "4"'
            " (write 4 without quotes)",
        ),
        ('names = "abc"', 't.names: expected an array of strings, got the string "abc" (write ["abc"])'),
        ("names = ['a', 3]", 't.names[1]: expected a string, got 3 (write "3")'),
        ("numbers = [1, -1]", "t.numbers[1]: must be at least 0, got -1.0"),
        ("one_or_more = [1]", "t.one_or_more[0]: expected a path in quotes, got 1"),
        ("one_or_more = 1", "t.one_or_more: expected a path or an array of paths, got 1"),
        ("inner = 3", "t.inner: expected a table [t.inner], got 3"),
        (
            "[[t.inner]]\ndepth = 1",
            "t.inner: expected one table, got an array of tables (write [t.inner], not [[t.inner]])",
        ),
        ("[t.inner]\ndepth = 0", "t.inner.depth: must be at least 1, got 0 layers"),
        ("[t.inner]", "t.inner.depth: required key is missing (Depth.)"),
        ("[t.many]\ndepth = 1", "t.many: expected an array of tables, got a table"),
        (
            "[[t.many]]\ndepth = 1\n[[t.many]]\ndepht = 1",
            "t.many[1].depht: unknown key (did you mean depth?)",
        ),
        ("table = { a = 'x' }", 't.table.a: expected an integer, got the string "x"'),
        ("table = 3", "t.table: expected a table, got 3"),
        ("Integer = 3", "t.Integer: unknown key (did you mean integer?)"),
        ("one-or-more = 'a'", "t.one-or-more: unknown key (did you mean one_or_more?)"),
        ("zzz = 1", "t.zzz: unknown key (there are 16 known keys; `retrograd config-schema` lists them)"),
        ("token = 12345", "t.token: expected a string (the value seen is not shown: it may be secret)"),
    ],
)
def test_refusals(parse: Parse, body: str, message: str) -> None:
    shown = problems_of(parse, body)
    assert any(line.partition(": ")[2] == message for line in shown), shown


def test_all_problems_of_a_table_are_reported_with_their_lines(parse: Parse) -> None:
    shown = problems_of(
        parse, "\ninteger = 1.5\n# comment\nnumbers = [\n  1,\n  'x',\n]\nflg = true\n[t.inner]\n"
    )
    assert [line.partition(": ")[0] for line in shown] == [
        "run.toml:3",
        "run.toml:7",
        "run.toml:9",
        "run.toml:10",
    ]


def test_a_missing_section_is_one_problem(parse: Parse) -> None:
    value, problems = structure(Inner, parse("").table("inner"))
    assert value is None
    assert [str(p) for p in problems] == ["run.toml: [inner]: this section is missing (required key: depth)"]


def test_an_absent_table_has_its_defaults(parse: Parse) -> None:
    assert structure(Example, parse("").table("t")) == (Example(), [])


def test_keys_that_select_the_class_are_not_its_own(parse: Parse) -> None:
    table = parse('[t]\ntype = "x"\ndepth = 1\n').table("t")
    assert structure(Inner, table, ignore=("type",)) == (Inner(depth=1), [])


def test_accepted_keys_are_known_in_spite_of_problems(parse: Parse) -> None:
    read = read_table(Example, parse("[t]\ninteger = 5\nnumber = 'x'\n").table("t"))
    assert read.value is None
    assert read.keys["integer"] == 5
    assert read.keys["choice"] == "auto"
    assert "number" not in read.keys


def test_paths_of_overrides_resolve_against_the_working_directory(parse: Parse, tmp_path: Path) -> None:
    document = parse('[t]\npath = "a"\nlocator = "m.gguf"\n')
    value, _ = structure(Example, document.table("t"))
    assert value is not None
    assert (value.path, value.locator) == (tmp_path / "a", str(tmp_path / "m.gguf"))
    document = document.with_set("t.path=a").with_value("t.locator", "m.gguf", where="--model")
    value, _ = structure(Example, document.table("t"))
    assert value is not None
    assert (value.path, value.locator) == (Path.cwd() / "a", str(Path.cwd() / "m.gguf"))


def test_python_values_may_be_paths_and_tuples() -> None:
    document = Document.from_values({"t": {"path": Path("/a"), "locator": Path("/m"), "names": ("x",)}})
    value, problems = structure(Example, document.table("t"))
    assert problems == []
    assert value is not None
    assert (value.path, value.locator, value.names) == (Path("/a"), "/m", ("x",))


@attrs.frozen(kw_only=True)
class Validated:
    """Validators of the class itself."""

    block_size: int = key(1024, doc="Elements.")
    names: tuple[str, ...] = key(
        ("a",),
        doc="Names.",
    )
    low: float = key(0.0, doc="Lower.")
    high: float = key(1.0, doc="Upper.")

    @block_size.validator
    def _power_of_two(self, attribute: attrs.Attribute[int], value: int) -> None:
        if value < 1 or value & (value - 1):
            raise ValueError(f"must be a power of two, got {value}")

    @names.validator
    def _not_empty(self, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
        if not value:
            raise ValueError("must not be empty")

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError([Problem(where="", message="low must not be above high")])


def test_validators_become_problems_at_their_keys(parse: Parse) -> None:
    shown = problems_of(parse, "low = 0.5\nblock_size = 12\nnames = []\n", Validated)
    assert shown == [
        "run.toml:3: t.block_size: must be a power of two, got 12",
        "run.toml:4: t.names: must not be empty",
    ]


def test_a_check_after_construction_is_a_problem_of_the_table(parse: Parse) -> None:
    assert problems_of(parse, "low = 2.0\n", Validated) == ["run.toml:1: t: low must not be above high"]


@attrs.frozen(kw_only=True)
class Excluding:
    """Keys that exclude each other."""

    base: str = key("", doc="Base.")
    rank: int = key(8, doc="Rank.", excluded_by="base")


def test_excluded_keys(parse: Parse) -> None:
    assert problems_of(parse, "rank = 8\n\nbase = 'x'\n", Excluding) == [
        "run.toml:2: t.rank: cannot be given together with base (run.toml:4) (leave out rank or base)"
    ]
    assert structure(Excluding, parse("[t]\nbase = 'x'\n").table("t"))[1] == []


def test_classes_that_no_toml_can_fill_are_faults_of_the_plugin(parse: Parse) -> None:
    @attrs.frozen(kw_only=True)
    class Wrong:
        values: set[int] = key(factory=set, doc="A set.")

    @attrs.frozen(kw_only=True)
    class Unresolved:
        value: "Missing" = key(None, doc="Unknown.")  # type: ignore[name-defined]  # noqa: F821, UP037

    table = parse("[t]\n").table("t")
    with pytest.raises(
        PluginError, match=r"Wrong\.values: set\[int\] is not a type that a TOML key can have"
    ):
        structure(Wrong, table)
    with pytest.raises(
        PluginError, match="Unresolved: a key's annotation cannot be resolved: name 'Missing'"
    ):
        structure(Unresolved, table)
    with pytest.raises(PluginError, match="must be an attrs class"):
        structure(dict, table)
