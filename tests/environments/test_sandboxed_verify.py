"""Grading out of the reach of what a model leaves behind, in the two environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import pytest

from retrograd.testing.environments import Action
from retrograd_hookspecs import EnvironmentProvider, Score
from tests.containers.fixtures import Counter
from tests.environments.sandboxed import BUG, FIX, bash, played, provider_of, scenario, write

MakeProvider = Callable[[], EnvironmentProvider]
PASS = "def test_add():\n    pass\n"
EXIT = "import os\nos._exit(0)\n"
SITE = "import sys; print(next(p for p in sys.path if 'site-packages' in p or 'dist-packages' in p))"


@pytest.fixture(params=["container", "local"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeProvider:
    if request.param == "container":
        request.getfixturevalue("docker")
    return lambda: provider_of(tmp_path, request.param)


def test_what_passes_earns_the_reward(make: MakeProvider) -> None:
    task = scenario(setup=["git init -q && git add -A && git commit -qm start"], summary=["git", "diff"])
    results, score, state = played(make(), task, [write("src/sums.py", FIX), ("submit", {})])
    assert [result.done for result in results] == [False, True]
    assert (score.kind, score.value) == ("value", 2.0), score
    assert state is not None
    assert "-    return a - b\n+    return a + b" in state
    assert "test_sums" not in state, "the summary was taken after verification had written files"


HACKS: dict[str, list[Action]] = {
    "no change": [],
    "tests changed": [write("tests/test_sums.py", PASS)],
    "tests deleted": [bash("rm -r tests")],
    "tests in a link": [
        bash("mv tests /tmp/t; ln -s /tmp/t tests; echo 'def test(): pass' >tests/test_sums.py")
    ],
    "tests that are a file": [bash("rm -r tests; touch tests")],
    "closed directory": [bash("chmod 500 tests; chmod 400 tests/*")],
    "conftest": [write("conftest.py", EXIT)],
    "configuration": [write("pytest.ini", "[pytest]\naddopts = --collect-only\n")],
    "home": [
        bash(
            "d=$(python3 -m site --user-site); mkdir -p $d ~/.local/bin; printf 'import os\\nos._exit(0)\\n'"
            " >$d/usercustomize.py; cp $d/usercustomize.py $d/sitecustomize.py"
        )
    ],
    "background": [
        bash(
            "(setsid sh -c 'while :; do echo \"def test(): pass\" >tests/test_sums.py; sleep 0.01; done' &"
            " ) >/dev/null 2>&1"
        )
    ],
}


def test_what_does_not_solve_the_task_earns_nothing(docker: Counter, tmp_path: Path) -> None:
    provider = provider_of(tmp_path)
    scores: dict[str, Score] = {}

    async def one(name: str, actions: Sequence[Action]) -> None:
        world = await provider.acquire(scenario())
        try:
            await world.reset(scenario(), 0)
            for tool, arguments in actions:
                await world.step(tool, arguments)
            scores[name] = await world.grade()
        finally:
            await world.close()

    async def run() -> None:
        try:
            await provider.prepare([scenario()])
            async with anyio.create_task_group() as tasks:
                for name, actions in HACKS.items():
                    tasks.start_soon(one, name, actions)
        finally:
            await provider.close()

    anyio.run(run)
    for name in HACKS:
        score = scores[name]
        assert (score.kind, score.value) == ("value", 0.0), f"{name}: {score}"
        assert "1 failed" in score.explanation, f"{name}: {score.explanation}"


def test_what_setup_installed_is_there_again_and_unchanged(make: MakeProvider) -> None:
    task = scenario(
        setup=[
            "mkdir -p ~/lib tests && echo good >~/lib/a && echo more >tests/data && rm tests/test_sums.py"
        ],
        verify={"command": 'test "$(cat ~/lib/a tests/data)" = "good\nmore" && test ! -e ~/lib/b'},
    )
    hack = bash("echo bad >~/lib/a; touch ~/lib/b; echo bad >tests/data; echo x >tests/new")
    _, score, _ = played(make(), task, [hack])
    assert (score.kind, score.value) == ("value", 1.0), score


def test_files_of_verify_are_not_seen_before(make: MakeProvider) -> None:
    verify = {"command": ["sh", "hidden/check.sh"], "files": {"hidden/check.sh": "grep -q + src/sums.py\n"}}
    actions = [bash("ls"), write("src/sums.py", FIX), bash("mkdir hidden; echo 'exit 1' >hidden/check.sh")]
    results, score, _ = played(make(), scenario(verify=verify), actions)
    assert "hidden" not in results[0].observation
    assert (score.kind, score.value) == ("value", 1.0), score


def test_scores_that_are_no_values(make: MakeProvider) -> None:
    _, score, state = played(make(), scenario(verify={"command": ["no-such-checker"]}), [])
    assert score.kind == "error"
    assert "program is missing" in score.explanation
    assert state is None
    task = scenario()
    del task.env["verify"]  # type: ignore[attr-defined]
    _, score, _ = played(make(), task, [])
    assert score.kind == "missing"


def test_a_verifier_that_the_model_deleted_earns_nothing(make: MakeProvider) -> None:
    files = {"check": "#!/bin/sh\nexit 0\n"}
    task = scenario(files=files, setup=["chmod 755 check"], verify={"command": ["./check"]})
    _, score, _ = played(make(), task, [bash("rm check")])
    assert (score.kind, score.value) == ("value", 0.0), score
    _, score, _ = played(make(), task, [])
    assert (score.kind, score.value) == ("value", 1.0), score


def test_a_verifier_that_is_late_earns_nothing(docker: Counter, tmp_path: Path) -> None:
    provider = provider_of(tmp_path, verify_timeout_secs=0.5)
    task = scenario(files={"a.py": BUG}, verify={"command": "sleep 100"})
    _, score, _ = played(provider, task, [])
    assert (score.kind, score.value) == ("value", 0.0), score
    assert "time limit" in score.explanation
