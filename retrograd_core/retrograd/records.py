"""JSON Lines, read strictly: every bad line is found and named before anything is trained."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from retrograd_hookspecs import DataError, Problem

MAX_SHOWN = 50
"""Problems that an error lists; the rest is counted."""

_BOM = b"\xef\xbb\xbf"
T = TypeVar("T")


class RecordError(Exception):
    """What is wrong with one record, where in it, and how to mend it."""

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message, self.key, self.hint = message, key, hint


def read_records(path: Path, parse: Callable[[dict[str, Any], str], T]) -> list[T]:
    """`parse(record, origin)` of every record of a JSON Lines file; `origin` is `file:line`.

    Lines are counted from 1; blank ones are allowed; a byte order mark at the start is skipped.

    Raises: `DataError` with one problem a bad line, if `parse` raised `RecordError` or `DataError` or the
    line is not a JSON object in UTF-8 with finite numbers and unique keys; also for a file without records.
    """
    results: list[T] = []
    problems: list[Problem] = []
    count = 0
    for number, line in _lines(path):
        if not line.strip():
            continue
        count += 1
        origin = f"{path}:{number}"
        try:
            results.append(parse(parse_object(line), origin))
        except RecordError as error:
            problems.append(Problem(where=origin, key=error.key, message=error.message, hint=error.hint))
        except DataError as error:
            problems.extend(
                Problem(where=origin, key=p.key, message=p.message, hint=p.hint) for p in error.problems
            )
    if problems:
        raise DataError(shortened(problems, path, count))
    if not count:
        raise DataError([Problem(where=str(path), message="holds no records", hint="one JSON object a line")])
    return results


def shortened(problems: list[Problem], path: Path, count: int) -> list[Problem]:
    """The first `MAX_SHOWN` problems and one that counts the rest."""
    rest = len(problems) - MAX_SHOWN
    if rest <= 0:
        return problems
    message = f"{rest} more lines are wrong ({len(problems)} of {count} records)"
    return [*problems[:MAX_SHOWN], Problem(where=str(path), message=message)]


def parse_object(line: bytes) -> dict[str, Any]:
    """A JSON object. Raises `RecordError` with the column, in characters from 1, where it stops being one."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        wide = "; this looks like UTF-16" if line[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in line else ""
        raise RecordError(
            f"byte {error.start + 1} of the line, 0x{line[error.start]:02X}, is not UTF-8",
            hint=f"save the file as UTF-8{wide}",
        ) from None
    try:
        value = json.loads(
            text.rstrip("\r\n"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except json.JSONDecodeError as error:
        raise RecordError(
            f"is not valid JSON: {error.msg} at column {error.pos + 1}", hint=_near(text, error.pos)
        ) from None
    except RecursionError:
        raise RecordError("is nested too deeply") from None
    except ValueError as error:
        raise RecordError(f"holds a number that cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"is {_kind(value)}, not a JSON object", hint='expected {"messages": […]}')
    _refuse_surrogates(value, text)
    return value


def kind_of(value: Any) -> str:
    """The JSON name of a value's type with its article, and the value where it is short."""
    shown = json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, str) or len(shown) > 40:
        return _kind(value)
    return f"{_kind(value)} {shown}"


def read_bytes(path: Path) -> bytes:
    """Contents of a data file. Raises `DataError` that names the path if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError([_unreadable(path, error)]) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(_BOM) if number == 1 else line
    except OSError as error:
        raise DataError([_unreadable(path, error)]) from error


def _unreadable(path: Path, error: OSError) -> Problem:
    hint = "name a file" if isinstance(error, IsADirectoryError) else "check the path"
    return Problem(where=str(path), message=f"cannot be read: {error.strerror or error}", hint=hint)


def _refuse_constant(name: str) -> NoReturn:
    raise RecordError(f"holds {name}, which is not JSON", hint="numbers must be finite")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RecordError(f"holds the number {text}, which is too large", hint="numbers must be finite")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise RecordError(f"holds the key {name!r} twice in one object", hint="keep one of them")
        result[name] = value
    return result


def _refuse_surrogates(value: Any, text: str) -> None:
    """Half of a surrogate pair (`\\ud83d` alone) is not a character and cannot be encoded."""
    if "\\u" not in text:
        return
    shown = json.dumps(value, ensure_ascii=False)
    try:
        shown.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(shown[error.start])
        raise RecordError(
            f"holds \\u{code:04x}, half of a surrogate pair", hint="write the character itself"
        ) from None


def _near(text: str, position: int) -> str:
    shown = text[max(position - 20, 0) : position + 20].strip()
    return f"near {shown!r}" if shown else ""


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object")
