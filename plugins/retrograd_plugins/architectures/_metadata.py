"""Reading a model's metadata: types, bounds, and refusal of what the modules cannot compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from retrograd_hookspecs import ModelError, ModelFile


@attrs.frozen
class Metadata:
    """The keys of a model's architecture. All methods raise `ModelError` with file, key and value."""

    file: ModelFile

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. An array, as some files hold one entry a block, must be uniform."""
        value = self._uniform(key, self._value(key, default))
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._uniform(key, self._value(key, default))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, value, "a positive number")
        return float(value)

    def optional(self, key: str) -> Any:
        """The value as it is, None if it is missing."""
        return self.file.get(key)

    def refuse(self, key: str, reason: str) -> None:
        """Refuse the model if `key` is there with a value other than 0, False or ""."""
        value = self.file.get(key)
        if value:
            raise ModelError(
                f"{self.file.path}: {self.file.architecture}.{key} = {value!r}: {reason} is not supported"
            )

    def has(self, tensor: str) -> bool:
        """True if the file holds the tensor."""
        return tensor in self.file.tensors

    def vocabulary_size(self) -> int:
        """Rows of the token embedding."""
        info = self.file.tensors.get("token_embd.weight")
        if info is None or len(info.shape) != 2:
            raise ModelError(f"{self.file.path}: the model has no matrix token_embd.weight")
        return info.shape[0]

    def rope_scale(self) -> float:
        """Linear scaling factor of positions, 1 for none. YaRN and others are refused."""
        kind = self.optional("rope.scaling.type")
        factor = self.optional("rope.scaling.factor")
        if factor is None:
            factor = self.optional("rope.scale_linear")
            kind = kind or "linear"
        if factor in (None, 0, 1) or kind == "none":
            return 1.0
        if kind not in (None, "linear"):
            raise ModelError(
                f"{self.file.path}: {self.file.architecture}.rope.scaling.type = {kind!r} with factor"
                f" {factor}: only linear scaling (and the factors in rope_freqs.weight) can be computed;"
                " use a model file without it"
            )
        return self.number("rope.scaling.factor", factor)

    def error(self, key: str, value: Any, wanted: str) -> ModelError:
        """The error for a value of the wrong kind."""
        return ModelError(
            f"{self.file.path}: {self.file.architecture}.{key} is {value!r}, not {wanted};"
            " the file is damaged or of another kind of model"
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.file.get(key, default)
        if value is None:
            raise ModelError(
                f"{self.file.path}: the metadata lacks {self.file.architecture}.{key}, which is needed;"
                " convert the model again with a recent llama.cpp"
            )
        return value

    def _uniform(self, key: str, value: Any) -> Any:
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(set(value)) != 1:
                raise ModelError(
                    f"{self.file.path}: {self.file.architecture}.{key} differs between blocks"
                    f" ({sorted(set(value))}), which is not supported"
                )
            return value[0]
        return value
