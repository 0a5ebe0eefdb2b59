"""The contract suite of `decode_blocks`, on the cpu's kernels and on broken ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from retrograd.gguf import open_model
from retrograd.nn import CausalLM
from retrograd.testing.decode_blocks import OP, check_decode_blocks
from retrograd_hookspecs import KernelImpl
from retrograd_plugins.kernels.cpu._simd_features import jit_disabled, usable_variants
from tests.model_support import architecture, build_backend, build_kernels

pytestmark = pytest.mark.skipif(jit_disabled(), reason="about compiled code; the JIT is switched off")


@pytest.fixture
def check(tiny_model: Callable[..., Path]) -> Callable[..., None]:
    """Check the cpu's kernels of an instruction set that sums in float32, with `change` made to the op's."""
    backend = build_backend("cpu", kernels="avx512" if "avx512" in usable_variants() else "avx2")
    wanted = [impl for found in build_kernels(backend)._candidates.values() for impl in found]
    file = open_model(tiny_model(architecture="llama"))
    spec = architecture("llama").describe(file)

    def run(change: Callable[[Any], Any] = lambda fn: fn) -> None:
        changed: dict[Any, Any] = {}
        given: list[KernelImpl] = []
        for impl in wanted:
            fn = changed.setdefault(impl.fn, change(impl.fn)) if impl.op == OP else impl.fn
            given.append(attrs.evolve(impl, fn=fn))
        check_decode_blocks(lambda kernels: CausalLM(file, spec, kernels, backend), given, backend.device)

    return run


def test_the_cpus_kernels(check: Callable[..., None]) -> None:
    check()


def wrong_values(function: Any) -> Any:
    def call(x: Any, *rest: Any) -> bool:
        done: bool = function(x, *rest)
        x *= 1.01
        return done

    return call


def wrong_cache(function: Any) -> Any:
    def call(x: Any, positions: Any, segments: Any, stack: Any) -> bool:
        done: bool = function(x, positions, segments, stack)
        stack.blocks[-1].values[...] *= 0.5
        return done

    return call


def by_place(function: Any) -> Any:
    def call(x: Any, *rest: Any) -> bool:
        done: bool = function(x, *rest)
        x[0] *= 1.0001
        return done

    return call


def half_done(function: Any) -> Any:
    def call(x: Any, *rest: Any) -> bool:
        x += 1.0
        return False

    return call


def never(function: Any) -> Any:
    return lambda *arguments: False


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (wrong_values, "hidden states: 0.01"),
        (wrong_cache, "cached rows"),
        (by_place, "its place among the others"),
        (half_done, "does not serve, and changed an array"),
        (never, "serves nothing"),
    ],
)
def test_broken_kernels(check: Callable[..., None], change: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check(change)
