"""The pool: places, order, reuse, cancellation, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from retrograd_hookspecs import RolloutError
from retrograd_plugins.sandboxes._pool import Pool


class Items:
    """Makes numbers, and knows which of them are there."""

    def __init__(
        self, *, seconds: float = 0.0, failures: int = 0, dirty: frozenset[int] = frozenset()
    ) -> None:
        self.alive: set[int] = set()
        self.made = 0
        self.cleaned: list[int] = []
        self.most = 0
        self._seconds = seconds
        self._failures = failures
        self._dirty = dirty

    async def make(self) -> int:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self._seconds)
        if self._failures:
            self._failures -= 1
            raise RolloutError("cannot be made")
        self.made += 1
        self.alive.add(self.made)
        self.most = max(self.most, len(self.alive))
        return self.made

    async def clean(self, item: int) -> bool:
        await anyio.sleep(0)
        self.cleaned.append(item)
        return item not in self._dirty

    async def end(self, item: int) -> None:
        await anyio.sleep(0)
        self.alive.remove(item)


def run(function: Callable[[], Awaitable[Any]]) -> Any:
    return anyio.run(function)


def test_callers_wait_in_order_for_a_place() -> None:
    async def use() -> list[int]:
        items = Items(seconds=0.001)
        pool: Pool[int] = Pool(items, max_live=2)
        order: list[int] = []

        async def one(number: int) -> None:
            item = await pool.acquire()
            order.append(number)
            await anyio.sleep(0.003)
            await pool.release(item, broken=False)

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(one, number)
        assert items.most == 2
        assert (items.made, items.alive, pool.live) == (8, set(), 0)
        metrics = pool.metrics()
        assert metrics["waited_fraction"] == 6 / 8
        assert metrics["acquired"] == metrics["created"] == 8
        assert metrics["acquire_ms_mean"] > 1
        assert pool.metrics()["acquired"] == 0, "metrics are since the last call"
        return order

    assert run(use) == list(range(8))


def test_clean_members_are_used_again_up_to_a_limit() -> None:
    async def use() -> None:
        items = Items(dirty=frozenset({2}))
        pool: Pool[int] = Pool(items, max_live=1, max_uses=3)
        seen = []
        for number in range(7):
            item = await pool.acquire()
            seen.append(item)
            await pool.release(item, broken=number == 4)
        # 1 serves three times; 2 cannot be cleaned; 3 is broken; 4 goes on.
        assert seen == [1, 1, 1, 2, 3, 4, 4]
        assert items.alive == {4}
        assert pool.metrics()["reused"] == 3
        await pool.close()
        assert items.alive == set()

    run(use)


def test_what_is_kept_ready_fits_into_the_places() -> None:
    async def use() -> None:
        items = Items()
        pool: Pool[int] = Pool(items, max_live=3, min_idle=2)
        await pool.fill(2)
        assert items.alive == {1, 2}
        one, two = await pool.acquire(), await pool.acquire()
        assert {one, two} == {1, 2}
        await pool.fill(9)
        assert items.alive == {1, 2, 3}
        await pool.release(one, broken=False)
        assert len(items.alive) == 3, "what ended was replaced"
        assert pool.live == 3
        await pool.close()
        assert items.alive == set(), "leased members are ended too"
        await pool.release(two, broken=False)
        assert pool.live == 0

    run(use)


def test_a_failure_costs_no_place() -> None:
    async def use() -> None:
        items = Items(failures=3)
        pool: Pool[int] = Pool(items, max_live=1)
        for _ in range(2):
            with pytest.raises(RolloutError, match="cannot be made"):
                await pool.acquire()
        with pytest.raises(RolloutError, match="cannot be made"):
            await pool.fill(1)
        assert pool.live == 0
        assert await pool.acquire() == 1

    run(use)


@pytest.mark.parametrize("moment", [0.0, 0.001, 0.004, 0.006, 0.01, 0.014])
def test_who_is_cancelled_leaves_nothing_behind(moment: float) -> None:
    async def use() -> None:
        items = Items(seconds=0.005)
        pool: Pool[int] = Pool(items, max_live=1, max_uses=2)

        async def one() -> None:
            item = await pool.acquire()
            try:
                await anyio.sleep(0.005)
            finally:
                await pool.release(item, broken=False)

        with anyio.move_on_after(moment):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(one)
        assert pool.live == len(items.alive) <= 1
        with anyio.fail_after(5):
            await one()
        await pool.close()
        assert items.alive == set()
        assert pool.live == 0

    run(use)


def test_closing_turns_away_who_waits() -> None:
    async def use() -> None:
        items = Items()
        pool: Pool[int] = Pool(items, max_live=1)
        await pool.acquire()
        refused = []

        async def wait() -> None:
            try:
                await pool.acquire()
            except RolloutError as error:
                refused.append(str(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.01)
            await pool.close()
        assert refused == ["the pool of sandboxes is closed"]
        with pytest.raises(RolloutError, match="is closed"):
            await pool.acquire()
        await pool.close()

    run(use)
