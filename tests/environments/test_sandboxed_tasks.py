"""Tasks of scenarios: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from retrograd_hookspecs import DataError, Scenario
from retrograd_plugins.environments._sandboxed_tasks import PROTECTED, protects, task_of, tasks_of


def scenario(env: Any, line: int = 1) -> Scenario:
    return Scenario(id=f"s{line}", user="u", metadata={"env": env}, origin=f"tasks.jsonl:{line}")


def problems(env: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        task_of(scenario(env), ("python", "base"))
    return [str(problem) for problem in caught.value.problems]


def test_everything_is_read() -> None:
    task = task_of(
        scenario(
            {
                "files": {"src/a.py": "é", "b": ""},
                "setup": ["pip install -e .", ["git", "init"]],
                "verify": {
                    "command": ["pytest", "-q"],
                    "reward_on_success": 3,
                    "files": {"tests/hidden.py": "x"},
                    "protect": ["tests/**"],
                },
                "summary": "git diff",
                "toolset": "base",
            }
        ),
        ("python", "base"),
    )
    assert task.files == {"src/a.py": "é".encode(), "b": b""}
    assert task.setup == (("sh", "-c", "pip install -e ."), ("git", "init"))
    assert task.summary == ("sh", "-c", "git diff")
    assert task.toolset == "base"
    assert task.verify is not None
    assert task.verify.command == ("pytest", "-q")
    assert task.verify.reward_on_success == 3.0
    assert task.verify.files == {"tests/hidden.py": b"x"}
    assert task.verify.protect == ("tests/**",)


def test_defaults() -> None:
    task = task_of(scenario({"verify": {"command": "make test"}}), ())
    assert task.verify is not None
    assert (task.verify.reward_on_success, task.verify.protect) == (1.0, PROTECTED)
    empty = task_of(Scenario(id="a", user="u"), ())
    assert (empty.files, empty.setup, empty.verify, empty.summary, empty.toolset) == ({}, (), None, None, "")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"file": {}}, "metadata.env.file: unknown key (did you mean files?)"),
        ({"files": []}, "metadata.env.files: must be an object"),
        ({"files": {"/etc/passwd": ""}}, "must be a relative path"),
        ({"files": {"a/../../b": ""}}, "leads out of the working directory"),
        ({"files": {"a//b": ""}}, "is not the plain path of a file"),
        ({"files": {"": ""}}, "is not the plain path of a file"),
        ({"files": {"./a": ""}}, "is not the plain path of a file"),
        ({"files": {"a\nb": ""}}, "line break"),
        ({"files": {"a": 1}}, "must be a string"),
        ({"files": {"a": "", "a/b": ""}}, "is a file, and the directory of 'a/b'"),
        ({"setup": "make"}, "must be a list of commands"),
        ({"setup": [""]}, "metadata.env.setup[0]: is empty"),
        ({"setup": [["a", 1]]}, "metadata.env.setup[0]: must be a string or a list of strings"),
        ({"setup": ["a\0b"]}, "metadata.env.setup[0]"),
        ({"summary": []}, "metadata.env.summary: is empty"),
        ({"verify": ["pytest"]}, "must be an object with a command"),
        ({"verify": {}}, "metadata.env.verify.command: required key is missing"),
        ({"verify": {"comand": ["x"], "command": "x"}}, "did you mean command?"),
        ({"verify": {"command": "x", "reward_on_success": 0}}, "success would be worth as much as failure"),
        ({"verify": {"command": "x", "reward_on_success": True}}, "must be a finite number"),
        ({"verify": {"command": "x", "reward_on_success": float("nan")}}, "must be a finite number"),
        ({"verify": {"command": "x", "protect": "tests"}}, "must be a list of patterns"),
        ({"verify": {"command": "x", "files": {"/a": ""}}}, "metadata.env.verify.files['/a']"),
        ({"toolset": "pyton"}, "did you mean python?"),
        ({"toolset": 1}, "metadata.env.toolset: must be a string"),
    ],
)
def test_what_is_refused(env: Any, said: str) -> None:
    found = problems(env)
    assert len(found) == 1, found
    assert said in found[0]
    assert found[0].startswith("tasks.jsonl:1: metadata.env")


def test_all_problems_of_all_scenarios_are_reported() -> None:
    bad = [scenario({"files": {"/a": ""}, "setup": [""]}, 3), scenario({}, 4), scenario({"x": 1}, 5)]
    with pytest.raises(DataError) as caught:
        tasks_of(bad, ())
    assert [problem.where for problem in caught.value.problems] == ["tasks.jsonl:3"] * 2 + ["tasks.jsonl:5"]


@pytest.mark.parametrize(
    ("path", "is_protected"),
    [
        ("tests/a/b.txt", True),
        ("test_x.py", True),
        ("a/b/test_x.py", True),
        ("a/x_test.py", True),
        ("conftest.py", True),
        ("src/conftest.py", True),
        ("src/x.test.ts", True),
        ("package.json", True),
        ("src/tests.py", False),
        ("contest.py", False),
        ("src/latest.py", False),
        ("mytests/a.py", False),
        ("test_x.pyc", False),
    ],
)
def test_what_is_protected_by_default(path: str, is_protected: bool) -> None:
    assert protects(PROTECTED)(path) == is_protected


def test_patterns() -> None:
    matches = protects(["*.cfg", "a/**/b", "c?"])
    assert [p for p in ("x.cfg", "d/x.cfg", "a/b", "a/x/y/b", "c1", "c12", "c/") if matches(p)] == [
        "x.cfg",
        "a/b",
        "a/x/y/b",
        "c1",
    ]
    assert not protects([])("anything")
