"""What the judge `ruler` shows of a member: calls, states, cuts, summaries."""

from __future__ import annotations

from typing import Any

from retrograd_hookspecs import JudgeGroup, JudgeMember, Message, ToolCall
from retrograd_plugins.judges.ruler import RulerCompaction, RulerContext, RulerStrategy

from .conftest import MakeJudge, answers, reason, values
from .server import JudgeServer, says, status


def trajectory(*contents: str, state: str | None = None) -> JudgeMember:
    messages = [Message(role=("assistant", "tool")[i % 2], content=c) for i, c in enumerate(contents)]  # type: ignore[arg-type]
    return JudgeMember(messages=tuple(messages), final_state=state)


def group(*members: JudgeMember) -> JudgeGroup:
    opening = (Message(role="user", content="Fix it."),)
    return JudgeGroup(id="g", opening=opening, members=members)


def test_calls_observations_and_errors_are_shown(server: JudgeServer, make: MakeJudge) -> None:
    call = ToolCall(name="bash", arguments={"cmd": "ls é"}, id="c1")
    member = JudgeMember(
        messages=(
            Message(role="assistant", content="I look.", tool_calls=(call,)),
            Message(role="tool", content="no such", tool_call_id="c1", name="bash", is_error=True),
            Message(role="assistant", content="<call>raw</call>", tool_calls=(call,), raw=True),
            Message(role="assistant", content=""),
        )
    )
    values(make(), group(member, *answers("worth 0.1")))
    [text] = [text for text in server.requests[0].candidates.values() if "bash" in text]
    assert text == (
        '[assistant]\nI look.\ncalls bash {"cmd": "ls é"}\n\n[tool bash, error]\nno such\n\n'
        "[assistant]\n<call>raw</call>\n\n[assistant]\n(empty)"
    )


def test_final_states(server: JudgeServer, make: MakeJudge) -> None:
    members = (trajectory("same", state="worth 0.2"), trajectory("same", state="worth 0.7"))
    assert values(make(), group(*members)) == [0.2, 0.7]
    judge = make(context=RulerContext(include_env_state=False))
    assert values(judge, group(*members)) == [0.5, 0.5]  # now they are equal, and shown once
    shown, hidden = server.requests
    assert "[final state]\nworth 0.2" in shown.user
    assert "final state" not in hidden.user


def test_a_state_may_stand_for_the_transcript(server: JudgeServer, make: MakeJudge) -> None:
    members = [JudgeMember(messages=(), final_state=f"worth {value}") for value in (0.2, 0.7)]
    assert values(make(), group(*members)) == [0.2, 0.7]
    assert sorted(server.requests[0].candidates.values()) == [
        "[final state]\nworth 0.2",
        "[final state]\nworth 0.7",
    ]


def test_budgets_cut_the_middle_and_say_so(server: JudgeServer, make: MakeJudge) -> None:
    context = RulerContext(max_message_chars=500, max_trajectory_chars=1200, head_ratio=0.25)
    long = "BEGIN" + "x" * 3000 + "END"
    members = (trajectory(long, long, long, "worth 0.3"), trajectory("worth 0.6"))
    assert values(make(context=context), group(*members)) == [0.3, 0.6]
    [text] = [text for text in server.requests[0].candidates.values() if "BEGIN" in text]
    assert len(text) <= 1200
    assert text.startswith("[assistant]\nBEGIN")
    assert text.endswith("[tool]\nworth 0.3")
    assert "characters left out …]" in text


def compaction(**keys: Any) -> RulerCompaction:
    return RulerCompaction(**{"trigger_chars": 500, "target_chars": 100, "keep_last": 2} | keys)


def test_compaction_summarises_each_long_member_once(server: JudgeServer, make: MakeJudge) -> None:
    judge = make(compaction=compaction(), strategy=RulerStrategy(mode="pairwise"))
    members = [trajectory("a" * 400, "b" * 400, f"last of {i}", f"worth 0.{i}") for i in (1, 2)]
    group_with_long = group(*members, trajectory("short", "worth 0.9"))
    assert values(judge, group_with_long) == [0.0, 0.5, 1.0]
    summaries = [request for request in server.requests if request.kind == "summary"]
    assert len(summaries) == 1 + 1
    assert all("response_format" not in request.body for request in summaries)
    assert "a" * 400 in summaries[0].user
    assert "last of" not in summaries[0].user
    compared = [request for request in server.requests if request.kind == "comparison"]
    assert len(compared) == 6
    shown = [text for request in compared for text in request.candidates.values() if "last of 1" in text]
    assert len(shown) == 4
    assert shown[0].startswith("[summary of the first 2 messages]\nsummary: worth")
    assert shown[0].endswith("[assistant]\nlast of 1\n\n[tool]\nworth 0.1")


def test_a_long_summary_is_cut_and_an_empty_one_is_asked_for_again(
    server: JudgeServer, make: MakeJudge
) -> None:
    server.script.extend(
        [says(lambda r: "<think>hm</think>"), says(lambda r: "<think>hm</think>" + "s" * 900)]
    )
    judge = make(compaction=compaction())
    members = (trajectory("a" * 900, "b", "worth 0.1"), trajectory("worth 0.2"))
    assert values(judge, group(*members)) == [0.1, 0.2]
    assert judge.metrics()["retries"] == 1
    assert "hm" not in server.requests[-1].user
    assert "characters left out" in server.requests[-1].user
    assert "s" * 101 not in server.requests[-1].user


def test_a_failed_summary_fails_the_verdict(server: JudgeServer, make: MakeJudge) -> None:
    server.script.append(status(404))
    members = (trajectory("a" * 900, "b", "c"), trajectory("worth 0.2"))
    assert "(status 404)" in reason(make(compaction=compaction()), group(*members))
    assert len(server.requests) == 1
