"""Where trajectories are played: the policy, the worlds and the shared tools of a run, in one event loop.

The loop runs in a thread of its own for the whole run, so that servers, sessions and containers live from
update to update.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import anyio
import attrs

from retrograd.engine.policy import Policy
from retrograd.task_errors import one_error
from retrograd_hookspecs import AuditFinding, ConfigError, EnvironmentProvider, RolloutError, Scenario

from .play import Played, Player
from .world import Belt, SharedTools, clashes

POLL_SECONDS = 0.2
"""How often the waiting thread looks whether the run was asked to stop."""


class OpenTools(SharedTools, Protocol):
    """Shared tools with a connection (`retrograd.agent.mcp.McpTools`)."""

    async def open(self) -> Sequence[AuditFinding]:
        """Connect."""

    async def close(self) -> None:
        """Disconnect; may be called more than once."""


@attrs.frozen(kw_only=True)
class Part:
    """One trajectory to be played: a member of the group of a scenario, with a random stream of its own."""

    scenario: Scenario
    member: int
    stream: int
    grade_cut: bool = False
    """See `Player.play`."""


class Stage:
    """Plays trajectories, many at a time.

    Args:
        player: how one is played; its `acquire` is set to that of `provider`.
        provider: makes the worlds; None plays without.
        tools: MCP servers; None for none.
        check: called while trajectories are played; what it raises gives them up.
    """

    def __init__(
        self,
        *,
        player: Player,
        policy: Policy | None,
        provider: EnvironmentProvider | None,
        tools: OpenTools | None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        acquire = provider.acquire if provider is not None else None
        shared = tools if tools is not None else player.shared_tools
        self.player = attrs.evolve(player, acquire=acquire, shared_tools=shared)
        self.provider = provider
        self._policy = policy
        self._tools = tools
        self._check = check
        self._loop: Any = None
        self._portal: Any = None
        self._opened = False
        self._closed = False
        self._waiting: concurrent.futures.Future[None] | None = None

    def open(self, scenarios: Sequence[Scenario]) -> list[AuditFinding]:
        """Connect and validate everything that scenarios need. Raises as `EnvironmentProvider.prepare`, and
        `ConfigError` if a shared tool has the name of one of the environment's."""
        findings: list[AuditFinding] = []
        if self._tools is not None and not self._opened:
            findings += self.call(self._tools.open)
        self._opened = True
        if self.provider is not None:
            findings += self.call(self.provider.prepare, list(scenarios))
            offered = self.provider.catalogue().items()
            own = {name: [spec.name for spec in specs] for name, specs in offered}
            problems = clashes(own, self.player.shared_tools)
            if problems:
                raise ConfigError(problems)
        return [*findings, *self._constrained()]

    def play(
        self,
        parts: Sequence[Part],
        progress: Callable[[int, int], None] | None = None,
        *,
        at_once: int | None = None,
        on_played: Callable[[int, Played], None] | None = None,
    ) -> tuple[list[Played], float]:
        """Play all of them; how each ended, in order, and the seconds that took.

        Args:
            at_once: begin so many, and another one whenever one ends; None for as many as the policy decodes
                at once and the environment has places for. What has not begun does not use up its time.
            on_played: gets each that ended with its index, in the thread of the loop.
        """
        started = time.perf_counter()
        self._settle()
        played: list[Played] = self.call(self._play, list(parts), progress, at_once, on_played)
        return played, time.perf_counter() - started

    def _constrained(self) -> list[AuditFinding]:
        """Compile the grammars of all tools that are known already. Raises `RolloutError`."""
        constraints, shared = self.player.constraints, self.player.shared_tools
        if constraints is None:
            return []
        toolsets = list(self.provider.catalogue().values()) if self.provider is not None else []
        catalogues = [Belt(own, shared, None).catalogue() for own in toolsets or ([],)]
        for catalogue in catalogues:
            constraints.of(catalogue)
        names = {tool["function"]["name"] for catalogue in catalogues for tool in catalogue}
        message = f"the grammar holds the calls of {len(names)} tools" if names else "tools are known later"
        return [AuditFinding(level="ok", check="constrained decoding", message=message)]

    def warm_up(self, count: int) -> None:
        """Make worlds ready in the background."""
        if self.provider is not None:
            self._settle()
            self._waiting = self._portal_of().start_task_soon(self.provider.warm_up, count)

    def metrics(self) -> dict[str, float]:
        """`env/*` since the last call."""
        if self.provider is None:
            return {}
        return {f"env/{name}": float(value) for name, value in self.provider.metrics().items()}

    def close(self) -> None:
        """Release everything; may be called more than once."""
        if self._portal is None or self._closed:
            return
        self._closed = True
        if self._waiting is not None:
            self._waiting.cancel()
        failure: BaseException | None = None
        for part in (self.provider, self._tools):
            if part is not None:
                try:
                    self.call(part.close, checked=False)
                except Exception as error:  # the other one is closed all the same
                    failure = failure or error
        self._loop.__exit__(None, None, None)
        self._portal = None
        if failure is not None:
            raise failure

    def call(self, function: Callable[..., Awaitable[Any]], *arguments: Any, checked: bool = True) -> Any:
        """Await a function in the loop; given up if the run is asked to stop."""
        scopes: list[anyio.CancelScope] = []

        async def work() -> Any:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                return await function(*arguments)

        portal = self._portal_of()
        future = portal.start_task_soon(work)
        try:
            self._wait(future, checked)
        except BaseException:
            portal.call(_cancel, scopes)
            concurrent.futures.wait([future])  # worlds are closed before the next thing happens
            raise
        with one_error():
            return future.result()

    async def _play(
        self,
        parts: Sequence[Part],
        progress: Callable[[int, int], None] | None,
        at_once: int | None,
        on_played: Callable[[int, Played], None] | None,
    ) -> list[Played]:
        played: dict[int, Played] = {}
        places = anyio.Semaphore(at_once or self._places(len(parts)))

        async def one(number: int, part: Part) -> None:
            async with places:
                played[number] = await self.player.play(
                    part.scenario, part.member, part.stream, grade_cut=part.grade_cut
                )
            if on_played is not None:
                on_played(number, played[number])
            if progress is not None:
                progress(len(played), len(parts))

        async def everything() -> None:
            async with anyio.create_task_group() as tasks:
                for number, part in enumerate(parts):
                    tasks.start_soon(one, number, part)

        if self._policy is None:
            await everything()
        else:
            async with self._policy.serving():
                await everything()
        return [played[number] for number in range(len(parts))]

    def _places(self, count: int) -> int:
        """Trajectories that can go on at once: more would only wait, and their time would run out."""
        limits = [max(count, 1)]
        if self._policy is not None:
            limits.append(self._policy.slots)
        places: int | None = getattr(self.provider, "places", None)
        if places is not None:
            limits.append(places)
        return min(limits)

    def _settle(self) -> None:
        """Wait for what still goes on in the background. What fails there meets whoever acquires a world."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._wait(waiting, checked=True)
            with suppress(RolloutError):
                waiting.result()

    def _wait(self, future: concurrent.futures.Future[Any], checked: bool) -> None:
        while not concurrent.futures.wait([future], POLL_SECONDS if checked else None).done:
            self._check()

    def _portal_of(self) -> Any:
        if self._portal is None:
            from anyio.from_thread import start_blocking_portal

            self._loop = start_blocking_portal()
            self._portal = self._loop.__enter__()
        return self._portal


async def _cancel(scopes: Sequence[anyio.CancelScope]) -> None:
    for scope in scopes:
        scope.cancel()


def agent_metrics(
    played: Sequence[Played],
    *,
    wall_seconds: float,
    generation_seconds: float,
    constrained: bool = False,
) -> Mapping[str, float]:
    """`agent/*` of trajectories, trained or not; `constrained` if the calls were."""
    count = max(len(played), 1)
    turns = sum(one.turns for one in played)
    calls = sum(one.calls for one in played)
    tried = sum(one.tried_calls for one in played)
    masked = [share for one in played for share in one.trajectory.masked]
    written = sum(sum(one.trajectory.trained) for one in played)
    masks = {
        "agent/constrained_tokens_fraction": len(masked) / max(written, 1),
        "agent/masked_probability_mean": sum(masked) / max(len(masked), 1),
    }
    return {
        "agent/truncated_fraction": sum(bool(one.truncated) for one in played) / count,
        "agent/failed_fraction": sum(bool(one.failed) for one in played) / count,
        "agent/turns_mean": turns / count,
        "agent/tool_calls_per_turn": calls / max(turns, 1),
        "agent/failed_calls_fraction": sum(one.failed_calls for one in played) / max(tried, 1),
        "agent/tool_error_fraction": sum(one.tool_errors for one in played) / max(calls, 1),
        "agent/tokens_mean": sum(one.trajectory.next_token for one in played) / count,
        "agent/cut_observations": float(sum(one.trajectory.cuts for one in played)),
        "agent/unclosed_worlds": float(sum(bool(one.unclosed) for one in played)),
        "agent/rollout_seconds_mean": sum(one.seconds for one in played) / count,
        "agent/tool_seconds_mean": sum(one.tool_seconds for one in played) / count,
        "agent/decode_idle_fraction": max(0.0, 1.0 - generation_seconds / max(wall_seconds, 1e-9)),
        **(masks if constrained else {}),
    }
