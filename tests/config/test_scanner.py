"""Lines of keys and tables, against documents whose layout is known."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.config.scanner import KeyPath, scan

NAMES = st.sampled_from(["a", "b", "lr", "x-1", "3", "a.b", "ключ", "with space", 'q"uote', "[x]", "#", "="])
BLANKS = st.sampled_from(["", "", "# [not] = a table\n", "\n", "  \t\n", '# """\n', "\r\n"])
SCALARS = st.sampled_from(
    [
        ("1", 0),
        ("-1.5e3", 0),
        ("true", 0),
        ("inf", 0),
        ("1979-05-27 07:32:00Z", 0),
        ('"# ] } , = \\" \\\\"', 0),
        ("'[a] = \"\\'", 0),
        ('"""\n[t]\nk = 1 # """', 2),
        ('""""two"" quotes\\\n   \n"""""', 2),
        ("'''\nit''s\n'''", 2),
        ('""', 0),
        ("''''''", 0),
    ]
)


class Writer:
    """Writes TOML with varied layout and records the line of every path."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.text = ""
        self.lines: dict[KeyPath, int] = {}

    @property
    def line(self) -> int:
        return self.text.count("\n") + 1

    def key(self, name: str) -> str:
        bare = name.replace("-", "").isascii() and name.replace("-", "").isalnum()
        styles = [json.dumps(name, ensure_ascii=True)]
        if "'" not in name:
            styles.append(f"'{name}'")
        if bare:
            styles.append(name)
        return str(self.draw(st.sampled_from(styles)))

    def value(self, path: KeyPath, depth: int) -> None:
        kind = self.draw(
            st.sampled_from(["scalar", "scalar", "array", "inline"] if depth < 3 else ["scalar"])
        )
        if kind == "scalar":
            self.text += self.draw(SCALARS)[0]
        elif kind == "array":
            self.text += "["
            for index in range(self.draw(st.integers(0, 3))):
                self.text += self.draw(BLANKS)
                self.lines[(*path, index)] = self.line
                self.value((*path, index), depth + 1)
                self.text += self.draw(BLANKS) + ","
            self.text += self.draw(BLANKS) + "]"
        else:
            self.text += "{"
            names = self.draw(st.lists(NAMES, unique=True, max_size=3))
            for position, name in enumerate(names):
                self.text += " , " if position else " "
                self.pair(path, name, depth + 1)
            self.text += " }"

    def pair(self, table: KeyPath, name: str, depth: int) -> None:
        path = (*table, name)
        line = self.line
        self.lines[path] = line
        self.text += self.key(name)
        for part in self.draw(st.lists(NAMES, max_size=2)):
            path = (*path, part)
            self.lines[path] = line
            self.text += self.draw(st.sampled_from([".", " . "])) + self.key(part)
        self.text += self.draw(st.sampled_from(["=", " = ", "\t=  "]))
        self.value(path, depth)

    def pairs(self, table: KeyPath, taken: set[str]) -> None:
        for name in self.draw(st.lists(NAMES, unique=True, max_size=4)):
            self.text += self.draw(BLANKS)
            if name not in taken:
                self.pair(table, name, 0)
                self.text += self.draw(st.sampled_from(["\n", " # comment\n", "\r\n"]))

    def header(self, opening: str, names: list[str], closing: str) -> int:
        self.text += self.draw(BLANKS)
        line = self.line
        self.text += f"{opening} " + ".".join(self.key(name) for name in names) + f" {closing}\n"
        return line


@st.composite
def documents(draw: Any) -> tuple[str, dict[KeyPath, int]]:
    writer = Writer(draw)
    sections = draw(st.lists(NAMES, unique=True, min_size=1, max_size=4))
    writer.pairs((), taken=set(sections))
    for name in sections:
        if draw(st.booleans()):
            line = writer.header("[", [name], "]")
            writer.lines[(name,)] = line
            writer.pairs((name,), taken={"sub"})
            if draw(st.booleans()):
                line = writer.header("[", [name, "sub", "deep"], "]")
                writer.lines[(name, "sub")] = line
                writer.lines[(name, "sub", "deep")] = line
                writer.pairs((name, "sub", "deep"), taken=set())
        else:
            for index in range(draw(st.integers(1, 3))):
                line = writer.header("[[", [name], "]]")
                writer.lines.setdefault((name,), line)
                writer.lines[(name, index)] = line
                writer.pairs((name, index), taken={"sub"})
                if draw(st.booleans()):
                    line = writer.header("[", [name, "sub"], "]")
                    writer.lines[(name, index, "sub")] = line
                    writer.pairs((name, index, "sub"), taken=set())
    return writer.text, writer.lines


def paths_of(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    found = {path} if path else set()
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, inner in items:
        found |= paths_of(inner, (*path, part))
    return found


@settings(max_examples=300, deadline=None)
@given(documents())
def test_every_path_has_its_line(document: tuple[str, dict[KeyPath, int]]) -> None:
    text, lines = document
    values = tomllib.loads(text)
    positions = scan(text)
    assert positions.lines == lines
    assert set(positions.lines) == paths_of(values)
    assert positions.duplicates == ()


@settings(max_examples=300, deadline=None)
@given(documents(), st.integers(0, 10_000), st.text(alphabet="[]{}=\"'#,.\n\\ax", max_size=3))
def test_damaged_text_ends_the_scan_without_an_exception(
    document: tuple[str, dict[KeyPath, int]], position: int, damage: str
) -> None:
    text = document[0]
    cut = position % (len(text) + 1)
    damaged = text[:cut] + damage + text[cut + 1 :]
    positions = scan(damaged)
    last = damaged.count("\n") + 1
    assert all(1 <= line <= last for line in positions.lines.values())


def test_an_explicit_header_wins_over_an_earlier_mention() -> None:
    assert scan("[a.b]\nx = 1\n\n[a]\ny = 2\n").lines[("a",)] == 4


def test_duplicates_are_named_with_both_lines() -> None:
    (found,) = scan("[t]\na = 1\nb = 2\na = 3\n").duplicates
    assert (found.path, found.first, found.second) == (("t", "a"), 2, 4)
    (found,) = scan("[t]\n[u]\n[t]\n").duplicates
    assert (found.path, found.first, found.second) == (("t",), 1, 3)


def test_deep_nesting_does_not_exhaust_the_stack() -> None:
    assert scan("a = " + "[" * 100_000).lines[("a",)] == 1
