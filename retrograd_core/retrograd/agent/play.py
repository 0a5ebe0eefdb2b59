"""One trajectory: the model and its tools in turns, until the task ends or a limit is reached."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio
import attrs
import numpy as np

from retrograd.conversation import ConversationEncoder
from retrograd.engine import Completion, GenerationRequest
from retrograd_hookspecs import (
    ChatFormat,
    DataError,
    Environment,
    Message,
    ParsedTurn,
    RolloutError,
    SamplingParams,
    Scenario,
    Score,
    StepResult,
    TokenizerError,
    ToolSpec,
)

from .constrained import CallConstraints
from .trajectory import Trajectory
from .world import Belt, NoTools, SharedTools, World, guarded

NO_CALL = "ERROR: this turn called no tool. Call one of the tools, or the one that ends the task."
NO_REWARD = Score(kind="missing", explanation="the environment gave no reward")
STREAMS_PER_TRAJECTORY = 1 << 12
"""Random streams of a trajectory: one a turn."""


class Speaker(Protocol):
    """What writes the turns: the policy (`retrograd.engine.policy.Policy`)."""

    async def generate(self, request: GenerationRequest, session: object = None) -> Completion:
        """Continue a prompt."""

    def end_session(self, session: object) -> None:
        """No turn follows in this session."""


@attrs.frozen(kw_only=True)
class Limits:
    """What ends a trajectory. `rollout_secs` 0 has no deadline, `failed_turns` 0 never cuts."""

    max_turns: int = 6
    max_new_tokens_per_turn: int = 512
    max_trajectory_tokens: int = 4096
    max_rollout_secs: float = 300.0
    end_on_no_tool_call: bool = True
    max_failed_turns: int = 0

    @property
    def token_budget(self) -> int:
        """Most tokens that the policy writes: what losses are divided by."""
        return min(self.max_turns * self.max_new_tokens_per_turn, self.max_trajectory_tokens)


@attrs.define(eq=False, kw_only=True)
class Played:
    """A trajectory that ended. `truncated` names the limit that cut it, `failed` what broke; "" for neither.

    `reward` is what the environment gave, step rewards included; of kind "missing" if it gave none.
    `step_rewards` are pairs of the index of the first token after the step and the reward.
    """

    scenario: Scenario
    member: int
    trajectory: Trajectory
    truncated: str = ""
    failed: str = ""
    reward: Score = NO_REWARD
    step_rewards: list[tuple[int, float]] = attrs.field(factory=list)
    final_state: str | None = None
    started: bool = False
    """The world was ready, and the model asked for its first turn."""
    turns: int = 0
    calls: int = 0
    """Calls that could be read."""
    unread_calls: int = 0
    """Turns with a call that could not be read."""
    failed_calls: int = 0
    """Calls that could not be read, or whose tool or arguments do not exist."""
    tool_errors: int = 0
    """Valid calls that came back with an error."""
    unclosed: str = ""
    """Why the world could not be closed; "" if it was."""
    seconds: float = 0.0
    tool_seconds: float = 0.0

    @property
    def setup_failed(self) -> bool:
        """It broke before the model wrote anything."""
        return bool(self.failed) and self.turns == 0

    @property
    def tried_calls(self) -> int:
        """Calls, read or not."""
        return self.calls + self.unread_calls


Acquire = Callable[[Scenario], Awaitable[Environment]]


@attrs.frozen(kw_only=True, eq=False)
class Player:
    """Plays scenarios with one policy. Many trajectories may be in play at once.

    Args:
        acquire: makes the world of a trajectory; None plays without one.
        seed: of all random draws; a trajectory's draws depend on it and on its `stream` alone.
        constraints: what the model's calls may be; None leaves all to the model.
    """

    speaker: Speaker
    encoder: ConversationEncoder
    chat_format: ChatFormat
    stop_ids: frozenset[int]
    limits: Limits
    sampling: SamplingParams
    shared_tools: SharedTools = attrs.field(factory=NoTools)
    acquire: Acquire | None = None
    system_suffix: str = ""
    constraints: CallConstraints | None = None

    async def play(self, scenario: Scenario, member: int, stream: int, *, grade_cut: bool = False) -> Played:
        """Play a scenario to its end. Never raises for what goes wrong in this trajectory alone; its world is
        closed on every path.

        Args:
            member: number in its group, whose members have the streams from `stream - member` on. Their
                worlds get one seed: they are the same.
            grade_cut: ask the environment for the reward of a trajectory that a limit of turns or tokens cut,
                too.
        """
        started = time.monotonic()
        trajectory = self.begin(self.opening(scenario))
        played = Played(scenario=scenario, member=member, trajectory=trajectory)
        session = object()
        world: list[World] = []
        deadline = anyio.move_on_after(self.limits.max_rollout_secs or float("inf"))
        try:
            with deadline:
                await self._play(played, stream, session, world, grade_cut)
        except (RolloutError, TokenizerError, DataError) as error:
            if not deadline.cancel_called:
                played.failed = str(error) or type(error).__name__
            else:  # what came of being cancelled
                self._overrun(played)
        finally:
            self.speaker.end_session(session)
            for one in world:
                played.unclosed = await one.close()
        if deadline.cancelled_caught:
            self._overrun(played)
        played.seconds = time.monotonic() - started
        return played

    def opening(self, scenario: Scenario) -> tuple[Message, ...]:
        """The messages that a scenario begins with."""
        system = "\n\n".join(text for text in (scenario.system, self.system_suffix) if text)
        user = Message(role="user", content=scenario.user)
        return (Message(role="system", content=system), user) if system else (user,)

    def prompt_tokens(self, scenario: Scenario) -> int:
        """Tokens of a scenario's prompt with the shared tools, without what its world adds."""
        trajectory = self.begin(self.opening(scenario))
        trajectory.tools = Belt((), self.shared_tools, None).catalogue()
        trajectory.start()
        return trajectory.prompt_tokens

    def begin(self, opening: tuple[Message, ...]) -> Trajectory:
        """A trajectory that has not started; its tools are not known yet."""
        return Trajectory(self.encoder, self.chat_format, (), opening)

    async def speak(self, played: Played, stream: int, session: object) -> ParsedTurn | None:
        """Add the next turn to the trajectory. None if a limit cut it, before the turn or in it."""
        limits, trajectory = self.limits, played.trajectory
        room = limits.max_trajectory_tokens - trajectory.next_token
        budget = min(limits.max_new_tokens_per_turn, room)
        if budget < 1:
            played.truncated = "max_trajectory_tokens"
            return None
        constraint = None
        if self.constraints is not None:
            constraint = self.constraints.of(trajectory.tools, thinking=trajectory.thinking)
        completion = await self.speaker.generate(
            GenerationRequest(
                prompt=tuple(trajectory.tokens),
                params=attrs.evolve(self.sampling, max_new_tokens=budget),
                stop_ids=self.stop_ids,
                stream=stream * STREAMS_PER_TRAJECTORY + played.turns,
                constraint=constraint,
            ),
            session,
        )
        parsed = trajectory.add_turn(completion)
        played.turns += 1
        if constraint is not None and constraint.problem:
            raise RolloutError(f"constrained decoding failed: {constraint.problem}")
        if completion.finish == "length":
            played.truncated = "max_trajectory_tokens" if budget == room else "max_new_tokens_per_turn"
            return None
        return parsed

    async def _play(
        self, played: Played, stream: int, session: object, worlds: list[World], grade_cut: bool
    ) -> None:
        world: World | None = None
        own: Sequence[ToolSpec] = ()
        trajectory = played.trajectory
        if self.acquire is not None:
            environment = await guarded("the environment's acquire", self.acquire(played.scenario))
            world = World(environment)
            worlds.append(world)
            observation = await world.reset(played.scenario, self._world_seed(stream - played.member))
            own = await world.tools()
            if observation:
                *before, user = trajectory.opening
                joined = attrs.evolve(user, content=f"{user.content}\n\n{observation}")
                trajectory.opening = (*before, joined)
        belt = Belt(own, self.shared_tools, world)
        trajectory.tools = belt.catalogue()
        trajectory.start()
        if trajectory.prompt_tokens >= self.limits.max_trajectory_tokens:
            problem = too_long(trajectory.prompt_tokens, self.limits.max_trajectory_tokens)
            raise RolloutError(": ".join(problem))
        played.started = True
        done = await self._turns(played, stream, session, belt)
        if world is not None and (done or grade_cut or not played.truncated):
            await self._grade(played, world)

    def _world_seed(self, group: int) -> int:
        """Seed of the worlds of a group, apart from the random streams of tokens."""
        return int(np.random.default_rng([self.sampling.seed, group, 1]).integers(1 << 31))

    async def _turns(self, played: Played, stream: int, session: object, belt: Belt) -> bool:
        """Turns until the episode ends; True if the environment said that it did."""
        limits, trajectory = self.limits, played.trajectory
        failed_in_a_row = 0
        while True:
            parsed = await self.speak(played, stream, session)
            if parsed is None:
                return False
            if not parsed.tool_calls and not parsed.error and limits.end_on_no_tool_call:
                return False
            observations, valid, done = await self._act(played, parsed, belt)
            failed_in_a_row = 0 if valid else failed_in_a_row + 1
            if done:
                return True
            if limits.max_failed_turns and failed_in_a_row >= limits.max_failed_turns:
                played.truncated = "max_failed_turns"
                return False
            if played.turns >= limits.max_turns:
                played.truncated = "max_turns"
                return False
            room = limits.max_trajectory_tokens - trajectory.next_token
            kept = min(limits.max_new_tokens_per_turn, room // 2)  # for the model's next turn
            framing = trajectory.framing(observations, most=room - max(kept, 1))
            if framing is None:
                played.truncated = "max_trajectory_tokens"
                return False
            trajectory.continue_with(framing)

    async def _act(self, played: Played, parsed: ParsedTurn, belt: Belt) -> tuple[list[Message], bool, bool]:
        """Run the calls of a turn in order: observations, whether any call was valid, whether the episode
        ended."""
        if not parsed.tool_calls:
            played.unread_calls += bool(parsed.error)
            played.failed_calls += bool(parsed.error)
            text = f"ERROR: {parsed.error}" if parsed.error else NO_CALL
            return [Message(role="user", content=text)], False, False
        observations: list[Message] = []
        valid = False
        for call in map(belt.fitted, parsed.tool_calls):
            played.calls += 1
            problem = belt.problem(call)
            if problem is not None:
                played.failed_calls += 1
                result = StepResult(observation=problem, is_error=True)
            else:
                valid = True
                started = time.monotonic()
                result = await belt.call(call)
                played.tool_seconds += time.monotonic() - started
                played.tool_errors += result.is_error
            observations.append(
                Message(
                    role="tool",
                    content=result.observation,
                    tool_call_id=call.id,
                    name=call.name,
                    is_error=result.is_error,
                )
            )
            if result.reward is not None:
                # What was written up to here brought the step about: the tokens before this index.
                played.step_rewards.append((played.trajectory.next_token, float(result.reward)))
            if result.done:
                played.trajectory.messages += observations
                return observations, valid, True
        if parsed.error:
            played.unread_calls += 1
            played.failed_calls += 1
            observations.append(Message(role="user", content=f"ERROR: {parsed.error}"))
        return observations, valid, False

    async def _grade(self, played: Played, world: World) -> None:
        score = await world.grade()
        rewards = [reward for _, reward in played.step_rewards]
        if score.kind == "missing" and rewards:
            score = Score(kind="value", value=sum(rewards), explanation="sum of step rewards")
        elif score.kind == "value":
            score = attrs.evolve(score, value=score.value + sum(rewards))
        if score.kind == "value" and not np.isfinite(score.value):
            score = Score(kind="error", explanation="the sum of the rewards is too large")
        played.reward = score
        try:
            played.final_state = await world.state()
        except RolloutError:
            if score.kind != "value":  # the judge would have needed it
                raise

    def _overrun(self, played: Played) -> None:
        if played.started:
            played.truncated = "max_rollout_secs"
        else:
            played.failed = (
                f"no token was written within max_rollout_secs = {self.limits.max_rollout_secs:g} s: the"
                " environment's setup or the wait for it took too long"
            )


def too_long(prompt: int, budget: int) -> tuple[str, str]:
    """Why a scenario cannot be played, and how to mend it."""
    return (
        f"the prompt has {prompt} tokens, and max_trajectory_tokens = {budget} leaves no room for a turn",
        "shorten it, or raise max_trajectory_tokens and training.ctx",
    )
