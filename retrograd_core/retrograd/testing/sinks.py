"""Contract of a sink: `check_sink(make, read)` raises `AssertionError` where it is broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from retrograd_hookspecs import Sink

Steps = Mapping[int, Mapping[str, float]]


def check_sink(make: Callable[[], Sink], read: Callable[[], Steps]) -> None:
    """Check what every sink promises.

    Args:
        make: a sink that writes to one place, the same at each call, empty at first: each is another process
            of one run.
        read: what a reader of that place sees, metrics by step. A later value of a step and name counts.

    What is written is there after `close`, values that are not finite included, at least as not finite;
    metrics of one step may come in parts; `write` changes nothing that it is given; `close` may be called
    twice, and before anything is written; after `resume(n)` what an earlier process wrote after step n is
    gone.
    """
    make().close()
    sink = make()
    given = {"train/loss": 2.5, "train/lr": 0.25}
    sink.write(1, given)
    assert given == {"train/loss": 2.5, "train/lr": 0.25}, "write() changed what it was given"
    sink.write(1, {"eval/loss": 3.0})
    for step in (2, 3, 4):
        sink.write(step, {"train/loss": 2.5 / step})
    sink.write(4, {"train/grad_norm": math.nan})
    sink.close()
    sink.close()
    seen = read()
    assert sorted(seen) == [1, 2, 3, 4], f"steps 1 to 4 were written, there are {sorted(seen)}"
    _expect(seen, 1, {"train/loss": 2.5, "train/lr": 0.25, "eval/loss": 3.0})
    _expect(seen, 4, {"train/loss": 0.625})
    assert not math.isfinite(seen[4].get("train/grad_norm", 0.0)), "a value that is not finite was lost"

    sink = make()
    sink.resume(2)
    sink.write(3, {"train/loss": 9.0})
    sink.close()
    seen = read()
    assert sorted(seen) == [1, 2, 3], f"after resume(2) and step 3 there are the steps {sorted(seen)}"
    _expect(seen, 2, {"train/loss": 1.25})
    _expect(seen, 3, {"train/loss": 9.0})


def _expect(seen: Steps, step: int, expected: Mapping[str, float]) -> None:
    for name, value in expected.items():
        found = seen[step].get(name, math.nan)
        assert math.isclose(found, value, rel_tol=1e-6), f"step {step}: {name} is {found}, not {value}"
