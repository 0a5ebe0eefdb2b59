"""The adapter of a run: its parameters, and the file they are saved in."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.gguf.adapter import Adapter, read_adapter, write_adapter
from retrograd.nn.model import CausalLM
from retrograd.nn.precision import round_into, rounded
from retrograd.nn.projection import LoraFactors
from retrograd_hookspecs import ModelError, Parameter

Factors = Mapping[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]
"""By tensor name: A (rank, in) and B (out, rank)."""

ALIGNMENT = 16
"""Arrays begin at multiples of this many values in their common buffer: 64 bytes in float32."""


def initial_factors(model: CausalLM, names: Sequence[str], *, rank: int, seed: int) -> Factors:
    """A uniform in ±1/sqrt(in), B zero. A matrix's values depend on the seed and its name alone."""
    factors = {}
    for name in names:
        rows, columns = model.projections[name].weight.shape
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        bound = columns**-0.5
        a = rng.uniform(-bound, bound, (rank, columns)).astype(np.float32)
        factors[name] = (a, np.zeros((rows, rank), dtype=np.float32))
    return factors


class LoraAdapter:
    """Implements `retrograd_hookspecs.Trainable`.

    All masters lie in one buffer, likewise gradients and rounded weights, and the parameters are views.
    """

    def __init__(
        self, model: CausalLM, *, factors: Factors, alpha: float, dtype: str, notes: Sequence[str] = ()
    ) -> None:
        self._model = model
        self._alpha = alpha
        self._dtype = dtype
        self._notes = tuple(notes)
        self._names = list(factors)
        places: list[tuple[str, npt.NDArray[np.float32], int]] = []
        size = 0
        for name, pair in factors.items():
            for suffix, matrix in zip(("lora_a", "lora_b"), pair, strict=True):
                places.append((f"{name}.{suffix}", matrix, size))
                size += -(-matrix.size // ALIGNMENT) * ALIGNMENT
        backend = model.backend
        self._values: npt.NDArray[np.float32] = np.zeros(size, dtype=np.float32)
        self._weights: Any = backend.from_host(np.zeros(size, dtype=backend.compute_dtype))
        self._gradients: Any = backend.from_host(np.zeros(size, dtype=backend.compute_dtype))
        self.parameters: list[Parameter] = [
            self._parameter(name, matrix, first) for name, matrix, first in places
        ]
        self._factors = {
            name: LoraFactors(a=a, b=b, scale=alpha / a.value.shape[0] if alpha else 1.0)
            for name, a, b in zip(self._names, self.parameters[::2], self.parameters[1::2], strict=True)
        }
        self.refresh()
        self.attach(model)

    @classmethod
    def from_file(cls, model: CausalLM, path: Path) -> LoraAdapter:
        """Start from an adapter file, whoever made it; rank, alpha, targets and dtype are the file's.

        Raises `ModelError` if it is no adapter or does not fit the model.
        """
        adapter = read_adapter(path)
        notes = [*adapter.notes, *adapter.check_base(model.file)]
        unknown = [name for name in adapter.factors if name not in model.projections]
        if unknown:
            raise ModelError(
                f"{path}: the adapter changes {', '.join(unknown[:3])}, which cannot be trained here:"
                " adapters go on the projections of the blocks"
            )
        dtype = "f32" if adapter.dtype not in ("f16", "bf16") else adapter.dtype
        ordered = {name: adapter.factors[name] for name in model.projections if name in adapter.factors}
        notes.insert(0, f"started from {path.name}")
        return cls(model, factors=ordered, alpha=adapter.alpha, dtype=dtype, notes=notes)

    def attach(self, model: CausalLM) -> None:
        """Put the factors on their projections. Attaching again changes nothing."""
        for name, factors in self._factors.items():
            model.projections[name].lora = factors

    def refresh(self) -> None:
        """Round the masters to what the forward pass reads."""
        backend = self._model.backend
        weights = backend.to_host(self._weights)
        round_into(self._values, weights, self._dtype)
        self._weights[...] = backend.from_host(weights)

    def save(self, path: Path) -> None:
        """Write the adapter as a GGUF that llama.cpp loads, atomically."""
        write_adapter(
            path,
            architecture=self._model.file.architecture,
            alpha=self._alpha,
            factors={
                name: (rounded(f.a.value, self._dtype), rounded(f.b.value, self._dtype))
                for name, f in self._factors.items()
            },
            dtype=self._dtype,
            base_fingerprint=self._model.file.fingerprint(),
            # Not the path's: the same training gives the same bytes, whatever the file is called.
            extra_metadata={"general.name": f"{self._base_name()} LoRA"},
        )

    def load(self, path: Path) -> None:
        """Read the factors of an adapter with the same targets, ranks and scale.

        Raises `ModelError` if they differ, or if it belongs to another base model.
        """
        adapter = read_adapter(path)
        other_base = adapter.check_base(self._model.file)
        if other_base:
            raise ModelError(f"{path}: {other_base[0]}")
        self._require_same_shape(adapter, path)
        for name, factors in self._factors.items():
            a, b = adapter.factors[name]
            factors.a.value[...] = a
            factors.b.value[...] = b
        self.refresh()

    def summary(self) -> str:
        """One line: size, storage, where it is."""
        ranks = sorted({f.rank for f in self._factors.values()})
        parts = sorted({name.split(".")[2] for name in self._names})
        blocks = len({name.split(".")[1] for name in self._names})
        count = sum(p.value.size for p in self.parameters)
        text = (
            f"LoRA: {count:,} values in {len(self._names)} matrices of {blocks} blocks ({', '.join(parts)}),"
            f" rank {'/'.join(map(str, ranks))}, alpha {self._alpha:g}, stored as {self._dtype};"
            " all other weights stay as they are"
        )
        return "; ".join([text, *self._notes])

    def signature(self) -> dict[str, Any]:
        """Targets, rank (of each where they differ), alpha and storage: the same for an adapter that was
        made here and one that was read."""
        ranks = {name: f.rank for name, f in self._factors.items()}
        common = set(ranks.values())
        return {
            "targets": sorted(ranks),
            "rank": common.pop() if len(common) == 1 else ranks,
            "alpha": self._alpha,
            "dtype": self._dtype,
        }

    def _base_name(self) -> str:
        file = self._model.file
        return str(file.metadata.get("general.name") or file.architecture)

    def _parameter(self, name: str, matrix: npt.NDArray[np.float32], first: int) -> Parameter:
        def view(buffer: Any) -> Any:
            return buffer[first : first + matrix.size].reshape(matrix.shape)

        parameter = Parameter(
            name=name,
            value=view(self._values),
            grad=view(self._gradients),
            weight=view(self._weights),
            dtype=self._dtype,
        )
        parameter.value[...] = matrix
        return parameter

    def _require_same_shape(self, adapter: Adapter, path: Path) -> None:
        mine = {name: f.rank for name, f in self._factors.items()}
        if dict(adapter.ranks) != mine:
            differing = sorted(set(adapter.ranks.items()) ^ set(mine.items()))
            raise ModelError(
                f"{path}: its targets or ranks differ from this run's, first at {differing[0][0]}; set"
                " lora.targets and lora.rank as in the run that wrote it"
            )
        if any(adapter.scale(name) != f.scale for name, f in self._factors.items()):
            raise ModelError(
                f"{path}: its alpha is {adapter.alpha:g}, this run's {self._alpha:g}; set lora.alpha to it"
            )
