"""Each built-in tool in a real sandbox: what the model sees, and that it is always the same."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jsonschema
import pytest

from retrograd.agent.tools import ToolCatalogue, Tools

from .support import SubprocessSandbox, call, catalogue


@pytest.fixture(scope="module")
def python_tools() -> ToolCatalogue:
    return catalogue(Tools("python", scenario_toolsets=("base", "typescript")))


def test_toolsets_have_the_documented_tools_in_order(python_tools: ToolCatalogue) -> None:
    names = {name: [spec.name for spec in specs] for name, specs in python_tools.specs().items()}
    base = ["bash", "read_file", "write_file", "edit_file", "list_dir", "grep", "submit"]
    assert names == {
        "python": [*base, "python", "run_tests"],
        "base": base,
        "typescript": [*base, "node", "run_tests"],
    }
    for specs in python_tools.specs().values():
        for spec in specs:
            jsonschema.Draft202012Validator.check_schema(dict(spec.input_schema))
            assert spec.description
            assert all(prop.get("description") for prop in spec.input_schema["properties"].values())


def test_bash_shows_exit_code_and_both_streams(
    sandbox: SubprocessSandbox, python_tools: ToolCatalogue
) -> None:
    seen = call(sandbox, python_tools, "bash", command="echo out; echo err >&2; exit 3")
    assert seen.observation == "exit code: 3\nstdout:\nout\nstderr:\nerr"
    assert seen.is_error
    quiet = call(sandbox, python_tools, "bash", command="true")
    assert (quiet.observation, quiet.is_error) == ("exit code: 0", False)
    assert "must not hold a NUL" in call(sandbox, python_tools, "bash", command="echo \0").observation
    assert call(sandbox, python_tools, "bash", command="printf 'h\\xc3'").observation == (
        "exit code: 0\nstdout:\nh\ufffd"
    )


def test_a_command_that_does_not_end_is_stopped(
    sandbox: SubprocessSandbox, python_tools: ToolCatalogue
) -> None:
    sandbox.timeout_secs = 0.3
    seen = call(sandbox, python_tools, "bash", command="echo begun; sleep 100")
    assert seen.observation == "time limit reached: the command was stopped\nstdout:\nbegun"
    assert seen.is_error


def test_long_output_is_cut_with_a_fixed_mark(
    sandbox: SubprocessSandbox, python_tools: ToolCatalogue
) -> None:
    sandbox.max_output_bytes = 1000
    seen = call(sandbox, python_tools, "bash", command="yes | head -c 5000")
    assert seen.observation.endswith("[output cut: longer than the sandbox keeps]")
    sandbox.max_output_bytes = 1 << 20
    seen = call(sandbox, python_tools, "bash", command="seq 1 100000")
    assert "[cut: longer than 65536 bytes]" in seen.observation
    assert seen.observation.endswith("99999\n100000")
    assert len(seen.observation) < 66_000


def test_files_are_written_edited_and_read(sandbox: SubprocessSandbox, python_tools: ToolCatalogue) -> None:
    wrote = call(sandbox, python_tools, "write_file", path="a/b.txt", content="eins\nzwei\nzwei\nvier é\n")
    assert wrote.observation == "wrote 23 bytes to a/b.txt"
    assert (sandbox.directory / "a/b.txt").read_text() == "eins\nzwei\nzwei\nvier é\n"
    read = call(sandbox, python_tools, "read_file", path="a/b.txt", first_line=2, last_line=3)
    assert (read.observation, read.is_error) == ("zwei\nzwei", False)
    many = call(sandbox, python_tools, "edit_file", path="a/b.txt", old_text="zwei", new_text="2")
    assert many.is_error
    assert many.observation.startswith("old_text occurs 2 times in a/b.txt")
    every = call(
        sandbox, python_tools, "edit_file", path="a/b.txt", old_text="zwei", new_text="2", replace_all=True
    )
    assert every.observation == "replaced 2 occurrences in a/b.txt"
    one = call(sandbox, python_tools, "edit_file", path="a/b.txt", old_text="vier é\n", new_text="")
    assert one.observation == "replaced 1 occurrence in a/b.txt"
    assert call(sandbox, python_tools, "read_file", path="a/b.txt").observation == "eins\n2\n2\n"


def test_line_ends_survive_an_edit(sandbox: SubprocessSandbox, python_tools: ToolCatalogue) -> None:
    (sandbox.directory / "dos.txt").write_bytes(b"a\r\nb\r\n")
    call(sandbox, python_tools, "edit_file", path="dos.txt", old_text="b", new_text="c")
    assert (sandbox.directory / "dos.txt").read_bytes() == b"a\r\nc\r\n"


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("read_file", {"path": "none"}, "none cannot be read: there is no such file"),
        ("read_file", {"path": "dir"}, "dir cannot be read: it is a directory"),
        ("read_file", {"path": "binary"}, "binary is not a text file in UTF-8"),
        ("read_file", {"path": "text/below"}, "text/below cannot be read: a part of the path is a file"),
        ("read_file", {"path": "x" * 300}, f"{'x' * 300} cannot be read: the name is too long"),
        ("read_file", {"path": "text", "first_line": 9}, "text has only 2 lines"),
        (
            "read_file",
            {"path": "text", "first_line": 2, "last_line": 1},
            "last_line 1 is before first_line 2",
        ),
        ("read_file", {"path": ""}, "path must be the name of a file"),
        ("read_file", {}, "the arguments of read_file are wrong: 'path' is a required property"),
        ("write_file", {"path": "dir", "content": ""}, "dir cannot be written: it is a directory"),
        ("edit_file", {"path": "text", "old_text": "?", "new_text": "!"}, "old_text does not occur in text"),
        ("edit_file", {"path": "text", "old_text": "", "new_text": "!"}, "old_text is empty"),
        ("edit_file", {"path": "text", "old_text": "a", "new_text": "a"}, "nothing would change"),
        ("list_dir", {"path": "none"}, "there is no directory none"),
        ("list_dir", {"path": "text"}, "text is not a directory"),
        ("grep", {"pattern": "a(", "path": "."}, "pattern is not an extended regular expression"),
        ("grep", {"pattern": "a", "path": "none"}, "there is no file or directory none"),
        ("grep", {"pattern": ""}, "the arguments of grep are wrong: pattern: '' should be non-empty"),
        ("write_file", {"path": "a", "content": "\ud800"}, "content: the text holds half a character"),
    ],
)
def test_what_goes_wrong_has_fixed_words(
    sandbox: SubprocessSandbox, python_tools: ToolCatalogue, name: str, arguments: dict[str, str], words: str
) -> None:
    (sandbox.directory / "dir").mkdir()
    (sandbox.directory / "text").write_text("a\nb\n")
    (sandbox.directory / "binary").write_bytes(b"\xff\x00")
    seen = call(sandbox, python_tools, name, **arguments)
    assert seen.is_error
    assert words in seen.observation
    assert str(sandbox.directory) not in seen.observation


def test_a_long_file_is_cut_at_a_character(sandbox: SubprocessSandbox, python_tools: ToolCatalogue) -> None:
    (sandbox.directory / "long").write_text("é" * 40_000)
    seen = call(sandbox, python_tools, "read_file", path="long")
    assert seen.observation == "é" * 32_768 + "\n[cut: longer than 65536 bytes]"
    (sandbox.directory / "odd").write_text("a" + "é" * 40_000)
    seen = call(sandbox, python_tools, "read_file", path="odd")
    assert seen.observation == "a" + "é" * 32_767 + "\n[cut: longer than 65536 bytes]"
    (sandbox.directory / "whole").write_text("a" * 65_536)
    assert call(sandbox, python_tools, "read_file", path="whole").observation == "a" * 65_536


def test_a_directory_is_listed_in_one_order(sandbox: SubprocessSandbox, python_tools: ToolCatalogue) -> None:
    assert call(sandbox, python_tools, "list_dir").observation == "(empty)"
    for name in ("b", "B", ".hidden", "a b", "-rf", "ä"):
        (sandbox.directory / name).write_text("")
    (sandbox.directory / "c").mkdir()
    seen = call(sandbox, python_tools, "list_dir")
    assert seen.observation.split("\n") == ["-rf", ".hidden", "B", "a b", "b", "c/", "ä"]
    for number in range(1200):
        (sandbox.directory / "c" / f"{number:04}").write_text("")
    listed = call(sandbox, python_tools, "list_dir", path="c").observation.split("\n")
    assert listed[-2:] == ["0999", "[and 200 more]"]


def test_grep_sorts_by_file_and_cuts(sandbox: SubprocessSandbox, python_tools: ToolCatalogue) -> None:
    for name in ("z.py", "a.py", "m/x y.py", "m/b.txt", ".git/config"):
        path = sandbox.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"first\nimport {path.stem}: é\n")
    (sandbox.directory / "blob").write_bytes(b"import\0")
    seen = call(sandbox, python_tools, "grep", pattern="^IMPORT .+é$", ignore_case=True)
    assert seen.observation.split("\n") == [
        "a.py:2:import a: é",
        "m/b.txt:2:import b: é",
        "m/x y.py:2:import x y: é",
        "z.py:2:import z: é",
    ]
    only = call(sandbox, python_tools, "grep", pattern="import", path="m", files="*.py")
    assert only.observation == "m/x y.py:2:import x y: é"
    assert call(sandbox, python_tools, "grep", pattern="nothing").observation == "no matches"
    dashed = call(sandbox, python_tools, "grep", pattern="--version")
    assert (dashed.observation, dashed.is_error) == ("no matches", False)
    (sandbox.directory / "long").write_text("import " + "x" * 600 + "\n" + "import\n" * 300)
    cut = call(sandbox, python_tools, "grep", pattern="import", path="long").observation.split("\n")
    assert cut[0].endswith("x [line cut]")
    assert cut[-1] == "[and 101 more]"


def test_programs_run_from_their_text(sandbox: SubprocessSandbox, python_tools: ToolCatalogue) -> None:
    seen = call(sandbox, python_tools, "python", code="print({'a', 'b', 'c', 'd'})\nraise ValueError('é')")
    assert seen.is_error
    assert 'File "<stdin>", line 2' in seen.observation
    again = call(sandbox, python_tools, "python", code="print({'a', 'b', 'c', 'd'})\nraise ValueError('é')")
    assert again == seen
    shown = call(sandbox, python_tools, "node", "typescript", code="console.log([1, 2].map(x => x * 2))")
    assert (shown.observation, shown.is_error) == ("exit code: 0\nstdout:\n[ 2, 4 ]", False)


def test_pytest_runs_without_durations(sandbox: SubprocessSandbox, python_tools: ToolCatalogue) -> None:
    (sandbox.directory / "test_sums.py").write_text(
        "import time\n\ndef test_right():\n    time.sleep(0.02)\n\n"
        "def test_wrong():\n    assert object() == 4\n"
    )
    first = call(sandbox, python_tools, "run_tests")
    assert not first.is_error
    assert "1 failed, 1 passed" in first.observation
    assert not re.search(r"\d+\.\d+s", first.observation)
    assert call(sandbox, python_tools, "run_tests") == first
    one = call(sandbox, python_tools, "run_tests", target="test_sums.py::test_right")
    assert one.observation.endswith("1 passed")
    nothing = call(sandbox, python_tools, "run_tests", target="none.py")
    assert nothing.is_error


def test_npm_test_runs_without_durations(sandbox: SubprocessSandbox, python_tools: ToolCatalogue) -> None:
    (sandbox.directory / "package.json").write_text(
        '{"name": "p", "version": "1.0.0", "scripts": {"test": "node --test"}}'
    )
    (sandbox.directory / "a.test.js").write_text(
        "const test = require('node:test'); const assert = require('assert');\n"
        "test('right', () => {});\ntest('wrong', () => assert.equal(1, 2));\n"
    )
    first = call(sandbox, python_tools, "run_tests", "typescript")
    assert not first.is_error
    assert "exit code: 1" in first.observation
    assert "wrong" in first.observation
    assert "duration_ms" not in first.observation
    assert not re.search(r"\d+\.\d+ ?ms", first.observation)
    assert call(sandbox, python_tools, "run_tests", "typescript") == first


@pytest.mark.parametrize(
    ("line", "steady"),
    [
        ("== 1 failed, 2 passed in 0.12s ==", "== 1 failed, 2 passed =="),
        ("3 passed in 75.01s (0:01:15)", "3 passed"),
        ("  2 passing (9ms)", "  2 passing"),
        ("  ✓ adds (12 ms)", "  ✓ adds"),
        (" ✓ src/a.test.ts (2 tests) 3ms", " ✓ src/a.test.ts (2 tests)"),
        ("Time:        0.512 s, estimated 1 s\nRan all.", "Ran all."),
        ("   Duration  301ms (transform 20ms)\n", ""),
        ("<object object at 0x7f61c30a0f10>", "<object object at 0x>"),
        ("waited in 3 rooms", "waited in 3 rooms"),
    ],
)
def test_durations_of_test_runners_are_left_out(line: str, steady: str) -> None:
    from retrograd_plugins.tool_factories.run_tests import _steady

    assert _steady(line.encode()).decode() == steady


def test_submit_ends_the_task(sandbox: SubprocessSandbox, python_tools: ToolCatalogue) -> None:
    seen = call(sandbox, python_tools, "submit")
    assert (seen.observation, seen.done, seen.is_error) == ("submitted", True, False)


def test_two_sandboxes_show_the_same(tmp_path: Path, python_tools: ToolCatalogue) -> None:
    """The same actions in another place, with another process history, give the same texts."""
    calls = (
        ("write_file", {"path": "m.py", "content": "def f():\n    return {'b', 'a', 'c'}\n"}),
        ("write_file", {"path": "test_m.py", "content": "import m\ndef test(): assert m.f() == 1\n"}),
        ("bash", {"command": "ls nothing; cat m.py; exit 4"}),
        ("list_dir", {}),
        ("grep", {"pattern": "f"}),
        ("python", {"code": "import m; print(m.f())"}),
        ("run_tests", {}),
        ("read_file", {"path": "none"}),
        ("edit_file", {"path": "m.py", "old_text": "'b'", "new_text": "'d'"}),
        ("submit", {}),
    )
    seen = []
    for number, name in enumerate(("one", "a/much/longer/name")):
        work = tmp_path / name
        work.mkdir(parents=True)
        os.utime(work, (number * 1e6, number * 1e6))
        box = SubprocessSandbox(work, str(tmp_path / f"scratch{number}"))
        seen.append([call(box, python_tools, tool, **arguments) for tool, arguments in calls])
    assert seen[0] == seen[1]
