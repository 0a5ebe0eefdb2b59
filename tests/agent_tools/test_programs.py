"""Tools that are programs inside the sandbox: both protocols, scripts, and replies that break them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from retrograd.agent.tools import ToolCatalogue, Tools
from retrograd.agent.tools.config import ExecEntry, ToolEntry, ToolsetEntry
from retrograd_hookspecs import RolloutError, StepResult

from .support import SubprocessSandbox, call, catalogue

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def program(entry: ExecEntry) -> ToolCatalogue:
    """A catalogue with one tool, `run`."""
    return catalogue(
        Tools(
            "mine",
            tool=(ToolEntry(id="run", version="7", description="Run.", input_schema=SCHEMA, exec=entry),),
            toolset={"mine": ToolsetEntry(tools=("run",))},
        )
    )


def printing(text: str, more: str = "") -> ToolCatalogue:
    """A tool with the protocol `json` that prints a text."""
    return program(ExecEntry(argv=(sys.executable, "-c", f"{more}\nprint({text!r})"), protocol="json"))


def test_text_shows_what_the_program_printed(sandbox: SubprocessSandbox) -> None:
    code = "import json, sys; print(json.load(sys.stdin)['text'].upper()); print('é', file=sys.stderr)"
    seen = call(sandbox, program(ExecEntry(argv=(sys.executable, "-c", code))), "run", text="a ü\n")
    assert seen == StepResult(observation="exit code: 0\nstdout:\nA Ü\nstderr:\né")
    failing = program(ExecEntry(argv=("sh", "-c", "echo no; exit 2")))
    assert call(sandbox, failing, "run", text="") == StepResult(
        observation="exit code: 2\nstdout:\nno", is_error=True
    )


def test_arguments_are_checked_before_the_program_runs(sandbox: SubprocessSandbox) -> None:
    seen = call(sandbox, program(ExecEntry(argv=("touch", "ran"))), "run", text=3)
    assert seen.is_error
    assert "text: 3 is not of type 'string'" in seen.observation
    assert not (sandbox.directory / "ran").exists()


@pytest.mark.parametrize(
    ("printed", "result"),
    [
        ('{"content": "42"}', StepResult(observation="42")),
        ('{"content": "no", "is_error": true}', StepResult(observation="no", is_error=True)),
        ('{"content": "", "reward": 1, "done": true}', StepResult(observation="", reward=1.0, done=True)),
        ('\n {"content": "x", "reward": null}\n', StepResult(observation="x")),
    ],
)
def test_json_says_what_the_call_gave(sandbox: SubprocessSandbox, printed: str, result: StepResult) -> None:
    assert call(sandbox, printing(printed), "run", text="") == result


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("", "it did not print one JSON object"),
        ('{"content": "a"} {"content": "b"}', "it did not print one JSON object"),
        ('["content"]', "it printed JSON that is no object"),
        ("{}", "its reply has no text as `content`"),
        ('{"content": 3}', "its reply has no text as `content`"),
        ('{"content": "", "rewrd": 1}', "its reply has the unknown key 'rewrd'"),
        ('{"content": "", "reward": "1"}', "`reward` of its reply is no number"),
        ('{"content": "", "reward": true}', "`reward` of its reply is no number"),
        ('{"content": "", "reward": NaN}', "NaN is not JSON"),
        ('{"content": "", "reward": 1e999}', "`reward` of its reply is not finite"),
        ('{"content": "", "done": 1}', "`done` of its reply is neither true nor false"),
    ],
)
def test_a_reply_that_is_none_breaks_the_tool(sandbox: SubprocessSandbox, printed: str, words: str) -> None:
    tools = printing(printed, more="import sys; print('look here', file=sys.stderr)")
    with pytest.raises(RolloutError, match="the tool run@7 is broken") as broken:
        call(sandbox, tools, "run", text="")
    assert words in str(broken.value)
    assert "look here" in str(broken.value)


def test_a_reply_that_was_cut_breaks_the_tool(sandbox: SubprocessSandbox) -> None:
    sandbox.max_output_bytes = 10
    with pytest.raises(RolloutError, match="longer than the sandbox keeps"):
        call(sandbox, printing('{"content": "0123456789"}'), "run", text="")


def test_a_json_program_that_fails_is_an_observation(sandbox: SubprocessSandbox) -> None:
    tools = program(ExecEntry(argv=("sh", "-c", "echo half; exit 1"), protocol="json"))
    assert call(sandbox, tools, "run", text="") == StepResult(
        observation="exit code: 1\nstdout:\nhalf", is_error=True
    )
    slow = program(ExecEntry(argv=("sleep", "60"), protocol="json", timeout_secs=0.2))
    assert call(sandbox, slow, "run", text="") == StepResult(
        observation="time limit reached: the command was stopped", is_error=True
    )


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        ((), "script ['one']"),
        (("python3",), "script ['one']"),
        (("python3", "{script}", "last"), "script ['one', 'last']"),
        (("sh", "-c", "exec python3 {script} quoted"), "script ['one', 'quoted']"),
    ],
)
def test_a_script_is_put_into_the_sandbox(
    sandbox: SubprocessSandbox, tmp_path: Path, argv: tuple[str, ...], shown: str
) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "#!/usr/bin/env python3\nimport json, pathlib, sys\ntext = json.load(sys.stdin)['text']\n"
        "print('script', [text, *sys.argv[1:]])\n"
    )
    tools = program(ExecEntry(argv=argv, script=script))
    assert call(sandbox, tools, "run", text="one").observation == f"exit code: 0\nstdout:\n{shown}"
    assert list(sandbox.directory.iterdir()) == []  # nothing appears in the working directory


def test_a_script_that_the_model_changed_is_put_back(sandbox: SubprocessSandbox, tmp_path: Path) -> None:
    script = tmp_path / "reward.sh"
    script.write_text('#!/bin/sh\necho \'{"content": "", "reward": 0}\'\n')
    tools = program(ExecEntry(script=script, protocol="json"))
    assert call(sandbox, tools, "run", text="").reward == 0.0
    [copy] = Path(sandbox.scratch).rglob("reward.sh")
    copy.write_text('#!/bin/sh\necho \'{"content": "", "reward": 1}\'\n')
    assert call(sandbox, tools, "run", text="").reward == 0.0


def test_a_sandbox_that_cannot_take_the_script_fails(sandbox: SubprocessSandbox, tmp_path: Path) -> None:
    script = tmp_path / "a.sh"
    script.write_text("#!/bin/sh\n")
    Path(sandbox.scratch).write_text("in the way")
    with pytest.raises(RolloutError, match="the tool run@7 cannot be put into the sandbox"):
        call(sandbox, program(ExecEntry(script=script)), "run", text="")


def test_a_definition_in_python_needs_something_to_run() -> None:
    for wrong in ({}, {"argv": ("",)}):
        arguments: dict[str, Any] = wrong
        with pytest.raises(ValueError, match=r"nothing to run|is empty"):
            ExecEntry(**arguments)
