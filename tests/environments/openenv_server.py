"""OpenEnv servers for tests, run by a Python that has the package `openenv`: PORT.

Below `/echo` there are tools and room for three sessions, below `/guess` one typed action and room for one.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from starlette.applications import Starlette
from starlette.routing import Mount


class EchoEnvironment(MCPEnvironment):
    """Tools `echo`, `count` and `fail`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("echo")

        @server.tool
        def echo(message: str) -> str:
            """Say a message again."""
            return message

        @server.tool
        def count(word: str) -> dict:
            """Count the letters of a word."""
            return {"word": word, "letters": len(word)}

        @server.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("it went wrong")

        super().__init__(server)
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Observation:
        self._state = State(episode_id=episode_id, step_count=0, given=given, seed=seed)
        return Observation(done=False, reward=None, metadata={"status": "ready"})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError(f"unknown action {action}")

    def step(self, action: Action, timeout_s: float | None = None, **given: Any) -> Observation:
        self._state.step_count += 1
        return super().step(action, timeout_s=timeout_s, **given)

    async def step_async(self, action: Action, timeout_s: float | None = None, **given: Any) -> Observation:
        self._state.step_count += 1
        return await super().step_async(action, timeout_s=timeout_s, **given)

    @property
    def state(self) -> State:
        return self._state


class Guess(Action):
    """A guess."""

    number: int


class Answer(Observation):
    """What a guess is answered with."""

    hint: str = ""


class GuessEnvironment(Environment):
    """Guess the number that the scenario gives."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret = 0
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, secret: int = 7) -> Answer:
        self._secret = secret
        self._state = State(episode_id=episode_id, step_count=0)
        return Answer(hint="guess a number from 1 to 10")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Answer:
        self._state.step_count += 1
        if action.number > 100:
            raise ValueError("the number is far too large")
        if action.number == self._secret:
            return Answer(hint="right", done=True, reward=1.0)
        return Answer(hint="larger" if action.number < self._secret else "smaller", reward=0.0)

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    echo = create_app(
        EchoEnvironment, CallToolAction, CallToolObservation, env_name="echo", max_concurrent_envs=3
    )
    guess = create_app(GuessEnvironment, Guess, Answer, env_name="guess", max_concurrent_envs=1)
    app = Starlette(routes=[Mount("/echo", echo), Mount("/guess", guess)])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
