"""A pool of what is slow to make: how many live, in which order callers get one, what is used again."""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import attrs

from retrograd_hookspecs import RolloutError

if TYPE_CHECKING:
    import anyio

T = TypeVar("T")


class Maker(Protocol[T]):
    """Makes, cleans and ends what a pool holds."""

    async def make(self) -> T:
        """A new one. Whole or not at all, also where the caller is cancelled. Raises `RolloutError`."""

    async def clean(self, item: T) -> bool:
        """Make it as new; False if that cannot be done."""

    async def end(self, item: T) -> None:
        """Release it. Does not raise."""


@attrs.define(eq=False)
class _Lease(Generic[T]):
    """A member of the pool. `uses` counts who had it."""

    item: T
    uses: int = 0


@attrs.define(eq=False)
class _Waiter(Generic[T]):
    event: anyio.Event
    given: bool = False
    lease: _Lease[T] | None = None


class Pool(Generic[T]):
    """At most `max_live` at once; callers wait in order. Used in one event loop at a time.

    Args:
        min_idle: how many are kept ready, as far as there are places.
        max_uses: after how many uses one is ended; 1 uses none again.
    """

    def __init__(self, maker: Maker[T], *, max_live: int, min_idle: int = 0, max_uses: int = 1) -> None:
        self._maker = maker
        self._max_live = max_live
        self._min_idle = min_idle
        self._max_uses = max_uses
        self._places = max_live
        self._idle: collections.deque[_Lease[T]] = collections.deque()
        self._leased: dict[int, _Lease[T]] = {}
        self._waiters: collections.deque[_Waiter[T]] = collections.deque()
        self._closed = False
        self._counts: collections.Counter[str] = collections.Counter()
        self._acquire_seconds = 0.0

    @property
    def live(self) -> int:
        """Members that are there, being made, or being ended."""
        return self._max_live - self._places

    async def acquire(self) -> T:
        """A clean one; waits for a place. Raises: `RolloutError`."""
        started = time.monotonic()
        lease = await self._lease()
        lease.uses += 1
        self._leased[id(lease.item)] = lease
        self._counts["acquired"] += 1
        self._acquire_seconds += time.monotonic() - started
        return lease.item

    async def release(self, item: T, *, broken: bool) -> None:
        """Give one back; one that is not leased (any more) is left alone. Goes on to its end if it is
        cancelled."""
        import anyio

        lease = self._leased.pop(id(item), None)
        if lease is None:
            return
        with anyio.CancelScope(shield=True):
            reusable = not broken and not self._closed and lease.uses < self._max_uses
            if reusable and await self._maker.clean(item) and not self._closed:
                self._give(lease)
                return
            try:
                await self._maker.end(item)
            finally:
                self._give(None)
            with suppress(RolloutError):  # whoever needs one will be told
                await self.fill(self._min_idle)

    def return_unused(self, item: T) -> None:
        """Give back one that is as it was when it was acquired: it stays, and the use does not count."""
        lease = self._leased.pop(id(item))
        lease.uses -= 1
        self._give(lease)

    async def fill(self, count: int) -> None:
        """Make members until `count` are idle or no place is left. Raises: `RolloutError`."""
        import anyio

        missing = min(count - len(self._idle), self._places)
        if missing <= 0 or self._closed:
            return
        self._places -= missing

        failures: list[RolloutError] = []

        async def add() -> None:
            lease: _Lease[T] | None = None
            try:
                lease = await self._make()
            except RolloutError as error:
                failures.append(error)
            finally:
                await self._keep(lease)

        async with anyio.create_task_group() as tasks:
            for _ in range(missing):
                tasks.start_soon(add)
        if failures:
            raise failures[0]

    async def close(self) -> None:
        """End all, leased ones too; waiting callers get a `RolloutError`. May be called more than once."""
        import anyio

        self._closed = True
        for waiter in list(self._waiters):
            waiter.event.set()
        with anyio.CancelScope(shield=True):
            leases = [*self._idle, *self._leased.values()]
            self._idle.clear()
            self._leased.clear()

            async def end(lease: _Lease[T]) -> None:
                await self._maker.end(lease.item)
                self._places += 1

            async with anyio.create_task_group() as tasks:
                for lease in leases:
                    tasks.start_soon(end, lease)

    def metrics(self) -> Mapping[str, float]:
        """Since the last call, `live` and `idle` apart, which are as of now."""
        counts, self._counts = self._counts, collections.Counter()
        seconds, self._acquire_seconds = self._acquire_seconds, 0.0
        acquired = max(counts["acquired"], 1)
        return {
            "acquire_ms_mean": 1000.0 * seconds / acquired,
            "acquired": float(counts["acquired"]),
            "waited_fraction": counts["waited"] / acquired,
            "created": float(counts["created"]),
            "reused": float(counts["reused"]),
            "live": float(self.live),
            "idle": float(len(self._idle)),
        }

    async def _lease(self) -> _Lease[T]:
        self._require_open()
        granted, lease = (False, None) if self._waiters else self._take()
        if not granted:
            self._counts["waited"] += 1
            lease = await self._wait()
        if lease is None:
            try:
                lease = await self._make()
            except BaseException:
                self._give(None)
                raise
        if self._closed:
            await self._keep(lease)
            self._require_open()
        self._counts["reused"] += lease.uses > 0
        return lease

    def _take(self) -> tuple[bool, _Lease[T] | None]:
        """An idle member or a free place, if there is either."""
        if self._idle:
            return True, self._idle.popleft()
        if self._places:
            self._places -= 1
            return True, None
        return False, None

    async def _wait(self) -> _Lease[T] | None:
        """What the next one gives back: a member, or None for a place."""
        import anyio

        waiter: _Waiter[T] = _Waiter(anyio.Event())
        self._waiters.append(waiter)
        try:
            await waiter.event.wait()
        except BaseException:
            if waiter.given:
                self._give(waiter.lease)
            else:
                self._waiters.remove(waiter)
            raise
        if not waiter.given:
            self._require_open()
        return waiter.lease

    def _give(self, lease: _Lease[T] | None) -> None:
        """Hand a member, or a place, to who has waited longest."""
        if self._waiters and not self._closed:
            waiter = self._waiters.popleft()
            waiter.given, waiter.lease = True, lease
            waiter.event.set()
        elif lease is None:
            self._places += 1
        else:
            self._idle.append(lease)

    async def _make(self) -> _Lease[T]:
        item = await self._maker.make()
        self._counts["created"] += 1
        return _Lease(item)

    async def _keep(self, lease: _Lease[T] | None) -> None:
        """Put a new member, or the place of one that was not made, where it is used next."""
        import anyio

        if lease is not None and self._closed:
            with anyio.CancelScope(shield=True):
                await self._maker.end(lease.item)
            lease = None
        self._give(lease)

    def _require_open(self) -> None:
        if self._closed:
            raise RolloutError("the pool of sandboxes is closed")
