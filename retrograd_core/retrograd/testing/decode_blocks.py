"""Contract of the op `decode_blocks`: `check_decode_blocks` says by an `AssertionError` what is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from retrograd.kernel_table import FrozenKernelTable
from retrograd.nn import CausalLM, KeyValueStore, Run, build_pass
from retrograd_hookspecs import DeviceInfo, KernelImpl, KernelTable

OP = "decode_blocks"
_CONTEXTS = (5, 1, 19)
_ROOM = 32


def check_decode_blocks(
    make: Callable[[KernelTable], CausalLM],
    impls: Iterable[KernelImpl],
    device: DeviceInfo,
    *,
    tolerance: float = 2e-3,
    seed: int = 0,
) -> None:
    """Check that the op gives in one call what the modules give with the ops of its parts.

    Args:
        make: a model, the same each time, with the kernels of a table.
        impls: all kernels of the backend, `decode_blocks` among them.
        tolerance: largest distance of a hidden state, and of what is cached, relative to its length.

    The op serves the model's formats; hidden states and caches agree with the modules'; a row has the same
    bits alone and beside others, in any order; where the op says that it does not serve, nothing has changed.
    """
    kernels = list(impls)
    assert any(impl.op == OP for impl in kernels), f"there is no kernel of {OP}"
    calls = _Calls()
    watched = [attrs.evolve(i, fn=calls.watch(i.fn)) if i.op == OP else i for i in kernels]
    parts = [impl for impl in kernels if impl.op != OP]
    fused = _Decoding(make(FrozenKernelTable(watched, device)), seed)
    plain = _Decoding(make(FrozenKernelTable(parts, device)), seed)
    runs = [fused.run(sequence) for sequence in range(len(_CONTEXTS))]

    found = fused.forward(runs)
    assert calls.served, f"{OP} is never called, or serves nothing: its format is not the model's"
    expected = plain.forward(runs)
    _close(found, expected, tolerance, "hidden states")
    for number, (mine, theirs) in enumerate(zip(fused.cached(runs), plain.cached(runs), strict=True)):
        _close(mine, theirs, tolerance, f"cached rows, array {number}")
    backwards = fused.forward(runs[::-1])[::-1]
    assert np.array_equal(backwards, found), "a row depends on its place among the others"
    for number, run in enumerate(runs):
        alone = fused.forward([run])
        assert np.array_equal(alone[0], found[number]), "a row depends on what is beside it"


class _Calls:
    """Watches calls of the op."""

    def __init__(self) -> None:
        self.served = 0
        self._watched: dict[Callable[..., Any], Callable[..., Any]] = {}

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, the same for all formats that it serves."""
        return self._watched.setdefault(function, self._of(function))

    def _of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, positions: Any, segments: Any, stack: Any) -> bool:
            caches = [array for block in stack.blocks for array in (block.keys, block.values)]
            before = [np.array(array) for array in (x, *caches)]
            done = function(x, positions, segments, stack)
            assert isinstance(done, bool), f"{OP} returns {done!r}, not whether it served"
            if not done:
                for array, kept in zip((x, *caches), before, strict=True):
                    # By its bytes: unused rows of a cache may hold anything, NaN too.
                    same = np.array(array).tobytes() == kept.tobytes()
                    assert same, f"{OP} does not serve, and changed an array"
            self.served += done
            return done

        return call


class _Decoding:
    """Sequences of `_CONTEXTS` tokens in a cache, and passes that go on with them."""

    def __init__(self, model: CausalLM, seed: int) -> None:
        self._model = model
        self._rng = np.random.default_rng(seed)
        cache = model.new_cache("contract")
        cache.reserve(len(_CONTEXTS) * _ROOM, 8)
        self._store = KeyValueStore(cache=cache)
        runs = [self._tokens(number, 0, count) for number, count in enumerate(_CONTEXTS)]
        model.forward(self._pass(runs), self._store)

    def run(self, sequence: int) -> Run:
        """The next token of a sequence."""
        return self._tokens(sequence, _CONTEXTS[sequence], 1)

    def forward(self, runs: Sequence[Run]) -> Any:
        """Hidden states (T, E) of a few tokens."""
        with self._model.few_rows():
            found = self._model.forward(self._pass(runs), self._store)
        return np.array(self._model.backend.to_host(found))

    def cached(self, runs: Sequence[Run]) -> list[Any]:
        """Keys and values of the runs' tokens, an array of each block."""
        rows = [run.start + (run.row or 0) for run in runs]
        host = self._model.backend.to_host
        return [np.array(host(array))[rows] for pair in self._store.cache.stored for array in pair]

    def _pass(self, runs: Sequence[Run]) -> Any:
        return build_pass(runs, self._model.backend, cache_rows=self._store.cache.rows)

    def _tokens(self, sequence: int, start: int, count: int) -> Run:
        tokens = self._rng.integers(0, self._model.spec.vocabulary_size, count).astype(np.int32)
        return Run(tokens=tokens, start=start, row=sequence * _ROOM)


def _close(found: Any, expected: Any, tolerance: float, what: str) -> None:
    found, expected = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (found, expected))
    gap = np.linalg.norm(found - expected, axis=1) / np.maximum(np.linalg.norm(expected, axis=1), 1e-12)
    worst = float(gap.max())
    assert worst <= tolerance, f"{what}: {worst:.2g} from what the modules give, more than {tolerance:.2g}"
