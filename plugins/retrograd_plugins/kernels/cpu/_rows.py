"""The block formats that are unpacked for sixteen rows at once, by ggml type name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
from numba import cfunc, types

from . import _rows_k, _rows_legacy
from ._rows_kinds import SIGNED_BIAS

UNPACK_SIGNATURE = types.void(types.CPointer(types.uint8), *[types.int64] * 5)


@attrs.frozen(kw_only=True)
class RowsFormat:
    """How a format is unpacked for 16 rows."""

    make: Callable[[int], Callable[..., None]]
    bias: int = 0
    floats: bool = False


ROWS_FORMATS: Mapping[str, RowsFormat] = MappingProxyType(
    {
        "F32": RowsFormat(make=_rows_legacy.make_f32, floats=True),
        "F16": RowsFormat(make=_rows_legacy.make_f16, floats=True),
        "BF16": RowsFormat(make=_rows_legacy.make_bf16, floats=True),
        "Q4_0": RowsFormat(make=_rows_legacy.make_q4_0, bias=8),
        "Q4_1": RowsFormat(make=_rows_legacy.make_q4_1),
        "Q5_0": RowsFormat(make=_rows_legacy.make_q5_0, bias=16),
        "Q5_1": RowsFormat(make=_rows_legacy.make_q5_1),
        "Q8_0": RowsFormat(make=_rows_legacy.make_q8_0, bias=SIGNED_BIAS),
        "Q2_K": RowsFormat(make=_rows_k.make_q2_k),
        "Q3_K": RowsFormat(make=_rows_k.make_q3_k, bias=4),
        "Q4_K": RowsFormat(make=_rows_k.make_q4_k),
        "Q5_K": RowsFormat(make=_rows_k.make_q5_k),
        "Q6_K": RowsFormat(make=_rows_k.make_q6_k, bias=32),
        "IQ4_NL": RowsFormat(make=_rows_legacy.make_iq4_nl, bias=SIGNED_BIAS),
        "IQ4_XS": RowsFormat(make=_rows_legacy.make_iq4_xs, bias=SIGNED_BIAS),
        "MXFP4": RowsFormat(make=_rows_legacy.make_mxfp4, bias=_rows_legacy.E2M1_BIAS),
    }
)


def compiled_rows(format_name: str, kind: int) -> Any:
    """The function that unpacks 16 rows of a format and does with them what `kind` says.

    What holds it (a Numba `cfunc`, with `address`) must live as long as its address is used.
    """
    return cfunc(UNPACK_SIGNATURE, cache=True)(ROWS_FORMATS[format_name].make(kind))
