"""Arrays that an optimizer keeps for each parameter, and how they go through a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.parameter_runs import ParameterRun
from retrograd_hookspecs import CheckpointError, Parameter


class Moments:
    """Named float32 arrays, one set a parameter, flat and zero at first.

    In `state()` the array `kind` of parameter `name` is called `kind/name`.
    """

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds
        self._arrays: dict[str, npt.NDArray[np.float32]] = {}
        self._runs: dict[tuple[str, ...], list[npt.NDArray[np.float32]]] = {}
        self._loaded = False

    def of(self, run: ParameterRun) -> list[npt.NDArray[np.float32]]:
        """The arrays of a run of parameters, each (values of the run,), created on first use.

        Raises: `CheckpointError` if a loaded state does not fit the parameters.
        """
        names = tuple(parameter.name for parameter in run.parameters)
        found = self._runs.get(names)
        if found is None or any(array.size != run.value.size for array in found):
            found = self._runs[names] = [self._joined(kind, run) for kind in self._kinds]
        return found

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
        self._runs = {}
        self._loaded = bool(state)

    def _joined(self, kind: str, run: ParameterRun) -> npt.NDArray[np.float32]:
        if len(run.parameters) == 1:
            return self._array(kind, run.parameters[0])
        joined = np.zeros(run.value.size, np.float32)
        first = 0
        for parameter in run.parameters:
            part = joined[first : first + parameter.value.size]
            name = f"{kind}/{parameter.name}"
            if self._loaded or name in self._arrays:
                part[...] = self._array(kind, parameter)
            self._arrays[name] = part
            first += part.size
        return joined

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
