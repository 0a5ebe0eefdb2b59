"""The judge `command`: real programs, good and bad."""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from retrograd.config import Document, read_table
from retrograd.errors import ConfigError
from retrograd.testing.judges import check_judge
from retrograd_hookspecs import JudgeGroup, JudgeMember, Message, Score, ToolCall
from retrograd_plugins.judges._command import JudgeProgram, as_record, read_scores
from retrograd_plugins.judges._fixtures import read_fixtures
from retrograd_plugins.judges.command import CommandJudge, find_program
from retrograd_plugins.judges.ruler import RulerJudge

from .conftest import answers, group_of

HEAD = """
import json, os, sys, time
def reply(group, /, **changes):
    scores = [{"id": m["id"], "score": round(0.1 * m["id"], 1), "explanation": ""} for m in group["members"]]
    print(json.dumps({"group": group["group"], "scores": scores} | changes), flush=True)
for line in sys.stdin:
    group = json.loads(line)
"""
GOOD = "    reply(group)\n"
GROUP = group_of("a", "b", "c")

Make = Callable[..., JudgeProgram]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(body)`: a judge whose program runs `body` for each group."""
    numbers = iter(range(1000))

    def judge(body: str, *, timeout_secs: float = 20.0) -> JudgeProgram:
        path = tmp_path / f"judge{next(numbers)}.py"
        path.write_text(HEAD + body)
        config = CommandJudge(command=(sys.executable, str(path)), timeout_secs=timeout_secs)
        return JudgeProgram(config, sys.executable, tmp_path)

    return judge


def score(judge: JudgeProgram, *groups: JudgeGroup) -> list[Sequence[Score]]:
    """Scores of groups, one after another; the judge is closed."""

    async def run() -> list[Sequence[Score]]:
        try:
            return [await judge.score(group) for group in groups]
        finally:
            await judge.close()

    return anyio.run(run)


def values(scores: Sequence[Score]) -> list[float]:
    assert {s.kind for s in scores} == {"value"}, scores[0].explanation
    return [s.value for s in scores]


def test_contract(make: Make) -> None:
    anyio.run(lambda: check_judge(lambda: make(GOOD), broken=lambda: make("    sys.exit(3)\n")))


def test_scores_follow_ids_not_order(make: Make) -> None:
    body = '    reply(group, scores=[{"id": i, "score": i / 4, "explanation": f"e{i}"} for i in (2, 0, 1)])\n'
    [scores] = score(make(body), GROUP)
    assert values(scores) == [0.0, 0.25, 0.5]
    assert [s.explanation for s in scores] == ["e0", "e1", "e2"]


def test_one_process_serves_the_run(make: Make, tmp_path: Path) -> None:
    body = f"    open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n')\n{GOOD}"
    judge = make(body)
    score(judge, GROUP, GROUP, GROUP)
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 3
    assert len(set(pids)) == 1
    assert judge.metrics() | {"seconds": 0} == {"requests": 3, "failures": 0, "restarts": 0, "seconds": 0}


def test_groups_judged_at_once_take_turns(make: Make) -> None:
    judge = make("    time.sleep(0.02)\n" + GOOD)
    found: dict[int, Sequence[Score]] = {}

    async def run() -> None:
        async def one(index: int) -> None:
            found[index] = await judge.score(group_of(*"abc"[: index % 3 + 1], name=f"g{index}"))

        async with anyio.create_task_group() as tasks:
            for index in range(9):
                tasks.start_soon(one, index)
        await judge.close()

    anyio.run(run)
    assert all(len(values(found[index])) == index % 3 + 1 for index in range(9))


def test_what_the_program_reads(make: Make, tmp_path: Path) -> None:
    body = f"    open({str(tmp_path / 'seen')!r}, 'w').write(line)\n{GOOD}"
    call = ToolCall(name="bash", arguments={"cmd": "ls"}, id="c1")
    member = JudgeMember(
        messages=(
            Message(role="assistant", content="é\n", tool_calls=(call,)),
            Message(role="tool", content="no", tool_call_id="c1", name="bash", is_error=True),
        ),
        final_state="diff",
    )
    opening = (Message(role="user", content="Go."),)
    score(make(body), JudgeGroup(id="g", opening=opening, members=(member,), rubric="R"))
    assert json.loads((tmp_path / "seen").read_text()) == {
        "group": "g",
        "rubric": "R",
        "opening": [{"role": "user", "content": "Go."}],
        "members": [
            {
                "id": 0,
                "messages": [
                    {
                        "role": "assistant",
                        "content": "é\n",
                        "tool_calls": [{"id": "c1", "name": "bash", "arguments": {"cmd": "ls"}}],
                    },
                    {"role": "tool", "content": "no", "tool_call_id": "c1", "name": "bash", "is_error": True},
                ],
                "final_state": "diff",
            }
        ],
    }


FAULTS: dict[str, tuple[str, str]] = {
    "no JSON": ("print('hello', flush=True)", "did not write a JSON object; the line: hello"),
    "an array": ("print('[]', flush=True)", 'did not write {"group": …, "scores": […]}'),
    "another key": ("reply(group, more=1)", 'did not write {"group"'),
    "another group": ("reply(group, group='x')", "answered for group 'x', not for 'g'"),
    "no array": ("reply(group, scores={})", "did not write an array of scores"),
    "too few": ("reply(group, scores=[{'id': 0, 'score': 1}])", "missing: 1, 2"),
    "none": ("reply(group, scores=[])", "missing: 0, 1, 2"),
    "too many": ("reply(group, scores=[{'id': i, 'score': 1} for i in range(4)])", "scored a member 3"),
    "below": ("reply(group, scores=[{'id': -1, 'score': 1}])", "scored a member -1"),
    "twice": ("reply(group, scores=[{'id': 0, 'score': 1}] * 2)", "scored member 0 twice"),
    "above 1": ("reply(group, scores=[{'id': 0, 'score': 1.5}])", "that is no number from 0 to 1"),
    "not finite": ("reply(group, scores=[{'id': 0, 'score': float('nan')}])", "that is no number"),
    "text": ("reply(group, scores=[{'id': 0, 'score': '1'}])", "that is no number"),
    "true": ("reply(group, scores=[{'id': 0, 'score': True}])", "that is no number"),
    "text id": ("reply(group, scores=[{'id': '0', 'score': 1}])", "an id that is no integer"),
    "no score": ("reply(group, scores=[{'id': 0}])", 'did not write scores as {"id"'),
    "explanation": ("reply(group, scores=[{'id': 0, 'score': 1, 'explanation': 2}])", "that is no string"),
    "exits": ("print('bad thing', file=sys.stderr); sys.exit(3)", "ended with exit status 3"),
    "killed": ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    "closes stdout": ("os.close(1); time.sleep(60)", "closed its standard output"),
    "a good line twice": (
        "text = json.dumps({'group': 'g', 'scores': [{'id': i, 'score': 1} for i in range(3)]}) + '\\n';"
        " sys.stdout.write(text * 2); sys.stdout.flush()",
        "wrote more than one line for a group",
    ),
    "two lines": ("sys.stdout.write('{}\\n' * 2); sys.stdout.flush()", "did not write"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_that_verdict_and_the_next_has_a_new_process(
    make: Make, tmp_path: Path, fault: str
) -> None:
    """The program does wrong once, which it knows by a file."""
    action, message = FAULTS[fault]
    flag = str(tmp_path / "done")
    body = (
        f"    if os.path.exists({flag!r}): reply(group)\n    else:\n"
        f"        open({flag!r}, 'w').close(); {action}\n"
    )
    judge = make(body)
    failed, again = score(judge, GROUP, GROUP)
    assert {s.kind for s in failed} == {"error"}
    assert len(failed) == 3
    assert message in failed[0].explanation
    assert values(again) == [0.0, 0.1, 0.2]
    metrics = judge.metrics()
    assert (metrics["requests"], metrics["failures"], metrics["restarts"]) == (2, 1, 1)


def test_the_reason_holds_the_programs_stderr(make: Make) -> None:
    [scores] = score(make("    print('bad thing', file=sys.stderr); sys.exit(3)\n"), GROUP)
    assert "bad thing" in scores[0].explanation


def test_an_extra_line_is_never_the_next_groups_answer(make: Make) -> None:
    """A second line that comes after the answer was read fails the group that follows."""
    body = "    reply(group)\n    time.sleep(0.2)\n    reply(group)\n"
    judge = make(body)

    async def run() -> list[Sequence[Score]]:
        found = [await judge.score(GROUP)]
        await anyio.sleep(0.5)
        found += [await judge.score(GROUP), await judge.score(GROUP)]
        await judge.close()
        return found

    first, second, third = anyio.run(run)
    assert values(first) == values(third) == [0.0, 0.1, 0.2]
    assert "wrote a line that no group asked for" in second[0].explanation


def test_a_late_program_is_killed_with_its_children(make: Make, tmp_path: Path) -> None:
    body = (
        "    import subprocess\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        f"    open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "    time.sleep(60)\n"
    )
    began = time.monotonic()
    [scores] = score(make(body, timeout_secs=1.0), GROUP)
    assert time.monotonic() - began < 10
    assert "did not answer in time" in scores[0].explanation
    pid = int((tmp_path / "child").read_text())
    assert gone(pid)


def gone(pid: int) -> bool:
    """Whether a process has ended within two seconds; a zombie has."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_verdict_that_is_no_longer_awaited_ends_the_program(make: Make, tmp_path: Path) -> None:
    """One group hangs and others wait for their turn; all are given up at once, and the judge goes on."""
    flag = str(tmp_path / "pid")
    body = (
        f"    if not os.path.exists({flag!r}):\n"
        f"        open({flag!r}, 'w').write(str(os.getpid()))\n"
        f"        time.sleep(60)\n{GOOD}"
    )
    judge = make(body)

    async def run() -> Sequence[Score]:
        with anyio.move_on_after(1.0) as scope:
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(judge.score, GROUP)
        assert scope.cancelled_caught
        scores = await judge.score(GROUP)
        await judge.close()
        return scores

    began = time.monotonic()
    assert values(anyio.run(run)) == [0.0, 0.1, 0.2]
    assert time.monotonic() - began < 10
    assert gone(int(Path(flag).read_text()))


def test_what_is_no_json_is_a_reason(make: Make) -> None:
    call = ToolCall(name="f", arguments={"x": float("nan")})
    member = JudgeMember(messages=(Message(role="assistant", content="", tool_calls=(call,)),))
    [scores] = score(make(GOOD), JudgeGroup(id="g", opening=(), members=(member,)))
    assert "cannot be sent the group" in scores[0].explanation


def test_close_ends_the_program(make: Make, tmp_path: Path) -> None:
    body = f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{GOOD}"
    score(make(body), GROUP)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_closed_judge_judges_no_more(make: Make) -> None:
    judge = make(GOOD)
    anyio.run(judge.close)
    assert "is closed" in anyio.run(judge.score, GROUP)[0].explanation


def test_a_judge_goes_from_one_event_loop_to_the_next(make: Make) -> None:
    judge = make(GOOD)
    for _ in range(3):
        assert values(anyio.run(judge.score, GROUP)) == [0.0, 0.1, 0.2]
    anyio.run(judge.close)


def test_a_large_group_is_written_and_read_at_once(make: Make) -> None:
    """More than pipes hold, in both directions."""
    body = (
        "    reply(group, scores=[{'id': m['id'], 'score': 0.5,"
        " 'explanation': m['messages'][0]['content']} for m in group['members']])\n"
    )
    group = group_of(*(str(i) * 300_000 for i in range(8)))
    [scores] = score(make(body), group)
    assert [s.explanation[:1] for s in scores] == list("01234567")


def test_programs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "judge"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="no program that can be run"):
        find_program("./judge", tmp_path)
    script.chmod(0o755)
    assert find_program("./judge", tmp_path) == str(tmp_path / "judge")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program("judge", Path("/")) == str(script)
    with pytest.raises(ConfigError, match="no program 'judges' on PATH"):
        find_program("judges", tmp_path)


@pytest.mark.parametrize("command", [(), ("",), ("a\0b",)])
def test_a_command_names_a_program(command: tuple[str, ...]) -> None:
    with pytest.raises(ValueError):
        CommandJudge(command=command)


def test_the_lines_on_the_page(tmp_path: Path) -> None:
    """docs/judges.md shows what is sent and what is understood."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "judges.md").read_text()
    blocks = [part.partition("```")[0].strip() for part in page.split("```json\n")[1:]]
    sent, answered, fixture = blocks[:3]  # the fourth is a fixture of trajectories
    opening = (Message(role="user", content="37 + 5?"),)
    group = JudgeGroup(id="u3-p1", opening=opening, members=answers("42", "41"))
    assert json.loads(sent) == as_record(group)
    assert [score.value for score in read_scores(answered.encode(), group)] == [1.0, 0.0]
    path = tmp_path / "f.jsonl"
    path.write_text(fixture)
    [read] = read_fixtures(path)
    assert read.labels == (1.0, 0.3)
    for table in page.split("```toml\n")[1:]:
        values = tomllib.loads(table.partition("```")[0])
        judge = Document.from_values(values).table("agent.judge")
        classes: dict[str, type[Any]] = {"ruler": RulerJudge, "command": CommandJudge}
        found = read_table(classes[values["agent"]["judge"]["type"]], judge, ignore=("type",))
        assert not found.problems


def test_nothing_is_passed_through_a_shell(tmp_path: Path) -> None:
    config: Any = CommandJudge(command=("sh", "-c", "cat > /dev/null", "; touch x"), timeout_secs=1.0)
    judge = JudgeProgram(config, "/bin/sh", tmp_path)
    [scores] = score(judge, GROUP)
    assert scores[0].kind == "error"
    assert os.listdir(tmp_path) == []
