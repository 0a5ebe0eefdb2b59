"""Arrays that an optimizer keeps for each parameter, and how they go through a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import CheckpointError, Parameter, TrainingError


class Moments:
    """Named float32 arrays, one set a parameter, flat and zero at first.

    In `state()` the array `kind` of parameter `name` is called `kind/name`.
    """

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds
        self._arrays: dict[str, npt.NDArray[np.float32]] = {}
        self._loaded = False

    def of(self, parameter: Parameter) -> list[npt.NDArray[np.float32]]:
        """The arrays of `parameter`, each (values,), created on first use.

        Raises: `CheckpointError` if a loaded state does not fit the parameter.
        """
        return [self._array(kind, parameter) for kind in self._kinds]

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Copies, so that a checkpoint being written is not changed by the next step."""
        return {name: array.copy() for name, array in self._arrays.items()}

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore `state()`. Raises `CheckpointError` for arrays of another optimizer."""
        for name, array in state.items():
            if name.split("/", 1)[0] not in self._kinds or array.dtype != np.float32:
                raise CheckpointError(
                    f"optimizer state {name!r} ({array.dtype}) is not of this optimizer, which keeps"
                    f" {', '.join(self._kinds) or 'nothing'} as float32: was training.optimizer changed?"
                )
        self._arrays = {name: array.reshape(-1).copy() for name, array in state.items()}
        self._loaded = bool(state)

    def _array(self, kind: str, parameter: Parameter) -> npt.NDArray[np.float32]:
        name = f"{kind}/{parameter.name}"
        array = self._arrays.get(name)
        if array is None:
            if self._loaded:
                raise CheckpointError(
                    f"the checkpoint holds no optimizer state {name!r}: it was written by a run that"
                    " trained other parameters"
                )
            array = self._arrays[name] = np.zeros(parameter.value.size, np.float32)
        if array.size != parameter.value.size:
            raise CheckpointError(
                f"optimizer state {name!r} has {array.size} values, the parameter {parameter.value.size}:"
                " the checkpoint belongs to another model or rank"
            )
        return array


def flat(array: Any, name: str) -> Any:
    """A 1-D view of a C-contiguous array; updates through it reach the array itself.

    Raises: `TrainingError` for an array whose values do not lie in one block.
    """
    if not array.flags.c_contiguous:
        raise TrainingError(f"{name}: trained arrays must be C-contiguous, this one has {array.strides=}")
    return array.reshape(-1)
