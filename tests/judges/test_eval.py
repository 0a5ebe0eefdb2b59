"""`retrograd judge eval`: fixtures, agreement worked by hand, and the command against a real server."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from retrograd.cli import run
from retrograd.errors import DataError
from retrograd_hookspecs import JudgeGroup, Score
from retrograd_plugins.judges._agreement import Agreement, evaluate, overall
from retrograd_plugins.judges._fixtures import read_fixtures

from .server import JudgeServer, Request, says, scores_of, status

MakeModel = Callable[..., Path]

FIXTURES = [
    {
        "id": "sum",
        "prompt": "37 + 5?",
        "rubric": "Only the number counts.",
        "members": [
            {"completion": "worth 0.9", "label": 1.0},
            {"completion": "worth 0.4", "label": 0.5},
            {"completion": "worth 0.1", "label": 0},
        ],
    },
    {
        "id": "tool",
        "opening": [{"role": "user", "content": "List the files."}],
        "members": [
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"function": {"name": "bash", "arguments": '{"cmd": "ls"}'}}],
                    },
                    {"role": "tool", "content": "a b"},
                    {"role": "assistant", "content": "worth 0.2", "raw": True},
                ],
                "label": 3,
                "final_state": "clean",
            },
            {"completion": "worth 0.6", "label": 1},
        ],
    },
]


def write(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# -- figures


def test_agreement_without_ties() -> None:
    """1 2 3 4 against 1 3 2 4: of six pairs five agree, τ = (5 − 1)/6; ρ = 1 − 6·2/(4·15)."""
    found = Agreement.of([1, 2, 3, 4], [1, 3, 2, 4])
    assert found.tau == pytest.approx(4 / 6)
    assert found.rho == pytest.approx(1 - 12 / 60)


def test_agreement_with_ties() -> None:
    """1 1 2 against 1 2 3: two pairs agree, one is tied in the first: τ_b = 2/√(2·3).

    Ranks 1.5 1.5 3 and 1 2 3 have covariance 1.5 and squared deviations 1.5 and 2: ρ = 1.5/√3.
    """
    found = Agreement.of([1, 1, 2], [1, 2, 3])
    assert found.tau == pytest.approx(2 / math.sqrt(6))
    assert found.rho == pytest.approx(1.5 / math.sqrt(3))


def test_a_constant_list_has_no_order() -> None:
    assert Agreement.of([1, 1, 1], [1, 2, 3]) == Agreement(tau=None, rho=None)
    mean = Agreement.mean([Agreement(tau=None, rho=None), Agreement(tau=0.5, rho=-1.0)])
    assert mean == Agreement(tau=0.5, rho=-1.0)
    assert Agreement.mean([]) == Agreement(tau=None, rho=None)


class Scripted:
    """A judge whose scores are given by group and pass."""

    def __init__(self, scores: dict[str, Sequence[Sequence[float] | str]]) -> None:
        self._scores = {name: list(passes) for name, passes in scores.items()}

    async def score(self, group: JudgeGroup) -> Sequence[Score]:
        found = self._scores[group.id.partition(" ")[0]].pop(0)
        if isinstance(found, str):
            return [Score(kind="error", explanation=found) for _ in group.members]
        return [Score(kind="value", value=value) for value in found]

    async def close(self) -> None:
        """Nothing is open."""


def test_figures_of_two_passes(tmp_path: Path) -> None:
    """Group one: right, then one pair of three the wrong way; two: without order, then right; three fails."""
    members = [{"completion": c, "label": i} for i, c in enumerate("abc")]
    records = [{"id": name, "prompt": "?", "members": members} for name in ("one", "two", "three")]
    fixtures = read_fixtures(write(tmp_path / "f.jsonl", records))
    judge = Scripted(
        {
            "one": [[0.0, 0.4, 1.0], [0.4, 0.1, 1.0]],
            "two": [[0.5, 0.5, 0.5], [0.0, 0.5, 1.0]],
            "three": [[0.1, 0.2, 0.3], "no reply in 2 seconds"],
        }
    )
    one, two, three = anyio.run(evaluate, judge, fixtures)
    assert one.labels.tau == pytest.approx((1 + 1 / 3) / 2)
    assert one.labels.rho == pytest.approx((1 + 0.5) / 2)
    assert one.itself.tau == pytest.approx(1 / 3)
    assert one.shift == pytest.approx((0.4 + 0.3 + 0) / 3)
    assert (two.labels.tau, two.itself.tau, two.equal) == (pytest.approx(1.0), None, 1)
    assert three.error == "no reply in 2 seconds"
    total = overall([one, two, three])
    assert (total["groups"], total["failed"], total["without_order"]) == (3, 1, 0)
    assert total["kendall_tau"] == pytest.approx((2 / 3 + 1) / 2)
    assert total["self_kendall_tau"] == pytest.approx(1 / 3)


# -- fixtures


def test_fixtures_are_read(tmp_path: Path) -> None:
    one, two = read_fixtures(write(tmp_path / "f.jsonl", FIXTURES))
    assert one.labels == (1.0, 0.5, 0.0)
    assert one.group.rubric == "Only the number counts."
    assert one.group.opening[0].content == "37 + 5?"
    first = two.group.members[0]
    assert first.final_state == "clean"
    assert first.messages[0].tool_calls[0].arguments == {"cmd": "ls"}
    assert first.messages[2].raw


def members(*changes: dict[str, Any]) -> dict[str, Any]:
    plain = [{"completion": "a", "label": 0}, {"completion": "b", "label": 1}]
    return {"members": [m | c for m, c in zip(plain, changes, strict=False)]}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id": 3}, "id: must be a string"),
        ({"prompt": 3}, "prompt: must be a string"),
        ({"opening": []}, "needs one of prompt and opening, has 2"),
        ({"rubrik": "x"}, "has the unknown key 'rubrik' (did you mean 'rubric'?)"),
        ({"members": []}, "members: must be an array of two"),
        (members({"label": "good"}, {}), "members[0].label: must be a number"),
        (members({"label": True}, {}), "members[0].label: must be a number"),
        (members({}, {"label": 0}), "members: all labels are 0"),
        (members({}, {"messages": []}), "members[1]: needs one of completion and messages, has 2"),
        (members({}, {"final_state": 1}), "members[1].final_state: must be a string"),
        ({"members": [{"messages": 3, "label": 1}, {"completion": "", "label": 0}]}, "must be an array of"),
        ({"members": [{"messages": [{"role": "robot"}], "label": 1}, {"label": 0}]}, "the role is 'robot'"),
        ({"members": [3, 4]}, "members[0]: must be an object"),
    ],
)
def test_wrong_fixtures_are_named(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    good = {"id": "g", "prompt": "?"} | members({}, {})
    path = write(tmp_path / "f.jsonl", [good | {"id": "first"}, good | change])
    with pytest.raises(DataError) as refused:
        read_fixtures(path)
    assert f"{path}:2" in str(refused.value)
    assert problem in str(refused.value)


def test_ids_are_unique(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the id 'sum' is also that of .*f\.jsonl:1"):
        read_fixtures(write(tmp_path / "f.jsonl", [FIXTURES[0], FIXTURES[0]]))


# -- the command


ALGORITHM = """
import attrs
from retrograd_hookspecs import Component, ComponentTable, hookimpl, key


