"""The block formats that have a decoder of their own, by ggml type name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
from numba import cfunc, types

from . import _decode_codebook, _decode_k, _decode_legacy
from ._simd_features import jit_disabled

SIGNATURE = types.void(
    types.CPointer(types.uint8),
    types.int64,
    types.int64,
    types.int64,
    types.CPointer(types.float32),
    types.int64,
)


@attrs.frozen(kw_only=True)
class Format:
    """A block of `values` weights lies in `bytes` bytes; `decode` expands rows of blocks."""

    name: str
    values: int
    bytes: int
    decode: Callable[..., Any]


def _format(name: str, values: int, width: int, decode: Callable[..., Any]) -> tuple[str, Format]:
    return name, Format(name=name, values=values, bytes=width, decode=decode)


FORMATS: Mapping[str, Format] = MappingProxyType(
    dict(
        (
            _format("F32", 1, 4, _decode_legacy.f32),
            _format("F16", 1, 2, _decode_legacy.f16),
            _format("BF16", 1, 2, _decode_legacy.bf16),
            _format("Q4_0", 32, 18, _decode_legacy.q4_0),
            _format("Q4_1", 32, 20, _decode_legacy.q4_1),
            _format("Q5_0", 32, 22, _decode_legacy.q5_0),
            _format("Q5_1", 32, 24, _decode_legacy.q5_1),
            _format("Q8_0", 32, 34, _decode_legacy.q8_0),
            _format("Q2_K", 256, 84, _decode_k.q2_k),
            _format("Q3_K", 256, 110, _decode_k.q3_k),
            _format("Q4_K", 256, 144, _decode_k.q4_k),
            _format("Q5_K", 256, 176, _decode_k.q5_k),
            _format("Q6_K", 256, 210, _decode_k.q6_k),
            _format("IQ4_NL", 32, 18, _decode_codebook.iq4_nl),
            _format("IQ4_XS", 256, 136, _decode_codebook.iq4_xs),
            _format("MXFP4", 32, 17, _decode_codebook.mxfp4),
        )
    )
)


def python_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """The plain Python function behind a jitted one."""
    return getattr(function, "py_func", function)


def decoder(block_format: Format) -> Any:
    """What drivers call to decode: a compiled function's holder, or without the JIT the function itself.

    The holder (a Numba `cfunc`, with `address`) must live as long as its address is used.
    """
    if jit_disabled():
        return block_format.decode
    return cfunc(SIGNATURE, cache=True)(python_form(block_format.decode))
