"""Source lines of every key and table of a TOML text.

`tomllib` gives values without positions. This scanner walks the same text once and notes where each
path is written. It is made for text that `tomllib` accepted; on any other text it stops at the first
thing that it does not understand and keeps what it found, which is what error messages need.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import tomllib

import attrs

KeyPath = tuple[str | int, ...]
"""Keys, and indices of array elements: `("agent", "mcp_servers", 0, "name")`."""

_BLANK = re.compile(r"[ \t]*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[^\s.=\[\]{}\"'#,]+")
_SCALAR = re.compile(r"[^,\]}#\n]+")
_STRING = re.compile(
    r'"""(?:\\.|[^"\\]|"{1,2}(?!"))*"{3,5}'
    r"|'''(?:[^']|'{1,2}(?!'))*'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)


class _StopError(Exception):
    """The text is not valid TOML from here on."""


@attrs.frozen
class Duplicate:
    """A key or table that is written twice; lines from 1."""

    path: KeyPath
    first: int
    second: int


@attrs.frozen
class Positions:
    """Line (from 1) where each path is first written; a table's explicit header wins."""

    lines: dict[KeyPath, int]
    duplicates: tuple[Duplicate, ...]


def scan(text: str) -> Positions:
    """Positions of all keys, tables and array elements of a TOML text."""
    scanner = _Scanner(text)
    # What was found until then still helps to report the error that tomllib raises.
    with contextlib.suppress(_StopError, RecursionError):
        scanner.document()
    return Positions(scanner.lines, tuple(scanner.duplicates))


class _Scanner:
    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.duplicates: list[Duplicate] = []
        self._text = text
        self._at = 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._assigned: set[KeyPath] = set()
        self._headers: set[KeyPath] = set()
        self._array_lengths: dict[KeyPath, int] = {}

    def document(self) -> None:
        table: KeyPath = ()
        while True:
            self._skip(_BLANK_LINES)
            if self._at >= len(self._text):
                return
            if self._text.startswith("[[", self._at):
                table = self._array_header()
            elif self._text[self._at] == "[":
                table = self._header()
            else:
                self._key_value(table)

    def _header(self) -> KeyPath:
        line = self._line()
        self._at += 1
        path = self._resolve(self._dotted_key(), line)
        self._expect("]")
        if path in self._headers or path in self._assigned:
            self.duplicates.append(Duplicate(path, self.lines[path], line))
        self._headers.add(path)
        self.lines[path] = line
        return path

    def _array_header(self) -> KeyPath:
        line = self._line()
        self._at += 2
        *parents, last = self._dotted_key()
        self._expect("]]")
        array = (*self._resolve(parents, line), last)
        self.lines.setdefault(array, line)
        index = self._array_lengths.get(array, 0)
        self._array_lengths[array] = index + 1
        path = (*array, index)
        self.lines[path] = line
        return path

    def _resolve(self, keys: list[str], line: int) -> KeyPath:
        """Path of a header's keys: a key that names an array of tables means its last element."""
        path: KeyPath = ()
        for name in keys:
            path = (*path, name)
            self.lines.setdefault(path, line)
            if path in self._array_lengths:
                path = (*path, self._array_lengths[path] - 1)
        return path

    def _key_value(self, table: KeyPath) -> None:
        line = self._line()
        path = table
        for name in self._dotted_key():
            path = (*path, name)
            self.lines.setdefault(path, line)
        if path in self._assigned:
            self.duplicates.append(Duplicate(path, self.lines[path], line))
        self._assigned.add(path)
        self._expect("=")
        self._skip(_BLANK)
        self._value(path)

    def _dotted_key(self) -> list[str]:
        names = [self._simple_key()]
        while True:
            self._skip(_BLANK)
            if not self._text.startswith(".", self._at):
                return names
            self._at += 1
            names.append(self._simple_key())

    def _simple_key(self) -> str:
        self._skip(_BLANK)
        quoted = _STRING.match(self._text, self._at)
        if quoted is not None:
            self._at = quoted.end()
            try:
                return str(tomllib.loads(f"key = {quoted.group()}")["key"])
            except tomllib.TOMLDecodeError:
                raise _StopError from None
        bare = _BARE_KEY.match(self._text, self._at)
        if bare is None:
            raise _StopError
        self._at = bare.end()
        return bare.group()

    def _value(self, path: KeyPath) -> None:
        start = self._text[self._at : self._at + 1]
        if start == "[":
            self._array(path)
        elif start == "{":
            self._inline_table(path)
        else:
            match = (_STRING if start in ('"', "'") else _SCALAR).match(self._text, self._at)
            if match is None:
                raise _StopError
            self._at = match.end()

    def _array(self, path: KeyPath) -> None:
        self._at += 1
        index = 0
        while not self._closes("]"):
            element = (*path, index)
            self.lines[element] = self._line()
            self._value(element)
            index += 1

    def _inline_table(self, path: KeyPath) -> None:
        self._at += 1
        while not self._closes("}"):
            self._key_value(path)

    def _closes(self, bracket: str) -> bool:
        """Skip blanks and one comma; True if the bracket follows, which is then consumed."""
        self._skip(_BLANK_LINES)
        if self._text.startswith(",", self._at):
            self._at += 1
            self._skip(_BLANK_LINES)
        if self._text.startswith(bracket, self._at):
            self._at += 1
            return True
        if self._at >= len(self._text):
            raise _StopError
        return False

    def _expect(self, token: str) -> None:
        self._skip(_BLANK)
        if not self._text.startswith(token, self._at):
            raise _StopError
        self._at += len(token)

    def _skip(self, blank: re.Pattern[str]) -> None:
        match = blank.match(self._text, self._at)
        if match is not None:
            self._at = match.end()

    def _line(self) -> int:
        return bisect.bisect_left(self._newlines, self._at) + 1
