"""The examples of agentic runs: their data, what grades them, and their commands in a short form.

Runs are real but for the choice of tokens, which a script makes (`tests.agent.support`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest

from retrograd.testing.environments import Action, play
from retrograd_hookspecs import EnvironmentProvider, Scenario
from tests.agent.support import EVERY, SMALL, call

from .agent_examples import EXAMPLES, Example, environment, module_of, records
from .support import retrograd

NAMES = ("warm-start", "agent-calculator", "agent-fix-tests")
TOMLS = sorted(path for name in NAMES for path in (EXAMPLES / name).glob("*.toml"))


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(**(SMALL | {"context_length": 8192}))


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_file_is_by_the_schema_and_documented(path: Path) -> None:
    values = tomllib.loads(path.read_text())
    files = [path.parent / name for name in values.get("plugins", {}).get("load", [])]
    schema = retrograd("config-schema", *[part for file in files for part in ("--load", file)])
    jsonschema.validate(values, json.loads(schema.out), jsonschema.Draft7Validator)
    assert path.name in (path.parent / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_data_is_what_make_data_writes(name: str, tmp_path: Path) -> None:
    with module_of(name, "make_data") as module:
        module.write(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == sorted(path.name for path in (EXAMPLES / name).glob("*.jsonl"))
    for file in files:
        assert (tmp_path / file).read_text() == (EXAMPLES / name / file).read_text()


# warm-start


@pytest.fixture
def calculator() -> EnvironmentProvider:
    return environment("warm-start", "agent.toml", {})


def calls_of(record: Mapping[str, Any]) -> list[Action]:
    found = [call["function"] for m in record["messages"] for call in m.get("tool_calls", ())]
    return [(call["name"], call["arguments"]) for call in found]


def test_demonstrations_solve_their_problems(calculator: EnvironmentProvider) -> None:
    folder = EXAMPLES / "warm-start"
    catalogue = [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        for tool in calculator.catalogue()[""]
    ]
    for record in records(folder / "demonstrations.jsonl"):
        assert [tool["function"] for tool in record["tools"]] == catalogue
        actions = calls_of(record)
        answer = actions[-1][1]["value"]
        task = Scenario(id="demo", user="?", metadata={"env": {"answer": answer}})
        episode = anyio.run(play, calculator, task, actions)
        assert episode.score.value == 1.0
        # The number that is calculated is the one that is answered, and the one that was asked for.
        assert episode.observations[0][0] == str(answer) == record["messages"][3]["content"]
        asked = list(map(int, re.findall(r"\d+", record["messages"][1]["content"])))
        assert sorted(asked) == sorted((actions[0][1]["a"], actions[0][1]["b"]))


SEVEN = Scenario(id="seven", user="3 + 4?", metadata={"env": {"answer": 7}})
CALCULATED: Action = ("calculate", {"operation": "add", "a": 3, "b": 4})


@pytest.mark.parametrize(
    ("actions", "reward"),
    [
        ([CALCULATED, ("answer", {"value": 7})], 1.0),
        ([("answer", {"value": 7})], 1.0),  # by heart
        ([CALCULATED, ("answer", {"value": 8})], 0.0),
        ([CALCULATED], 0.0),  # no answer
        ([], 0.0),
    ],
)
def test_the_reward_of_the_calculator(
    calculator: EnvironmentProvider, actions: list[Action], reward: float
) -> None:
    assert anyio.run(play, calculator, SEVEN, actions).score.value == reward


def test_held_out_problems_are_new() -> None:
    folder = EXAMPLES / "warm-start"
    problems = {
        file: [record["user"] for record in records(folder / f"{file}.jsonl")]
        for file in ("scenarios", "heldout")
    }
    problems["demonstrations"] = [
        record["messages"][1]["content"] for record in records(folder / "demonstrations.jsonl")
    ]
    every = [problem for found in problems.values() for problem in found]
    assert len(set(every)) == len(every)
    with module_of("warm-start", "make_data") as made:
        trained, held_out = (
            {word for words in found for word in words} for found in (made.TRAINED, made.HELD_OUT)
        )
    assert not trained & held_out
    words = set(re.findall(r"\w+", " ".join(problems["heldout"])))
    assert not words & trained
    assert words & held_out


def test_the_warm_start(tmp_path: Path, model: Path) -> None:
    """Every command of the README, each checked first."""
    example = Example("warm-start", tmp_path, model)
    for name in ("demonstrations", "scenarios", "heldout"):
        few = (example / f"{name}.jsonl").read_text().splitlines(keepends=True)[:4]
        (example / f"{name}.jsonl").write_text("".join(few))
    answers = [record["metadata"]["env"]["answer"] for record in records(example / "scenarios.jsonl")]

    def solved(answer: int) -> list[str]:
        return [call("calculate", operation="add", a=answer - 1, b=1), call("answer", value=answer)]

    wrong = [call("answer", value=-1)]
    assert "configuration: no problems" in example.run("check", "demos.toml").out
    example.run("train", "demos.toml", training__epochs=1)

    # Two of eight attempts at each problem but the last one, which none solves.
    example.script(
        {
            n * 8 + k: solved(answers[n]) if k in (2, 5) and n < 3 else wrong
            for n in range(4)
            for k in range(8)
        }
    )
    collected = example.scripted(
        "collect", "agent.toml", "--adapter", example / "demos.gguf", "--k", 8,
        "--out", example / "traces.jsonl", "--report", example / "pass.json",
    )  # fmt: skip
    assert "passed: 6 of 32 trajectories" in collected.out
    assert "no attempt solved: scenarios-4" in collected.out
    traces = records(example / "traces.jsonl")
    assert [calls_of(trace)[-1][1]["value"] for trace in traces] == answers[:3]
    assert [tool["function"]["name"] for tool in traces[0]["tools"]] == ["calculate", "answer"]

    assert "configuration: no problems" in example.run("check", "warm.toml").out
    example.run("train", "warm.toml", training__epochs=1)

    # Member 0 of the first group alone is right; what is held out is not solved.
    example.script({0: solved(answers[0]), EVERY: wrong})
    short = {"agent__updates": 1, "agent__scenarios_per_update": 1}
    assert "error" not in example.scripted("check", "agent.toml", **short).out
    example.scripted("train", "agent.toml", **short)
    [update] = example.updates("agent.metrics.jsonl")
    assert update["reward/mean"] == 1 / 8
    assert update["optimizer/grad_norm"] > 0
    found = json.loads(example.scripted("bench", "agent.toml", "--samples", 2, "--json", **short).out)
    assert {side: metrics["eval/reward"] for side, metrics in found.items()} == {"base": 0.0, "adapter": 0.0}
    assert (example / "observed" / "index.html").is_file()


# agent-calculator


def said(*texts: str, result: str = "82", error: bool = False) -> list[dict[str, Any]]:
    """A trajectory with one call, and what the model said behind it."""
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "add", "arguments": {}}]}
    observed = {"role": "tool", "content": result, "tool_call_id": "1", "name": "add"}
    return [called, observed | ({"is_error": True} if error else {}), *_turns(*texts)]


def _turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text} for text in texts]


@pytest.mark.parametrize(
    ("messages", "score"),
    [
        (said("The answer is 82."), 1.0),
        (said("47 + 35 = 82"), 1.0),
        (said("82 is more than 35"), 0.5),  # the last number counts
        (said("The answer is 820."), 0.5),
        (said(), 0.5),
        (said("The answer is 82.", result="81"), 0.2),
        (said("The answer is 82.", error=True), 0.2),
        (_turns("The answer is 82."), 0.2),
        (_turns("The answer is 81."), 0.0),
        (_turns(""), 0.0),
        ([], 0.0),
    ],
)
def test_the_judge_verifies(messages: list[dict[str, Any]], score: float) -> None:
    with module_of("agent-calculator", "judge") as judge:
        assert judge.score(messages, "82")[0] == score


def test_the_judge_is_a_program() -> None:
    groups = [
        {"group": f"g{n}", "rubric": f"The right answer is {n}. …", "opening": [], "members": members}
        for n, members in ((82, [said("82"), said("81")]), (-4, [_turns("It is -4."), _turns("4")]))
    ]
    for group in groups:
        group["members"] = [
            {"id": i, "messages": m, "final_state": None} for i, m in enumerate(group["members"])
        ]
    program = subprocess.run(
        [sys.executable, EXAMPLES / "agent-calculator" / "judge.py"],
        input="".join(json.dumps(group) + "\n" for group in groups),
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    replies = [json.loads(line) for line in program.stdout.splitlines()]
    assert [reply["group"] for reply in replies] == ["g82", "g-4"]
    assert [[s["score"] for s in reply["scores"]] for reply in replies] == [[1.0, 0.5], [0.2, 0.0]]


def test_the_judge_refuses_a_rubric_without_an_answer() -> None:
    group = {"group": "g", "rubric": "Be nice", "members": []}
    with (
        module_of("agent-calculator", "judge") as judge,
        pytest.raises(ValueError, match="the rubric of g names no right answer: 'Be nice'"),
    ):
        judge.verdict(group)


def test_rubrics_hold_the_right_answers() -> None:
    folder = EXAMPLES / "agent-calculator"
    scenarios = records(folder / "scenarios.jsonl") + records(folder / "heldout.jsonl")
    for record in scenarios:
        a, b = map(int, re.findall(r"\d+", record["user"]))
        [right] = map(int, re.findall(r"The right answer is (\d+)\.", record["metadata"]["rubric"]))
        plus = re.search(r"\+|Add|plus", record["user"])
        assert right == (a + b if plus else a * b)
    questions = [record["user"] for record in scenarios]
    questions += [record["messages"][1]["content"] for record in records(folder / "demonstrations.jsonl")]
    assert len(set(questions)) == len(questions)


def test_the_calculator_over_mcp(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Server and judge are programs; the model's tokens are a script's."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    example = Example("agent-calculator", tmp_path, model)
    assert "configuration: no problems" in example.run("check", "demos.toml").out
    example.run("train", "demos.toml", training__epochs=1)
    listed = retrograd("tools", "list", example / "agent-calculator.toml", "--json")
    offered = json.loads(listed.out)["mcp_servers"]["calculator"]
    for tool, shown in zip(offered, records(example / "demonstrations.jsonl")[0]["tools"], strict=True):
        function = shown["function"]
        assert (tool["name"], tool["description"]) == (function["name"], function["description"])
        assert tool["input_schema"] == function["parameters"]

    first = records(example / "scenarios.jsonl")[0]
    a, b = map(int, re.findall(r"\d+", first["user"]))
    example.script(
        {
            0: [call("add", a=a, b=b), f"The answer is {a + b}."],
            1: [call("add", a=a, b=b), "Done."],
            2: [f"The answer is {a + b}."],
            EVERY: ["I do not know."],
        }
    )
    short = {"agent__updates": 1, "agent__scenarios_per_update": 1, "agent__group_size": 4}
    assert "error" not in example.scripted("check", "agent-calculator.toml", **short).out
    example.scripted("train", "agent-calculator.toml", **short)
    [update] = example.updates("agent.metrics.jsonl")
    assert update["judge/score_mean"] == pytest.approx((1.0 + 0.5 + 0.2 + 0.0) / 4)
    assert update["judge/failures"] == update["judge/failed_fraction"] == 0
    assert update["agent/tool_calls_per_turn"] == pytest.approx(2 / 6)
    assert update["optimizer/grad_norm"] > 0