@attrs.frozen(kw_only=True)
class ContestConfig:
    judge: ComponentTable | None = key(None, doc="Judge.")


@hookimpl
def retrograd_algorithms():
    build = lambda config, context: None
    return [Component(name="contest", config=ContestConfig, build=build, summary="Test.",
                      selects={"judge": "judges"})]
"""


@pytest.fixture
def config(tmp_path: Path, tiny_model: MakeModel, server: JudgeServer) -> Path:
    """A run whose algorithm has a judge."""
    (tmp_path / "contest.py").write_text(ALGORITHM)
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
[run]
algorithm = "contest"
[model]
path = "{tiny_model()}"
[output]
path = "a.gguf"
[lora]
[plugins]
load = ["contest.py"]
[contest.judge]
type = "ruler"
base_url = "{server.url}"
model = "m"
max_retries = 0
cache_path = "verdicts.jsonl"
"""
    )
    return path


def evaluated(config: Path, *arguments: str) -> int:
    fixtures = write(config.parent / "f.jsonl", FIXTURES)
    return run(["judge", "eval", str(config), "--fixtures", str(fixtures), *arguments])


def test_json(config: Path, server: JudgeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluated(config, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    by_id = {group["id"]: group for group in found["groups"]}
    assert by_id["sum"]["scores"] == [[0.9, 0.4, 0.1]] * 2
    assert (by_id["sum"]["kendall_tau"], by_id["tool"]["kendall_tau"]) == (1.0, -1.0)
    assert found["overall"]["kendall_tau"] == 0.0
    assert found["overall"]["self_kendall_tau"] == 1.0
    assert found["spent"]["requests"] == 4
    assert len(server.requests) == 4
    assert not (config.parent / "verdicts.jsonl").exists()  # neither read nor written


def test_both_passes_ask_in_an_order_of_their_own(config: Path, server: JudgeServer) -> None:
    """A judge that likes the first place best does not agree with itself."""

    def first_is_best(request: Request) -> str:
        scores = [s | {"score": 1 / (1 + i)} for i, s in enumerate(scores_of(request))]
        return json.dumps({"scores": scores})

    server.always = says(first_is_best)
    assert evaluated(config) == 0
    orders = {tuple(request.candidates.values()) for request in server.requests if "37 + 5?" in request.user}
    assert len(orders) == 2


def test_text(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluated(config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["sum", "3", "1.000", "1.000", "1.000", "1.000", "0.000"]
    assert lines[2].split() == ["tool", "2", "-1.000", "-1.000", "1.000", "1.000", "0.000"]
    assert lines[3].split() == ["all", "0.000", "0.000", "1.000", "1.000", "0.000"]
    assert "requests 4" in lines[-1]


def test_a_group_without_a_verdict_is_exit_code_1(
    config: Path, server: JudgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.always = status(401, "bad key")
    assert evaluated(config) == 1
    assert "no verdict: " in capsys.readouterr().out


def test_a_run_without_a_judge(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = config.read_text()
    config.write_text(text[: text.index("[contest.judge]")] + "[contest]\n")
    assert evaluated(config) == 2
    assert "this run has no judges" in capsys.readouterr().err


def test_mistakes_of_the_judge_table_name_their_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(config, "--set", "contest.judge.max_retries=-1") == 2
    assert "contest.judge.max_retries" in capsys.readouterr().err


def test_missing_fixtures(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["judge", "eval", str(config), "--fixtures", "/nowhere.jsonl"]) == 2
    assert "/nowhere.jsonl" in capsys.readouterr().err


def test_another_judge_by_type(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program of docs/judges.md, run as it stands there."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "judges.md").read_text()
    program = page.partition("```python\n#!/usr/bin/env python3\n")[2].partition("```")[0]
    assert program
    (config.parent / "judge.py").write_text(program)
    text = config.read_text()
    head = text[: text.index("[contest.judge]")]
    config.write_text(head + '[contest.judge]\ntype = "command"\ncommand = ["python3", "judge.py"]\n')
    assert evaluated(config, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["overall"]["failed"] == 0
    assert found["spent"]["requests"] == 4
