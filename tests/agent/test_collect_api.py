"""`retrograd collect --api`: a model behind a real HTTP server, which may misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from retrograd import chat_api
from tests.e2e.support import Outcome, retrograd
from tests.judges.server import (
    Behaviour,
    Handler,
    JudgeServer,
    Request,
    drip,
    half_a_body,
    hang,
    raw,
    reset,
    status,
)

from .support import SMALL, TOOLS, Agents, sum_scenario
from .test_collect import answers, lines, outcomes, report


@pytest.fixture
def agents(tmp_path: Path, tiny_model: Callable[..., Path]) -> Agents:
    return Agents(tmp_path, tiny_model(**SMALL))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(chat_api, "MAX_BACKOFF_SECS", 0.01)
    served = JudgeServer()
    served.always = solves
    yield served
    served.close()


def reply(content: str | None, *calls: tuple[str, Any], finish: str = "stop", **message: Any) -> bytes:
    """The body of a completion with calls; arguments are an object, or the text to send."""
    said: dict[str, Any] = {"role": "assistant", "content": content, **message}
    if calls:
        said["tool_calls"] = [
            {
                "id": f"theirs-{number}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": given if isinstance(given, str) else json.dumps(given),
                },
            }
            for number, (name, given) in enumerate(calls)
        ]
    choice = {"index": 0, "finish_reason": finish, "message": said}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}).encode()


def number_of(request: Request) -> int:
    """Of the scenario."""
    user = next(m for m in request.body["messages"] if m["role"] == "user")
    return int(user["content"].split()[2])


def solves(handler: Handler, request: Request) -> None:
    """Adds, then submits what the tool said."""
    last = request.body["messages"][-1]
    if last["role"] == "user":
        body = reply("Let me see.", ("add", {"a": number_of(request), "b": 1}))
    else:
        body = reply(None, ("submit", {"answer": last["content"]}), finish="tool_calls")
    handler.send(200, body)


def says(*bodies: bytes) -> Behaviour:
    """The bodies in turn, over all requests; the last one again and again."""
    left, lock = list(bodies), threading.Lock()

    def behave(handler: Handler, request: Request) -> None:
        with lock:
            body = left.pop(0) if len(left) > 1 else left[0]
        handler.send(200, body)

    return behave


def collect(agents: Agents, server: JudgeServer, *arguments: object, code: int = 0, **tables: Any) -> Outcome:
    agent = dict(tables.pop("agent", {}))
    api = {"base_url": server.url, "model": "big", "api_key_env": "BIG_KEY", **agent.pop("collect_api", {})}
    path = agents.agent(agent={"collect_api": api, **agent}, **tables)
    files = ("--out", agents / "out.jsonl", "--report", agents / "report.json", "--force")
    return retrograd("collect", path, "--api", *files, *arguments, code=code)


def test_traces_of_a_hosted_model(agents: Agents, server: JudgeServer) -> None:
    outcome = collect(agents, server, "--k", 2, "--keep", 2, model={"path": "is-not-there.gguf"})
    assert answers(agents) == ["1", "2", "3"]
    assert [outcomes(agents, n) for n in range(3)] == [["kept", "duplicate"]] * 3
    first = lines(agents)[0]
    assert first["messages"] == [
        {"role": "user", "content": "What is 0 + 1?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": "call00000",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": 0, "b": 1}},
                }
            ],
        },
        {"role": "tool", "content": "1", "tool_call_id": "call00000", "name": "add"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call00001",
                    "type": "function",
                    "function": {"name": "submit", "arguments": {"answer": "1"}},
                }
            ],
        },
        {"role": "tool", "content": "thank you", "tool_call_id": "call00001", "name": "submit"},
    ]
    assert [tool["function"]["name"] for tool in first["tools"]] == [tool.name for tool in TOOLS]
    assert report(agents)["model"] == "big"
    assert "0 of them raw" in outcome.out
    assert "spent: requests 12," in outcome.err
    assert "prompt_tokens 108, completion_tokens 48" in outcome.err


def test_what_is_sent(agents: Agents, server: JudgeServer) -> None:
    agents.scenarios([{**sum_scenario(0, opening="It begins."), "system": "Be brief."}])
    collect(
        agents,
        server,
        *("--k", 1),
        agent={"system_suffix": "Use tools.", "collect_api": {"temperature": 0.25}},
    )
    first, second = (request.body for request in server.requests)
    assert server.requests[0].path == "/v1/chat/completions"
    assert first["messages"] == [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "What is 0 + 1?\n\nIt begins."},
    ]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("big", 160, 0.25)
    assert "seed" not in first
    assert [tool["function"]["name"] for tool in first["tools"]] == [tool.name for tool in TOOLS]
    called, observed = second["messages"][2:]
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 0, "b": 1}'}
    assert observed == {"role": "tool", "content": "1", "tool_call_id": called["tool_calls"][0]["id"]}


def test_errors_of_tools_are_shown(agents: Agents, server: JudgeServer) -> None:
    agents.scenarios([sum_scenario(0)])
    server.always = says(reply(None, ("fail", {})), reply(None, ("submit", {"answer": "1"})))
    collect(agents, server, "--k", 1)
    assert server.requests[1].body["messages"][-1]["content"] == "ERROR: it failed"
    assert lines(agents)[0]["messages"][2]["is_error"] is True
    assert lines(agents)[0]["messages"][2]["content"] == "it failed"


def test_sft_trains_on_the_traces(agents: Agents, server: JudgeServer) -> None:
    collect(agents, server, "--k", 1)
    data = {"data": "out.jsonl"}
    retrograd("train", agents.toml("sft.toml", training={"ctx": 1536}, sft=data))


def test_seeds_differ_by_attempt_and_turn_and_are_the_same_again(agents: Agents, server: JudgeServer) -> None:
    agents.scenarios([sum_scenario(0)])
    collect(agents, server, "--k", 3, "--seed", 5)
    first = sorted(request.body["seed"] for request in server.requests)
    assert len(set(first)) == 6
    server.requests.clear()
    collect(agents, server, "--k", 3, "--seed", 5)
    assert sorted(request.body["seed"] for request in server.requests) == first
    server.requests.clear()
    collect(agents, server, "--k", 3, "--seed", 6)
    assert not set(first) & {request.body["seed"] for request in server.requests}


def test_a_model_that_wants_the_other_limit(agents: Agents, server: JudgeServer) -> None:
    def behave(handler: Handler, request: Request) -> None:
        if "max_tokens" in request.body:
            message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            status(400, message)(handler, request)
        else:
            solves(handler, request)

    server.always = behave
    agents.scenarios([sum_scenario(0)])
    collect(agents, server, "--k", 1)
    assert answers(agents) == ["1"]
    assert [("max_tokens" in r.body) for r in server.requests] == [True, False, False]


@pytest.mark.parametrize(
    ("body", "outcome", "detail"),
    [
        (reply("It is", finish="length"), "truncated: max_new_tokens_per_turn", ""),
        (reply(None, ("add", "{nonsense")), "malformed call", ""),
        (reply(None, ("add", "[1]")), "malformed call", ""),
        (reply(None, ("add", {"a": "x"})), "malformed call", ""),
        (reply(None, ("", {})), "malformed call", ""),
        (reply(None, ("multiply", {})), "malformed call", ""),
        (reply(None), "empty turn", ""),
        (reply("It is 7."), "not solved", "0, and 1 is needed"),
        (reply(None, refusal="I will not"), "failed", "withheld the reply: I will not"),
        (reply(None, finish="content_filter"), "failed", "withheld the reply: content_filter"),
    ],
)
def test_replies_that_are_no_success(
    agents: Agents, server: JudgeServer, body: bytes, outcome: str, detail: str
) -> None:
    agents.scenarios([sum_scenario(0)])
    server.always = says(body)
    collect(agents, server, "--k", 1, code=1)
    [member] = report(agents)["scenarios"][0]["members"]
    assert member["outcome"] == outcome
    assert detail in member.get("detail", "")


def test_content_in_parts_and_arguments_as_an_object(agents: Agents, server: JudgeServer) -> None:
    agents.scenarios([sum_scenario(0)])
    first = json.loads(reply(None, ("submit", {"answer": "1"})))
    message = first["choices"][0]["message"]
    message["content"] = [{"type": "text", "text": "It is "}, {"type": "text", "text": "1."}]
    message["tool_calls"][0]["function"]["arguments"] = {"answer": "1"}
    server.always = says(json.dumps(first).encode())
    collect(agents, server, "--k", 1)
    assert lines(agents)[0]["messages"][1]["content"] == "It is 1."


@pytest.mark.parametrize(
    "fault",
    [
        status(429, "slow down", Retry_After="0"),
        status(500),
        status(503),
        reset,
        half_a_body,
        raw(b"<html>busy</html>", "text/html"),
        raw(b"[]"),
        raw(json.dumps({"error": {"message": "overloaded"}}).encode()),
    ],
    ids=["429", "500", "503", "reset", "half a body", "html", "array", "error in 200"],
)
def test_what_passes_is_asked_again(agents: Agents, server: JudgeServer, fault: Behaviour) -> None:
    agents.scenarios([sum_scenario(0)])
    server.script.extend([fault, solves, fault])
    collect(agents, server, "--k", 1)
    assert answers(agents) == ["1"]
    assert len(server.requests) == 4


@pytest.mark.parametrize("fault", [status(500, "broken"), hang, drip], ids=["500", "hang", "drip"])
def test_what_does_not_pass_costs_its_trajectory(
    agents: Agents, server: JudgeServer, fault: Behaviour
) -> None:
    def behave(handler: Handler, request: Request) -> None:
        (fault if number_of(request) == 1 else solves)(handler, request)

    server.always = behave
    collect(agents, server, "--k", 1, agent={"collect_api": {"timeout_secs": 0.2}})
    assert answers(agents) == ["1", "3"]
    assert outcomes(agents, 1) == ["failed"]
    detail = report(agents)["scenarios"][1]["members"][0]["detail"]
    assert "broken" in detail or "no reply in 0.2 seconds" in detail
    assert sum(number_of(request) == 1 for request in server.requests) == 5


def test_a_request_that_is_refused_costs_its_trajectory(agents: Agents, server: JudgeServer) -> None:
    def behave(handler: Handler, request: Request) -> None:
        refused = status(400, "context length exceeded")
        (refused if number_of(request) == 1 else solves)(handler, request)

    server.always = behave
    collect(agents, server, "--k", 1)
    assert outcomes(agents, 1) == ["failed"]
    assert sum(number_of(request) == 1 for request in server.requests) == 1


@pytest.mark.parametrize("code", [401, 403, 404, 307])
def test_an_endpoint_that_refuses_everything_ends_the_command(
    agents: Agents, server: JudgeServer, code: int
) -> None:
    server.always = status(code, "no such thing")
    outcome = collect(agents, server, code=2)
    assert "agent.toml:" in outcome.err
    assert f"(status {code})" in outcome.err
    assert len(server.requests) <= 8
    assert not (agents / "out.jsonl").exists()


def test_a_key_that_is_taken_back_leaves_what_is_complete(agents: Agents, server: JudgeServer) -> None:
    agents.scenarios([sum_scenario(0), *(sum_scenario(n) for n in range(1, 30))])
    gate = threading.Event()

    def behave(handler: Handler, request: Request) -> None:
        if number_of(request) == 0:
            solves(handler, request)
            if request.body["messages"][-1]["role"] == "tool":
                gate.set()
        else:
            gate.wait(10)
            threading.Event().wait(0.3)
            status(401, "expired")(handler, request)

    server.always = behave
    outcome = collect(agents, server, "--k", 1, code=2)
    assert answers(agents) == ["1"]
    assert "1 of 30 scenarios were complete" in outcome.err
    assert "expired" in outcome.err
    assert report(agents)["complete"] is False


def test_a_key_is_sent_and_never_shown(
    agents: Agents, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIG_KEY", "s3cret-value")
    agents.scenarios([sum_scenario(0), sum_scenario(1)])
    fault = status(400, "s3cret-value is wrong")
    server.always = lambda handler, request: (fault if number_of(request) else solves)(handler, request)
    outcome = collect(agents, server, "--k", 1)
    assert "*** is wrong" in report(agents)["scenarios"][1]["members"][0]["detail"]
    assert server.requests[0].headers["Authorization"] == "Bearer s3cret-value"
    texts: Sequence[str] = (outcome.out, outcome.err, (agents / "report.json").read_text())
    assert not any("s3cret-value" in text for text in texts)


def test_a_key_that_is_not_set_is_named(agents: Agents, server: JudgeServer) -> None:
    api: Mapping[str, Any] = {"base_url": "https://api.example.com/v1"}
    outcome = collect(agents, server, code=2, agent={"collect_api": api})
    assert "agent.collect_api.api_key_env: the environment variable BIG_KEY is not set" in outcome.err


def test_a_judge_cannot_grade_a_hosted_model(agents: Agents, server: JudgeServer) -> None:
    judge = {"type": "command", "command": ["true"]}
    outcome = collect(agents, server, code=2, agent={"environment": None, "judge": judge})
    assert "a judge ranks trajectories of the model that is trained" in outcome.err
    assert not server.requests


def test_what_no_environment_grades_is_unverified(agents: Agents, server: JudgeServer) -> None:
    agents.scenarios([sum_scenario(0, grade="none"), sum_scenario(1)])
    judge = {"type": "command", "command": ["false"]}
    collect(agents, server, "--k", 1, agent={"judge": judge})
    assert answers(agents) == ["2"]
    assert outcomes(agents) == ["unverified"]
    collect(agents, server, "--k", 1, "--allow-unverified", agent={"judge": judge})
    assert answers(agents) == ["1", "2"]


def test_pairs(agents: Agents, server: JudgeServer) -> None:
    agents.scenarios([sum_scenario(0)])
    good, bad = reply(None, ("submit", {"answer": "1"})), reply(None, ("submit", {"answer": "9"}))
    server.always = says(good, bad)
    collect(agents, server, "--k", 2, "--pairs")
    [pair] = lines(agents)
    assert "9" in json.dumps(pair["rejected"])
    assert '"1"' in json.dumps(pair["chosen"])


def test_requests_are_bounded(agents: Agents, server: JudgeServer) -> None:
    server.delay = 0.02
    agents.scenarios([sum_scenario(n) for n in range(10)])
    collect(agents, server, "--k", 4)
    assert 2 <= server.most_at_once <= 8
    assert len(lines(agents)) == 10
