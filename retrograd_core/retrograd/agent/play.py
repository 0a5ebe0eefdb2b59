"""One trajectory: the model and its tools in turns, until the task ends or a limit is reached."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import anyio
import attrs
import numpy as np

from retrograd.conversation import ConversationEncoder
from retrograd.engine import Completion, GenerationRequest
from retrograd.tool_prompt import openai_tool
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
    ToolCall,
    ToolSpec,
)

from .trajectory import Trajectory

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


class SharedTools(Protocol):
    """Tools that all trajectories share (MCP servers)."""

    def specs(self) -> Sequence[ToolSpec]:
        """In a fixed order."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Run a call. Raises `RolloutError` if the server is gone."""


class NoTools:
    """No shared tools."""

    def specs(self) -> Sequence[ToolSpec]:
        return ()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        raise RolloutError(f"there is no tool {name!r}")


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
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    """Calls that could not be read, or whose tool or arguments do not exist."""
    tool_errors: int = 0
    """Valid calls that came back with an error."""
    seconds: float = 0.0
    tool_seconds: float = 0.0

    @property
    def setup_failed(self) -> bool:
        """It broke before the model wrote anything."""
        return bool(self.failed) and self.turns == 0


Acquire = Callable[[Scenario], Awaitable[Environment]]


@attrs.frozen(kw_only=True, eq=False)
class Player:
    """Plays scenarios with one policy. Many trajectories may be in play at once.

    Args:
        acquire: makes the world of a trajectory; None plays without one.
        seed: of all random draws; a trajectory's draws depend on it and on its `stream` alone.
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

    async def play(self, scenario: Scenario, member: int, stream: int) -> Played:
        """Play a scenario to its end. Never raises for what goes wrong in this trajectory alone; its world is
        closed on every path."""
        started = time.monotonic()
        trajectory = self.begin(self.opening(scenario))
        played = Played(scenario=scenario, member=member, trajectory=trajectory)
        session = object()
        limit = self.limits.max_rollout_secs or float("inf")
        world: list[Environment] = []
        try:
            with anyio.move_on_after(limit) as deadline:
                await self._play(played, stream, session, world)
            if deadline.cancelled_caught:
                self._overrun(played)
        except (RolloutError, TokenizerError, DataError) as error:
            played.failed = str(error)
        finally:
            self.speaker.end_session(session)
            with anyio.CancelScope(shield=True):
                for environment in world:
                    await environment.close()
        played.seconds = time.monotonic() - started
        return played

    def opening(self, scenario: Scenario) -> tuple[Message, ...]:
        """The messages that a scenario begins with."""
        system = "\n\n".join(text for text in (scenario.system, self.system_suffix) if text)
        user = Message(role="user", content=scenario.user)
        return (Message(role="system", content=system), user) if system else (user,)

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
        completion = await self.speaker.generate(
            GenerationRequest(
                prompt=trajectory.tokens,
                params=attrs.evolve(self.sampling, max_new_tokens=budget),
                stop_ids=self.stop_ids,
                stream=stream * STREAMS_PER_TRAJECTORY + played.turns,
            ),
            session,
        )
        parsed = trajectory.add_turn(completion)
        played.turns += 1
        if completion.finish == "length":
            played.truncated = "max_trajectory_tokens" if budget == room else "max_new_tokens_per_turn"
            return None
        return parsed

    async def _play(self, played: Played, stream: int, session: object, world: list[Environment]) -> None:
        environment: Environment | None = None
        own: Sequence[ToolSpec] = ()
        if self.acquire is not None:
            environment = await self.acquire(played.scenario)
            world.append(environment)
            seed = int(np.random.default_rng([self.sampling.seed, stream]).integers(1 << 31))
            observation = await environment.reset(played.scenario, seed)
            own = await environment.tools()
            if observation:
                *before, user = played.trajectory.opening
                joined = attrs.evolve(user, content=f"{user.content}\n\n{observation}")
                played.trajectory.opening = (*before, joined)
        belt = _Belt(own, self.shared_tools, environment)
        played.trajectory.tools = belt.catalogue()
        played.trajectory.start()
        done = await self._turns(played, stream, session, belt)
        if environment is not None and (done or not played.truncated):
            await self._grade(played, environment)

    async def _turns(self, played: Played, stream: int, session: object, belt: _Belt) -> bool:
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
            trajectory.continue_with(trajectory.framing(observations))

    async def _act(self, played: Played, parsed: ParsedTurn, belt: _Belt) -> tuple[list[Message], bool, bool]:
        """Run the calls of a turn in order: observations, whether any call was valid, whether the episode
        ended."""
        if not parsed.tool_calls:
            played.failed_calls += bool(parsed.error)
            text = f"ERROR: {parsed.error}" if parsed.error else NO_CALL
            return [Message(role="user", content=text)], False, False
        observations: list[Message] = []
        valid = False
        for call in parsed.tool_calls:
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
            played.failed_calls += 1
            observations.append(Message(role="user", content=f"ERROR: {parsed.error}"))
        return observations, valid, False

    async def _grade(self, played: Played, environment: Environment) -> None:
        score = await environment.grade()
        steps = sum(reward for _, reward in played.step_rewards)
        if score.kind == "missing" and played.step_rewards:
            score = Score(kind="value", value=steps, explanation="sum of step rewards")
        elif score.kind == "value":
            score = attrs.evolve(score, value=score.value + steps)
        played.reward = score
        played.final_state = await environment.state()

    def _overrun(self, played: Played) -> None:
        if played.turns:
            played.truncated = "max_rollout_secs"
        else:
            played.failed = (
                f"no token was written within max_rollout_secs = {self.limits.max_rollout_secs:g} s: the"
                " environment's setup or the wait for it took too long"
            )


class _Belt:
    """The tools of one trajectory: the world's own, then the shared ones."""

    def __init__(self, own: Sequence[ToolSpec], shared: SharedTools, environment: Environment | None) -> None:
        self._own = {spec.name: spec for spec in own}
        self._shared = {spec.name: spec for spec in shared.specs()}
        twice = sorted(set(self._own) & set(self._shared))
        if twice:
            raise RolloutError(f"the tool {twice[0]!r} is offered by the environment and by an MCP server")
        self._calls = shared
        self._environment = environment

    def catalogue(self) -> tuple[Mapping[str, Any], ...]:
        """In OpenAI's function shape."""
        specs = (*self._own.values(), *self._shared.values())
        return tuple(openai_tool(spec.name, spec.description, spec.input_schema) for spec in specs)

    def problem(self, call: ToolCall) -> str | None:
        """Why a call cannot be run, for the model; None if it can."""
        from .arguments import validate_arguments

        spec = self._own.get(call.name) or self._shared.get(call.name)
        if spec is None:
            known = ", ".join(sorted({*self._own, *self._shared})) or "none"
            return f"there is no tool {call.name!r}; tools: {known}"
        return validate_arguments(spec, call.arguments)

    async def call(self, call: ToolCall) -> StepResult:
        """Run a call that has no problem."""
        if call.name in self._own:
            assert self._environment is not None
            return await self._environment.step(call.name, call.arguments)
        return await self._calls.call(call.name, call.arguments)
