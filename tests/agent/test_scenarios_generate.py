"""`retrograd scenarios generate` before a real server, and the manifest that runs verify."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from retrograd import chat_api
from retrograd.agent import load_scenarios
from tests.e2e.support import Outcome, retrograd
from tests.judges.server import Behaviour, Handler, JudgeServer, Request, completion, cut, hang, raw, status

from .support import EVERY, SMALL, TOOLS, Agents, SumsProvider, right, wrong


@pytest.fixture
def agents(tmp_path: Path, tiny_model: Callable[..., Path]) -> Agents:
    found = Agents(tmp_path, tiny_model(**SMALL))
    (found / "scenarios.jsonl").unlink()
    return found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(chat_api, "MAX_BACKOFF_SECS", 0.01)
    served = JudgeServer()
    served.always = writes
    yield served
    served.close()


def entry(number: int, **changes: Any) -> dict[str, Any]:
    """A scenario as the model writes it."""
    env = json.dumps({"target": str(number)})
    given = {"id": f"task-{number}", "difficulty": number % 5 + 1, "system": "", "rubric": ""}
    return {**given, "user": f"Submit {number}.", "env": env, **changes}


def asked(request: Request) -> int:
    """How many scenarios a request asks for."""
    return int(request.user.rsplit("Write ", 1)[1].split()[0])


def known(request: Request) -> int:
    """How many it names as written."""
    return request.user.count("\n- task-")


def writes(handler: Handler, request: Request) -> None:
    first = known(request)
    given = [entry(number) for number in range(first, first + asked(request))]
    handler.send(200, completion(json.dumps({"scenarios": given})))


def entries(*given: Any) -> Behaviour:
    return lambda handler, request: handler.send(200, completion(json.dumps({"scenarios": list(given)})))


def generate(
    agents: Agents, server: JudgeServer, *arguments: object, code: int = 0, **settings: Any
) -> Outcome:
    tables = {"model": {"path": "is-not-there.gguf"}}
    return retrograd(
        "scenarios", "generate", config(agents, server, tables, **settings), *arguments, code=code
    )


def config(
    agents: Agents, server: JudgeServer, tables: dict[str, Any] | None = None, **settings: Any
) -> Path:
    given = {"model": "writer", "base_url": server.url, "api_key_env": "WRITER_KEY", "count": 6}
    agent = {"scenario_generation": {**given, **settings}}
    return agents.agent(**{**(tables or {}), "agent": {**(tables or {}).get("agent", {}), **agent}})


def written(agents: Agents) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (agents / "scenarios.jsonl").read_text().splitlines()]


def manifest(agents: Agents) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((agents / "scenarios.jsonl.manifest.json").read_text())
    return found


def test_scenarios_in_batches(agents: Agents, server: JudgeServer) -> None:
    outcome = generate(agents, server, batch_size=4, shuffle=False)
    assert [asked(request) for request in server.requests] == [4, 2]
    assert written(agents)[1] == {
        "id": "task-1",
        "user": "Submit 1.",
        "metadata": {"difficulty": 2, "env": {"target": "1"}},
    }
    assert [s.id for s in load_scenarios(agents / "scenarios.jsonl")] == [f"task-{n}" for n in range(6)]
    found = manifest(agents)
    assert all(len(found[name]) == 64 for name in ("prompt", "catalogue", "corpus"))
    assert (found["scenarios"], found["asked_for"], found["model"]) == (6, 6, "writer")
    assert "6 scenarios (2 of difficulty 1, 1 of difficulty 2" in outcome.out
    assert "spent: requests 2" in outcome.out


def test_what_is_sent(agents: Agents, server: JudgeServer) -> None:
    settings = {"custom_instructions": "Sums only.", "seed": 11, "min_difficulty": 2, "max_difficulty": 3}
    server.always = entries(entry(1), entry(2), entry(6), entry(7), entry(11), entry(12))
    generate(agents, server, **settings)
    [request] = server.requests
    assert request.body["model"] == "writer"
    assert request.body["seed"] == 11
    assert request.format == "json_schema"
    schema = request.body["response_format"]["json_schema"]
    assert schema["strict"] is True
    item = schema["schema"]["properties"]["scenarios"]["items"]
    assert set(item["required"]) == {"id", "difficulty", "system", "user", "rubric", "env"}
    for tool in TOOLS:
        assert json.dumps(tool.name) in request.user
    assert "Instructions:\nSums only." in request.user
    assert "Write 6 tasks of difficulty 2 to 3" in request.user
    assert "whose keys are those that the instructions below speak of" in request.system


def test_an_environment_says_what_its_scenarios_hold(
    agents: Agents, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SumsProvider, "scenario_keys", "`target` (the sum)", raising=False)
    server.always = writes
    generate(agents, server)
    assert "an object whose keys are `target` (the sum)." in server.requests[0].system


def test_a_dry_run_prints_the_request_and_sends_none(agents: Agents, server: JudgeServer) -> None:
    outcome = generate(
        agents, server, "--dry-run", batch_size=4, base_url="https://api.example.com/v1", seed=3
    )
    body = json.loads(outcome.out)
    assert "Write 4 tasks" in body["messages"][1]["content"]
    assert body["seed"] == 3
    assert "2 requests to https://api.example.com/v1 would be sent; none was" in outcome.err
    assert not server.requests
    assert not (agents / "scenarios.jsonl").exists()
    (agents / "scenarios.jsonl").write_text("mine\n")
    generate(agents, server, "--dry-run")
    server.always = writes
    (agents / "scenarios.jsonl").unlink()
    generate(agents, server, batch_size=4, seed=3)
    assert server.requests[0].body == body


def test_the_order_is_shuffled_by_the_seed(agents: Agents, server: JudgeServer) -> None:
    generate(agents, server, count=12)
    first = written(agents)
    assert [s["id"] for s in first] != [f"task-{n}" for n in range(12)]
    generate(agents, server, "--force", count=12)
    assert written(agents) == first
    generate(agents, server, "--force", count=12, seed=8)
    assert written(agents) != first
    assert sorted(s["id"] for s in written(agents)) == sorted(s["id"] for s in first)


def test_ids_and_texts_are_unique(agents: Agents, server: JudgeServer) -> None:
    server.always = entries(
        entry(0),
        entry(1, user="  submit   0. "),
        entry(0, user="Another."),
        entry(2, id="Task 0!", user="A third."),
        entry(3, id="???", user="A fourth."),
    )
    outcome = generate(agents, server, count=4, shuffle=False)
    assert [s["id"] for s in written(agents)] == ["task-0", "task-0-2", "task-0-3", "scenario"]
    assert "left out: 1 duplicate" in outcome.out


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (entry(9, difficulty=9), "invalid difficulty"),
        (entry(9, difficulty="3"), "invalid difficulty"),
        (entry(9, user=" "), "invalid user"),
        (entry(9, id=7), "invalid id"),
        (entry(9, env="{broken"), "invalid env"),
        (entry(9, env="[1]"), "invalid env"),
        (entry(9, rubric=3), "invalid metadata.rubric"),
        (entry(9, colour="red"), "invalid"),
        ("task", "invalid"),
    ],
)
def test_entries_that_break_the_rules_are_left_out(
    agents: Agents, server: JudgeServer, bad: Any, reason: str
) -> None:
    server.script.append(entries(bad, entry(0), entry(1)))
    outcome = generate(agents, server, count=4)
    assert {s["id"] for s in written(agents)} == {f"task-{n}" for n in range(4)}
    assert f"left out: 1 {reason}" in outcome.out
    assert asked(server.requests[1]) == 2


def test_more_than_were_asked_for(agents: Agents, server: JudgeServer) -> None:
    server.always = entries(*map(entry, range(9)))
    outcome = generate(agents, server, count=3)
    assert len(written(agents)) == 3
    assert "6 more than were asked for" in outcome.out


@pytest.mark.parametrize(
    "fault",
    [
        status(429, "slow down", Retry_After="0"),
        status(500),
        raw(b"<html>", "text/html"),
        lambda handler, request: handler.send(200, completion("no JSON")),
        lambda handler, request: handler.send(200, completion('{"scenarios": []}')),
        lambda handler, request: handler.send(200, completion('{"scenarios": [{"id": "a"')),
        entries(entry(0, difficulty=0)),
        cut,
    ],
    ids=["429", "500", "html", "prose", "none", "truncated", "all invalid", "length"],
)
def test_what_passes_is_asked_again(agents: Agents, server: JudgeServer, fault: Behaviour) -> None:
    server.script.append(fault if fault is not cut else shortened)
    generate(agents, server)
    assert len(server.requests) == 2
    assert len(written(agents)) == 6


def shortened(handler: Handler, request: Request) -> None:
    body = completion(json.dumps({"scenarios": [entry(0)]}))
    handler.send(200, body.replace(b'"finish_reason": "stop"', b'"finish_reason": "length"'))


def test_a_reply_among_prose_and_thoughts(agents: Agents, server: JudgeServer) -> None:
    def behave(handler: Handler, request: Request) -> None:
        text = json.dumps({"scenarios": [entry(n) for n in range(6)]})
        handler.send(200, completion(f"<think>hm</think>Here:\n```json\n{text}\n```"))

    server.always = behave
    generate(agents, server)
    assert len(written(agents)) == 6


def test_a_server_without_schemas(agents: Agents, server: JudgeServer) -> None:
    def behave(handler: Handler, request: Request) -> None:
        refused = status(400, "response_format is not supported")
        (writes if request.format == "text" else refused)(handler, request)

    server.always = behave
    generate(agents, server, batch_size=3)
    assert server.formats() == ["json_schema", "json_object", "text", "text"]
    assert len(written(agents)) == 6


def test_what_came_before_a_failure_is_written(agents: Agents, server: JudgeServer) -> None:
    server.script.append(writes)
    server.always = status(500, "broken")
    outcome = generate(agents, server, code=1, batch_size=4, max_retries=1)
    assert len(written(agents)) == manifest(agents)["scenarios"] == 4
    assert "4 of 6 scenarios were written" in outcome.err
    assert "broken" in outcome.err
    assert len(server.requests) == 3


@pytest.mark.parametrize("fault", [status(401, "bad key"), status(500), hang], ids=["401", "500", "hang"])
def test_nothing_is_written_if_nothing_came(agents: Agents, server: JudgeServer, fault: Behaviour) -> None:
    server.always = fault
    outcome = generate(agents, server, code=1, timeout_secs=0.2, max_retries=1)
    assert "there is no scenario to write" in outcome.err
    assert not (agents / "scenarios.jsonl").exists()
    assert not (agents / "scenarios.jsonl.manifest.json").exists()


def test_a_model_that_repeats_itself_is_not_asked_for_ever(agents: Agents, server: JudgeServer) -> None:
    server.always = entries(entry(0), entry(1))
    outcome = generate(agents, server, code=1)
    assert len(written(agents)) == 2
    assert "2 replies in a row held nothing new" in outcome.err
    assert len(server.requests) == 3


def test_a_file_that_exists_is_replaced_with_force_alone(agents: Agents, server: JudgeServer) -> None:
    (agents / "scenarios.jsonl").write_text("mine\n")
    outcome = generate(agents, server, code=2)
    assert "--force replaces it" in outcome.err
    assert not server.requests
    generate(agents, server, "--force")
    assert len(written(agents)) == 6


def test_the_section_is_needed(agents: Agents, server: JudgeServer) -> None:
    outcome = retrograd("scenarios", "generate", agents.agent(), code=2)
    assert "agent.scenario_generation: scenarios generate needs this section" in outcome.err


def test_a_key_that_is_not_set_is_named(agents: Agents, server: JudgeServer) -> None:
    outcome = generate(agents, server, code=2, base_url="https://api.example.com/v1")
    assert "agent.scenario_generation.api_key_env: the environment variable WRITER_KEY" in outcome.err


def test_a_catalogue_that_is_too_large(agents: Agents, server: JudgeServer) -> None:
    outcome = generate(agents, server, code=2, max_catalog_bytes=100)
    assert "agent.scenario_generation.max_catalog_bytes: the tools take" in outcome.err
    assert not server.requests


# The manifest in a run


def trained(agents: Agents, path: Path, code: int = 0) -> Outcome:
    agents.script({0: right(0), 1: wrong(0), EVERY: wrong(1)})
    return retrograd("train", path, code=code)


def generated(agents: Agents, server: JudgeServer, **settings: Any) -> Path:
    path = config(agents, server, **settings)
    retrograd("scenarios", "generate", path, "--force")
    return path


RUN = {"agent": {"group_size": 2, "scenarios_per_update": 1}}


def test_a_run_takes_generated_scenarios(agents: Agents, server: JudgeServer) -> None:
    generated(agents, server)
    outcome = retrograd("check", config(agents, server, RUN))
    assert "ok      scenario manifest: scenarios.jsonl.manifest.json describes" in outcome.out


def test_the_section_may_go_once_scenarios_are_written(agents: Agents, server: JudgeServer) -> None:
    generated(agents, server)
    outcome = retrograd("check", agents.agent())
    assert "ok      scenario manifest" in outcome.out


def test_scenarios_that_were_edited_are_refused(agents: Agents, server: JudgeServer) -> None:
    path = generated(agents, server)
    text = (agents / "scenarios.jsonl").read_text()
    (agents / "scenarios.jsonl").write_text(text.replace("Submit 1.", "Submit one."))
    outcome = trained(agents, path, code=2)
    assert "scenario manifest: corpus hash differs" in outcome.err
    assert "the scenarios in scenarios.jsonl are not those that were written" in outcome.err
    (agents / "scenarios.jsonl.manifest.json").unlink()
    assert "manifest" not in retrograd("check", path).out


def test_another_request_is_refused(agents: Agents, server: JudgeServer) -> None:
    generated(agents, server)
    outcome = trained(agents, config(agents, server, custom_instructions="Only even numbers."), code=2)
    assert "prompt hash differs" in outcome.err
    assert "catalogue" not in outcome.err


def test_other_tools_are_refused(agents: Agents, server: JudgeServer) -> None:
    generated(agents, server)
    (agents / "fewer.py").write_text(
        "from tests.agent import support\n"
        "class Fewer(support.SumsProvider):\n"
        "    def catalogue(self):\n"
        "        return {'sums': support.TOOLS[:2]}\n"
        "from retrograd_hookspecs import Component, hookimpl\n"
        "@hookimpl\n"
        "def retrograd_environments():\n"
        "    return [Component(name='fewer', config=support.SumsConfig, build=lambda c, x: Fewer(c),"
        " summary='Fewer.')]\n"
    )
    other = {"plugins": {"load": ["hooks.py", "fewer.py"]}, "agent": {"environment": {"type": "fewer"}}}
    outcome = trained(agents, config(agents, server, other), code=2)
    assert "catalogue hash differs" in outcome.err
    assert "the tools of this run are not those" in outcome.err


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 99}'])
def test_a_manifest_that_cannot_be_read(agents: Agents, server: JudgeServer, text: str) -> None:
    path = generated(agents, server)
    (agents / "scenarios.jsonl.manifest.json").write_text(text)
    outcome = trained(agents, path, code=2)
    assert "scenarios.jsonl.manifest.json" in outcome.err
