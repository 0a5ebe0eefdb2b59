"""The judge `ruler` before a server that misbehaves."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from retrograd import chat_api
from retrograd.errors import ConfigError
from retrograd_plugins.judges.ruler import RulerJudge, api_key

from .conftest import MakeJudge, judged, reason, values, worths
from .server import (
    Behaviour,
    Handler,
    JudgeServer,
    Request,
    cut,
    drip,
    half_a_body,
    hang,
    only_formats,
    raw,
    reset,
    says,
    scores_of,
    status,
    verdict,
)

GROUP = worths(0.2, 0.9, 0.4)
EXPECTED = [0.2, 0.9, 0.4]


def scored(change: Any) -> Behaviour:
    """Honest scores, changed."""
    return says(lambda request: json.dumps({"scores": change(scores_of(request))}))


PASSING: dict[str, Behaviour] = {
    "too many requests": status(429),
    "request timeout": status(408),
    "conflict": status(409),
    "too early": status(425),
    "server error": status(500),
    "unavailable": status(503),
    "overloaded": status(529),
    "half a body": half_a_body,
    "connection reset": reset,
    "not JSON": raw(b"<html>502</html>", "text/html"),
    "empty body": raw(b""),
    "no object": raw(b"[]"),
    "no choices": raw(b'{"choices": []}'),
    "gateway error with status 200": raw(b'{"error": {"code": 502, "message": "upstream"}}'),
    "no content": says(lambda request: None),
    "white space": says(lambda request: " \n"),
    "a refusal": says(lambda request: None, refusal="I cannot"),
    "prose alone": says(lambda request: "Candidate 2 is best."),
    "half of the JSON": says(lambda request: verdict(request)[:-20]),
    "reasoning without end": says(lambda request: "<think>" + verdict(request)[:-20]),
    "too few scores": scored(lambda scores: scores[1:]),
    "too many scores": scored(lambda scores: [*scores, {"id": "4", "score": 0.5}]),
    "no scores": scored(lambda scores: []),
    "a duplicate id": scored(lambda scores: [scores[0], *scores]),
    "a wrong id": scored(lambda scores: [scores[0] | {"id": "7"}, *scores[1:]]),
    "ids from zero": scored(lambda scores: [s | {"id": str(i)} for i, s in enumerate(scores)]),
    "a score above 1": scored(lambda scores: [scores[0] | {"score": 1.01}, *scores[1:]]),
    "a score below 0": scored(lambda scores: [scores[0] | {"score": -0.1}, *scores[1:]]),
    "a score that is not finite": scored(lambda scores: [scores[0] | {"score": float("nan")}, *scores[1:]]),
    "a score as text": scored(lambda scores: [scores[0] | {"score": "0.5"}, *scores[1:]]),
    "a score that is true": scored(lambda scores: [scores[0] | {"score": True}, *scores[1:]]),
    "no score": scored(lambda scores: [{"id": scores[0]["id"]}, *scores[1:]]),
    "an explanation that is no text": scored(lambda scores: [scores[0] | {"explanation": 3}, *scores[1:]]),
    "another object": says(lambda request: '{"winner": "1"}'),
    "cut at the token limit": cut,
    "two verdicts": says(lambda r: verdict(r) + " or " + verdict(r).replace("0.9", "0.1")),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_is_retried(server: JudgeServer, make: MakeJudge, fault: str) -> None:
    server.script.append(PASSING[fault])
    judge = make()
    assert values(judge, GROUP) == EXPECTED
    assert len(server.requests) == 2
    metrics = judge.metrics()
    assert (metrics["requests"], metrics["retries"], metrics["failures"]) == (2, 1, 0)


@pytest.mark.parametrize("fault", PASSING)
def test_a_lasting_fault_fails_the_verdict(server: JudgeServer, make: MakeJudge, fault: str) -> None:
    server.always = PASSING[fault]
    judge = make(max_retries=1)
    assert reason(judge, GROUP)
    assert len(server.requests) == 2
    metrics = judge.metrics()
    assert (metrics["retries"], metrics["failures"]) == (1, 1)


def test_an_unusable_reply_is_named_in_the_next_attempt(server: JudgeServer, make: MakeJudge) -> None:
    server.script.append(PASSING["a score above 1"])
    assert values(make(), GROUP) == EXPECTED
    first, second = (request.body["messages"] for request in server.requests)
    assert second[:2] == first
    assert second[2]["role"] == "assistant"
    assert "1.01, outside 0 to 1" in second[3]["content"]


def test_without_retries_the_first_fault_is_the_last(server: JudgeServer, make: MakeJudge) -> None:
    server.script.append(status(500, "it fell over"))
    assert "the server failed (status 500): it fell over" in reason(make(max_retries=0), GROUP)
    assert len(server.requests) == 1


def date_in(seconds: int) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured(server: JudgeServer, make: MakeJudge, form: str) -> None:
    def busy(handler: Handler, request: Request) -> None:
        # A date has no fractions of a second, so the one two seconds ahead is at least one second away.
        status(429, Retry_After="1" if form == "seconds" else date_in(2))(handler, request)

    server.script.append(busy)
    assert values(make(), GROUP) == EXPECTED
    first, second = server.requests
    assert 0.9 < second.time - first.time < 10


def test_retry_after_is_bounded(
    server: JudgeServer, make: MakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_api, "MAX_RETRY_AFTER_SECS", 0.2)
    server.script.append(status(503, Retry_After="86400"))
    began = time.monotonic()
    assert values(make(), GROUP) == EXPECTED
    assert 0.2 <= time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("-3", 0.0),
        ("", 0.0),
        ("1.5", 1.5),
        ("inf", 0.0),
        ("soon", 0.0),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0.0),
    ],
)
def test_retry_after_header(header: str, seconds: float) -> None:
    assert chat_api.retry_after(header) == seconds


def test_retry_after_date_without_a_zone_is_utc() -> None:
    date = (datetime.now(UTC) + timedelta(seconds=100)).strftime("%a, %d %b %Y %H:%M:%S -0000")
    assert 95 < chat_api.retry_after(date) <= 100


@pytest.mark.parametrize("behaviour", [hang, drip])
def test_a_request_has_one_deadline(server: JudgeServer, make: MakeJudge, behaviour: Behaviour) -> None:
    server.script.append(behaviour)
    began = time.monotonic()
    assert values(make(timeout_secs=0.3), GROUP) == EXPECTED
    assert 0.3 <= time.monotonic() - began < 5


def test_a_lasting_timeout_says_so(server: JudgeServer, make: MakeJudge) -> None:
    server.always = hang
    assert "no reply in 0.2 seconds" in reason(make(timeout_secs=0.2, max_retries=1), GROUP)
    assert len(server.requests) == 2


def test_nobody_listens(make: MakeJudge) -> None:
    judge = make(base_url="http://127.0.0.1:9/v1", max_retries=1)
    assert "http://127.0.0.1:9/v1/chat/completions" in reason(judge, GROUP)
    assert judge.metrics()["requests"] == 2


FINAL: dict[str, tuple[Behaviour, str]] = {
    "unauthorized": (status(401, "bad"), "the server refuses a request without a key (status 401): bad"),
    "forbidden": (status(403), "(status 403)"),
    "no model": (status(404, "unknown model"), "there is no model 'm', or no endpoint at this base_url"),
    "redirect": (status(307, location="https://x/v1"), "redirects to https://x/v1; set base_url to that"),
    "payment": (status(402, "pay"), "(status 402): pay"),
    "gateway": (raw(b'{"error": {"code": 401, "message": "no key"}}'), "no key"),
}


@pytest.mark.parametrize("fault", FINAL)
def test_a_final_fault_is_not_retried(server: JudgeServer, make: MakeJudge, fault: str) -> None:
    server.always, message = FINAL[fault]
    assert message in reason(make(), GROUP)
    assert len(server.requests) == 1


def test_a_key_is_sent_and_never_shown(server: JudgeServer, make: MakeJudge) -> None:
    assert values(make(key="sk-secret"), GROUP) == EXPECTED
    assert server.requests[0].headers["Authorization"] == "Bearer sk-secret"
    server.always = status(401, "Incorrect API key provided: sk-secret")
    message = reason(make(key="sk-secret", api_key_env="MY_KEY"), GROUP)
    assert "the key in MY_KEY" in message
    assert "sk-secret" not in message


def test_without_a_key_there_is_no_authorization(server: JudgeServer, make: MakeJudge) -> None:
    assert values(make(), GROUP) == EXPECTED
    assert "Authorization" not in server.requests[0].headers


def test_a_long_reply_is_refused(
    server: JudgeServer, make: MakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_api, "MAX_REPLY_BYTES", 1000)
    server.always = raw(b" " * 2000)
    assert "longer than 1000 bytes" in reason(make(), GROUP)


WRAPPED = {
    "plain": "{}",
    "fence": "```json\n{}\n```",
    "fence without a language": "```\n{}\n```",
    "prose around": "Here is my verdict: {} I hope that this helps {{or not}}.",
    "reasoning": '<think>I wonder: {{"scores": []}}</think>\n{}',
    "reasoning in capitals": "<THINKING>hm</THINKING>{}",
    "reasoning whose opening is in the template": "let me see {{1}}</think>{}",
    "two blocks of reasoning": "<think>a</think><think>b</think>{}",
    "all of it": "<think>hm</think>Sure!\n```json\n{}\n```\nDone.",
    "the same twice": "{0}\n{0}",
    "another object before it": '{{"note": 1}} {}',
}


@pytest.mark.parametrize("form", WRAPPED)
def test_a_verdict_is_found_in_what_surrounds_it(server: JudgeServer, make: MakeJudge, form: str) -> None:
    server.always = says(lambda request: WRAPPED[form].format(verdict(request)))
    assert values(make(), GROUP) == EXPECTED
    assert len(server.requests) == 1


def test_what_looks_like_reasoning_inside_an_explanation_is_text(
    server: JudgeServer, make: MakeJudge
) -> None:
    server.always = says(lambda r: verdict(r).replace("because", "</think> <think> because"))
    [scores] = judged(make(), GROUP)
    assert [score.value for score in scores] == EXPECTED
    assert all("</think> <think> because" in score.explanation for score in scores)


def test_integer_ids_and_missing_explanations_are_taken(server: JudgeServer, make: MakeJudge) -> None:
    server.always = scored(lambda scores: [{"id": int(s["id"]), "score": s["score"]} for s in scores])
    [scores] = judged(make(), GROUP)
    assert [(score.value, score.explanation) for score in scores] == [(v, "") for v in EXPECTED]


def test_scores_are_put_back_by_id(server: JudgeServer, make: MakeJudge) -> None:
    server.always = scored(lambda scores: scores[::-1])
    assert values(make(), GROUP) == EXPECTED


def test_content_in_parts_is_joined(server: JudgeServer, make: MakeJudge) -> None:
    def parts(request: Request) -> list[dict[str, str]]:
        text = verdict(request)
        return [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]

    server.always = says(parts)
    assert values(make(), GROUP) == EXPECTED


def test_a_wrong_content_type_is_no_fault(server: JudgeServer, make: MakeJudge) -> None:
    server.always = lambda handler, request: raw(
        json.dumps({"choices": [{"message": {"content": verdict(request)}}]}).encode(), "text/plain"
    )(handler, request)
    assert values(make(), GROUP) == EXPECTED


@pytest.mark.parametrize(
    ("known", "tried"),
    [
        (("json_schema",), ["json_schema"]),
        (("json_object", "text"), ["json_schema", "json_object"]),
        (("text",), ["json_schema", "json_object", "text"]),
    ],
)
def test_the_surest_format_is_found_once(
    server: JudgeServer, make: MakeJudge, known: tuple[str, ...], tried: list[str]
) -> None:
    server.always = only_formats(*known)
    judge = make(max_retries=0)
    assert [s.value for s in judged_one_by_one(judge, 2)[1]] == EXPECTED
    assert server.formats() == [*tried, tried[-1]]
    assert judge.metrics()["retries"] == 0


def judged_one_by_one(judge: Any, times: int) -> list[Any]:
    import anyio

    async def run() -> list[Any]:
        found = [await judge.score(GROUP) for _ in range(times)]
        await judge.close()
        return found

    return anyio.run(run)


def test_a_request_that_is_bad_in_every_format_changes_none(server: JudgeServer, make: MakeJudge) -> None:
    server.script.extend([status(400, "context length exceeded"), status(400, "b"), status(400, "c")])
    judge = make()
    [failed, judged_after] = judged_one_by_one(judge, 2)
    assert "context length exceeded" in failed[0].explanation
    assert [s.value for s in judged_after] == EXPECTED
    assert server.formats() == ["json_schema", "json_object", "text", "json_schema"]


def test_the_schema_lists_the_ids(server: JudgeServer, make: MakeJudge) -> None:
    values(make(), GROUP)
    schema = server.requests[0].body["response_format"]["json_schema"]
    assert schema["strict"] is True
    assert schema["schema"]["properties"]["scores"]["items"]["properties"]["id"]["enum"] == ["1", "2", "3"]


def test_one_failed_request_of_several_fails_the_group(server: JudgeServer, make: MakeJudge) -> None:
    """Pairwise: three requests, one of which is refused."""
    server.script.append(status(404))
    judge = make(strategy=pairwise(), max_concurrency=1)
    assert "there is no model" in reason(judge, GROUP)
    assert len(server.requests) == 1  # the rest is not asked for


def pairwise() -> Any:
    from retrograd_plugins.judges.ruler import RulerStrategy

    return RulerStrategy(mode="pairwise", both_orders=False)


def test_the_limit_holds_for_all_groups_together(server: JudgeServer, make: MakeJudge) -> None:
    server.delay = 0.05
    groups = [worths(0.1 * i, 0.5, 0.9) for i in range(9)]
    found = judged(make(max_concurrency=3), *groups)
    assert [scores[0].value for scores in found] == pytest.approx([0.1 * i for i in range(9)])
    assert server.most_at_once == 3


def test_waiting_for_a_turn_is_not_part_of_the_deadline(server: JudgeServer, make: MakeJudge) -> None:
    """Five requests of 0.3 seconds, one after another, each with a deadline of one second."""
    server.delay = 0.3
    judge = make(max_concurrency=1, timeout_secs=1.0)
    found = judged(judge, *(worths(0.1 * i, 0.5) for i in range(5)))
    assert [scores[0].value for scores in found] == pytest.approx([0.1 * i for i in range(5)])
    assert judge.metrics()["retries"] == 0


def test_a_judge_goes_from_one_event_loop_to_the_next(server: JudgeServer, make: MakeJudge) -> None:
    import anyio

    judge = make()
    for _ in range(3):
        assert [score.value for score in anyio.run(judge.score, GROUP)] == EXPECTED
    anyio.run(judge.close)
    anyio.run(judge.close)
    assert "closed" in anyio.run(judge.score, GROUP)[0].explanation


@pytest.mark.parametrize(
    ("url", "value", "expected"),
    [
        ("http://127.0.0.1:8080/v1", None, ""),
        ("http://localhost:8080/v1", "", ""),
        ("http://[::1]:8080/v1", None, ""),
        ("http://127.0.0.1:8080/v1", " key\n", "key"),
        ("https://api.openai.com/v1", "key", "key"),
    ],
)
def test_key(monkeypatch: pytest.MonkeyPatch, url: str, value: str | None, expected: str) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    assert api_key(RulerJudge(base_url=url, model="m", api_key_env="JUDGE_KEY")) == expected


@pytest.mark.parametrize(
    ("value", "message"), [(None, "JUDGE_KEY is not set"), ("", "is empty"), ("a\nb", "no HTTP header")]
)
def test_a_missing_key_is_refused_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, value: str | None, message: str
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    config = RulerJudge(base_url="https://127.0.0.1.example.com/v1", model="m", api_key_env="JUDGE_KEY")
    with pytest.raises(ConfigError, match=message):
        api_key(config)
