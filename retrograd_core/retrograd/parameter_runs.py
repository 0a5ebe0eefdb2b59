"""Parameters that lie one after another in memory, taken together.

An adapter has hundreds of small arrays, and a call of a kernel costs as much as updating one of them. Where a
trainable keeps them in common buffers, what treats every value alike takes each stretch of them as one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from retrograd_hookspecs import Parameter, TrainingError


@attrs.frozen(kw_only=True)
class ParameterRun:
    """Parameters whose values and gradients follow each other without a gap; or a single one."""

    parameters: tuple[Parameter, ...]
    value: Any
    """All masters, flat float32 (n,); a view, so that writing reaches the parameters."""
    grad: Any
    """All gradients, flat (n,); a view."""


class ParameterRuns:
    """The runs of a list of parameters, found once for each list."""

    def __init__(self) -> None:
        self._of: Sequence[Parameter] | None = None
        self._count = 0
        self._runs: list[ParameterRun] = []

    def of(self, parameters: Sequence[Parameter]) -> list[ParameterRun]:
        """The runs, in the order of the parameters."""
        if parameters is not self._of or len(parameters) != self._count:
            self._runs = parameter_runs(parameters)
            self._of, self._count = parameters, len(parameters)
        return self._runs


def parameter_runs(parameters: Sequence[Parameter]) -> list[ParameterRun]:
    """Cut `parameters` into runs, as long as they go.

    Raises: `TrainingError` for an array whose values do not lie in one block.
    """
    for parameter in parameters:
        for array in (parameter.value, parameter.grad):
            if not array.flags.c_contiguous:
                raise TrainingError(
                    f"{parameter.name}: trained arrays must be C-contiguous, this one has {array.strides=}"
                )
    groups: list[list[Parameter]] = []
    for parameter in parameters:
        if (
            groups
            and _follows(parameter.value, groups[-1][-1].value)
            and _follows(parameter.grad, groups[-1][-1].grad)
        ):
            groups[-1].append(parameter)
        else:
            groups.append([parameter])
    return [
        ParameterRun(
            parameters=tuple(group),
            value=_joined([one.value for one in group]),
            grad=_joined([one.grad for one in group]),
        )
        for group in groups
    ]


def _follows(array: Any, previous: Any) -> bool:
    """True if `array` begins in the buffer of `previous` where that one ends."""
    return (
        isinstance(array, np.ndarray)
        and isinstance(previous, np.ndarray)
        and isinstance(array.base, np.ndarray)
        and array.base is previous.base
        and array.base.ndim == 1
        and array.base.flags.c_contiguous
        and array.dtype == previous.dtype == array.base.dtype
        and previous.ctypes.data + previous.nbytes == array.ctypes.data
    )


def _joined(arrays: Sequence[Any]) -> Any:
    first = arrays[0]
    if len(arrays) == 1:
        return first.reshape(-1)
    start = (first.ctypes.data - first.base.ctypes.data) // first.itemsize
    return first.base[start : start + sum(array.size for array in arrays)]
