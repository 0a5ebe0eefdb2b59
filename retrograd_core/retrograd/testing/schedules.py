"""Contract of a schedule: `check_schedule(make)` raises `AssertionError` where it is broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from retrograd_hookspecs import Schedule


def check_schedule(
    make: Callable[[int | None], Schedule], *, totals: Iterable[int | None] = (1, 2, 25)
) -> None:
    """Check what every schedule promises. `make` gives a new one for a run of so many steps.

    A finite rate of 0 or more for each step, more than 0 for one at least; pure: neither the order of calls
    nor the instance makes a difference, so that a resumed run goes on as it would have. `totals` may hold
    None where the schedule can do without the number of steps.
    """
    for total in totals:
        steps = range(1, (total or 25) + 1)
        schedule = make(total)
        rates = [schedule.lr(step) for step in steps]
        for step, rate in zip(steps, rates, strict=True):
            assert isinstance(rate, float), f"step {step} of {total}: the rate is no float: {rate!r}"
            assert math.isfinite(rate), f"step {step} of {total}: the rate is {rate}"
            assert rate >= 0.0, f"step {step} of {total}: the rate is {rate}, below 0"
        assert max(rates) > 0.0, f"no step of {total} has a rate above 0"
        backwards = [schedule.lr(step) for step in reversed(steps)][::-1]
        assert backwards == rates, f"rates of {total} steps depend on what was asked before"
        assert [make(total).lr(step) for step in steps] == rates, f"a new schedule of {total} steps differs"
