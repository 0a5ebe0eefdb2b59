"""What ends a trajectory, and what it is called then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from retrograd.agent.play import Limits
from retrograd.agent.trajectory import CUT_MARK
from retrograd_hookspecs import Score, StepResult

from .stand_ins import SCENARIO, STOP, TOKENIZER, Echoes, Speaker, play, play_one, player
from .support import call

SAY, END = call("say", text="hi"), call("end")


def test_an_episode_that_the_environment_ends() -> None:
    played = play_one([SAY, END, "never"], Echoes())
    assert (played.truncated, played.failed, played.turns, played.calls) == ("", "", 2, 2)
    assert played.reward == Score(kind="value", value=1.0)
    assert played.final_state == "hi"
    assert [m.role for m in played.trajectory.messages] == ["assistant", "tool", "assistant", "tool"]
    assert played.trajectory.tokens[-1] == STOP


@pytest.mark.parametrize("ends", [True, False])
def test_a_turn_without_a_call(ends: bool) -> None:
    played = play_one([SAY, "I am done.", END], Echoes(), end_on_no_tool_call=ends)
    assert played.turns == (2 if ends else 3)
    assert played.reward.value == 1.0
    if not ends:
        told = played.trajectory.messages[3]
        assert told.role == "user"
        assert told.content.startswith("ERROR: this turn called no tool")
        assert played.failed_calls == 0


def test_a_call_that_cannot_be_read_is_no_end() -> None:
    played = play_one(["<tool_call>{oops</tool_call>", END], Echoes())
    assert played.turns == 2
    assert played.trajectory.messages[1].content.startswith("ERROR: not a call")
    assert (played.calls, played.failed_calls, played.tried_calls) == (1, 1, 2)


def test_turns() -> None:
    played = play_one([SAY, SAY, SAY], Echoes(), max_turns=2)
    assert (played.truncated, played.turns) == ("max_turns", 2)
    assert played.reward.kind == "missing"
    assert play_one([SAY, END], Echoes(), max_turns=2).truncated == ""
    assert play_one([SAY, "Done."], Echoes(), max_turns=2).truncated == ""


def test_a_cut_trajectory_is_graded_where_that_is_wanted() -> None:
    played = play_one([SAY, SAY, SAY], Echoes(), max_turns=2, grade_cut=True)
    assert (played.truncated, played.reward.value) == ("max_turns", 2.0)


def test_tokens_of_a_turn() -> None:
    played = play_one(["x" * 50], Echoes(), max_new_tokens_per_turn=20)
    assert played.truncated == "max_new_tokens_per_turn"
    assert sum(played.trajectory.trained) == 20
    assert played.trajectory.messages[-1].content == "x" * 20
    assert not played.trajectory.messages[-1].token_ids


def test_tokens_of_a_trajectory() -> None:
    speaker = Speaker({0: [SAY, "x" * 3000]})
    [played] = play(speaker, Echoes(), max_trajectory_tokens=1200, max_new_tokens_per_turn=5000)
    assert played.truncated == "max_trajectory_tokens"
    assert len(played.trajectory.tokens) == 1200
    assert len(speaker.requests[1].prompt) + speaker.requests[1].params.max_new_tokens == 1200


@pytest.mark.parametrize("length", [300, 2000])
def test_an_observation_that_is_too_long_is_cut(length: int) -> None:
    """One whole turn is left to the model. The same observation is always cut at the same place."""
    long = StepResult(observation="\U0001f600é" * length)

    def once() -> Any:
        provider = Echoes(lambda number: {"say": lambda: long})
        return play_one([SAY, END], provider, max_trajectory_tokens=1500, max_new_tokens_per_turn=100)

    played = once()
    assert (played.failed, played.truncated, played.turns, played.trajectory.cuts) == ("", "", 2, 1)
    text = played.trajectory.messages[1].content
    assert text.endswith(CUT_MARK)
    assert long.observation.startswith(text.removesuffix(CUT_MARK))
    before = len(played.trajectory.tokens) - len(TOKENIZER.encode(END, special=True)) - 1
    assert 1390 < before <= 1400
    assert once().trajectory.tokens == played.trajectory.tokens


def test_several_observations_are_cut_to_one_length() -> None:
    turn = "".join(call("say", text=text) for text in ("a" * 40, "b" * 3000, "c" * 3000))
    played = play_one(
        [turn, END],
        Echoes(),
        max_trajectory_tokens=9000,
        max_new_tokens_per_turn=6800,
    )
    first, *rest = [m.content for m in played.trajectory.messages if m.role == "tool"][:3]
    assert first == "a" * 40
    assert len({len(text) for text in rest}) == 1
    assert all(text.endswith(CUT_MARK) for text in rest)
    assert played.trajectory.cuts == 2
    assert not played.truncated


def test_without_room_for_an_observation_the_trajectory_is_cut() -> None:
    turn = "".join(call("say", text="abc") for _ in range(6))
    room = len(TOKENIZER.encode(turn, special=True))
    start = play_one([END], Echoes()).trajectory.prompt_tokens
    played = play_one(
        [turn, END], Echoes(), max_trajectory_tokens=start + room + 40, max_new_tokens_per_turn=5000
    )
    assert played.truncated == "max_trajectory_tokens"
    assert played.turns == 1
    assert sum(played.trajectory.trained) == room + 1
    assert [m.content for m in played.trajectory.messages[1:]] == ["abc"] * 6


def test_a_prompt_without_room_fails_the_setup() -> None:
    played = play_one([END], Echoes(lambda number: {"reset": lambda: "x" * 500}), max_trajectory_tokens=400)
    assert played.setup_failed
    assert "max_trajectory_tokens = 400 leaves no room for a turn" in played.failed


def test_turns_in_a_row_without_a_valid_call() -> None:
    bad, worse = call("nothing"), "<tool_call>{</tool_call>"
    limits: dict[str, Any] = {"max_failed_turns": 3, "max_turns": 9}
    played = play_one([bad, worse, bad, END], Echoes(), **limits)
    assert (played.truncated, played.turns) == ("max_failed_turns", 3)
    played = play_one([bad, worse, SAY, bad, worse, END], Echoes(), **limits)
    assert (played.truncated, played.turns, played.reward.value) == ("", 6, 1.0)
    mixed = call("nothing") + SAY
    assert play_one([bad, mixed, bad, mixed, bad, END], Echoes(), **limits).truncated == ""
    silent = play_one([bad, "hm", "hm", END], Echoes(), **limits, end_on_no_tool_call=False)
    assert silent.truncated == "max_failed_turns"


@pytest.mark.parametrize("stage", ["acquire", "reset", "tools", "turn", "say", "grade", "state"])
def test_seconds(stage: str) -> None:
    """Before the first turn the setup failed; later the trajectory is cut."""
    slow = {} if stage == "turn" else {stage: lambda: anyio.sleep(30)}
    provider = Echoes(lambda number: slow)
    speaker = Speaker({0: [SAY, END]}, lambda trajectory: 30 if stage == "turn" else 0)
    [played] = play(speaker, provider, max_rollout_secs=0.1)
    setup = stage in ("acquire", "reset", "tools")
    assert played.setup_failed == setup
    assert bool(played.failed) == setup
    assert played.truncated == ("" if setup else "max_rollout_secs")
    if setup:
        assert "no token was written within max_rollout_secs = 0.1 s" in played.failed
    assert played.seconds < 5
    assert provider.worlds[0].closed == (0 if stage == "acquire" else 1)
    assert speaker.ended.total() == 1


def test_an_environment_that_turns_cancellation_into_an_error_overran() -> None:
    async def rude() -> None:
        try:
            await anyio.sleep(30)
        except BaseException as error:
            raise ValueError("interrupted") from error

    [played] = play(Speaker({0: [SAY, END]}), Echoes(lambda number: {"say": rude}), max_rollout_secs=0.1)
    assert (played.truncated, played.failed) == ("max_rollout_secs", "")


def test_without_a_limit_of_seconds() -> None:
    assert play_one([SAY, END], Echoes(), max_rollout_secs=0).truncated == ""


def test_waiting_for_a_place_costs_no_time() -> None:
    provider: Any = Echoes()
    provider.places = 2
    speaker = Speaker({-1: [END]}, lambda trajectory: 0.15)
    played = play(speaker, provider, count=8, max_rollout_secs=0.4)
    assert [one.truncated + one.failed for one in played] == [""] * 8


def test_token_budget() -> None:
    assert Limits(max_turns=3, max_new_tokens_per_turn=10, max_trajectory_tokens=100).token_budget == 30
    assert Limits(max_turns=30, max_new_tokens_per_turn=10, max_trajectory_tokens=100).token_budget == 100


@pytest.mark.parametrize(
    ("system", "suffix", "expected"),
    [
        ("", "", []),
        ("Be kind.", "", ["Be kind."]),
        ("", "Use tools.", ["Use tools."]),
        ("Be kind.", "Use tools.", ["Be kind.\n\nUse tools."]),
    ],
)
def test_system_messages(system: str, suffix: str, expected: Sequence[str]) -> None:
    from retrograd_hookspecs import Scenario

    opening = player(Speaker({}), system_suffix=suffix).opening(Scenario(id="a", user="Go.", system=system))
    assert [m.content for m in opening if m.role == "system"] == expected
    assert opening[-1].content == SCENARIO.user


def test_an_opening_observation_follows_the_task() -> None:
    played = play_one([END], Echoes(lambda number: {"reset": lambda: "A door. \ud800"}))
    assert played.trajectory.opening[-1].content == "Go.\n\nA door. \ufffd"
