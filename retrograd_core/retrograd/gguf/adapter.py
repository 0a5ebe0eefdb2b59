"""LoRA adapters as GGUF files that stock llama.cpp loads with `--lora`.

Such a file holds only pairs `<base tensor>.lora_a` (rank, in) and `<base tensor>.lora_b` (out, rank), in
the layout of the base GGUF: nothing is permuted. llama.cpp adds `scale · b @ a` to the base weight, with
scale = alpha / rank, the rank being each tensor's own.

Source: Hu et al. 2021 (arXiv:2106.09685), equation 3; llama.cpp, `llama-adapter.cpp`, for names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import ModelError, ModelFile

from .formats import FILE_TYPES, block_format, quantise
from .reader import GGUFFile
from .writer import MetadataValue, TensorPlan, write_gguf

FINGERPRINT_KEY = "retrograd.base.fingerprint"
ADAPTER_FORMATS = ("f32", "f16", "bf16")

FloatMatrix = npt.NDArray[np.float32]
Factors = Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]
"""By base tensor name (`blk.0.attn_q.weight`): A (rank, in) and B (out, rank)."""

_A, _B = ".lora_a", ".lora_b"
_OWN_KEYS = frozenset({"general.architecture", "general.type", "adapter.type", "adapter.lora.alpha"})


@attrs.frozen(eq=False, kw_only=True)
class Adapter:
    """A LoRA adapter read from a file."""

    path: Path
    architecture: str
    alpha: float
    """As stored; 0 means a scale of 1, as in llama.cpp."""
    factors: Mapping[str, tuple[FloatMatrix, FloatMatrix]]
    """By base tensor name: A (rank, in) and B (out, rank), float32."""
    dtype: str
    """ggml type the factors are stored in, lower case; "mixed" if they differ."""
    metadata: Mapping[str, Any]
    base_fingerprint: str
    """SHA-256 of the base model it was trained on, "" if not recorded."""
    notes: tuple[str, ...] = ()
    """What the file holds and this program, like llama.cpp, leaves out."""

    @property
    def ranks(self) -> Mapping[str, int]:
        """Rank of each tensor."""
        return {name: int(a.shape[0]) for name, (a, _) in self.factors.items()}

    @property
    def rank(self) -> int:
        """The rank, where all tensors have the same; `ModelError` where they differ."""
        ranks = set(self.ranks.values())
        if len(ranks) != 1:
            raise ModelError(f"{self.path}: the tensors have different ranks: {sorted(ranks)}")
        return ranks.pop()

    def scale(self, name: str) -> float:
        """Factor on `b @ a` for a tensor."""
        return self.alpha / self.factors[name][0].shape[0] if self.alpha else 1.0

    def delta(self, name: str, first: int, stop: int) -> FloatMatrix:
        """What is added to rows [first, stop) of a base weight, float32 (stop - first, in)."""
        a, b = self.factors[name]
        return np.asarray(np.float32(self.scale(name)) * (b[first:stop] @ a), dtype=np.float32)

    def check_base(self, base: ModelFile) -> list[str]:
        """Check that the adapter fits `base`; returns notes, raises `ModelError` where it does not."""
        if self.architecture != base.architecture:
            raise ModelError(
                f"{self.path}: the adapter is for the architecture {self.architecture!r}, {base.path} is"
                f" {base.architecture!r}; give the base model it was trained on"
            )
        for name, (a, b) in self.factors.items():
            info = base.tensors.get(name)
            if info is None:
                raise ModelError(
                    f"{self.path}: the adapter changes {name}, which {base.path} does not have; give the"
                    " base model it was trained on"
                )
            if info.shape != (b.shape[0], a.shape[1]):
                raise ModelError(
                    f"{self.path}: the adapter's {name} is {(b.shape[0], a.shape[1])}, that of {base.path}"
                    f" {info.shape}; give the base model it was trained on"
                )
        if self.base_fingerprint and self.base_fingerprint != base.fingerprint():
            return [
                f"{self.path.name} was trained on another file than {base.path.name} (base fingerprint"
                f" {self.base_fingerprint[:12]}…, this model {base.fingerprint()[:12]}…)"
            ]
        return []


def write_adapter(
    path: Path,
    *,
    architecture: str,
    alpha: float,
    factors: Factors,
    dtype: str = "f32",
    base_fingerprint: str = "",
    extra_metadata: Mapping[str, MetadataValue] | None = None,
) -> None:
    """Write a LoRA adapter atomically; whatever had the name stays until the new file is complete.

    `alpha` is LoRA's alpha (the effective scale is alpha / rank); `dtype` one of "f32", "f16", "bf16", to
    which the factors are rounded. `extra_metadata` may give `general.name` and more.

    Raises `ModelError` for factors that are not finite, do not fit each other, or belong to a tensor that
    an adapter cannot change, and if the disk is full.
    """
    if dtype not in ADAPTER_FORMATS:
        raise ModelError(f"adapter dtype {dtype!r} is not one of {', '.join(ADAPTER_FORMATS)}")
    if not factors:
        raise ModelError(f"{path}: an adapter without tensors changes nothing; check lora.targets")
    extra = dict(extra_metadata or {})
    clash = sorted(_OWN_KEYS & extra.keys())
    if clash:
        raise ModelError(f"{path}: metadata {', '.join(clash)} is set by the adapter itself")
    metadata: dict[str, MetadataValue] = {
        "general.architecture": architecture,
        "general.type": "adapter",
        "general.name": extra.pop("general.name", path.stem),
        "general.file_type": FILE_TYPES[dtype.upper()],
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    if base_fingerprint:
        metadata[FINGERPRINT_KEY] = base_fingerprint
    tensors: list[tuple[TensorPlan, npt.NDArray[Any]]] = []
    for name, (a, b) in factors.items():
        _check_factors(path, name, a, b)
        for suffix, matrix in ((_A, a), (_B, b)):
            plan = TensorPlan(name=name + suffix, shape=matrix.shape, format=dtype.upper())
            tensors.append((plan, quantise(matrix, dtype)))
    write_gguf(path, metadata | extra, tensors)


def read_adapter(path: str | Path) -> Adapter:
    """Read a LoRA adapter, whoever made it; ranks may differ by tensor.

    Raises `ModelError` if the file is no LoRA adapter or is damaged.
    """
    file = GGUFFile(Path(path).expanduser())
    kind, variant = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kind != "adapter" or variant != "lora":
        raise ModelError(
            f"{file.path}: not a LoRA adapter: general.type is {kind!r} and adapter.type {variant!r}"
            " ('adapter' and 'lora' were expected); give the adapter that training wrote"
        )
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise ModelError(
            f"{file.path}: an activated LoRA (it works after certain tokens only) is not supported; use a"
            " plain LoRA"
        )
    names, notes = _pairs(file)
    factors = {name: (_matrix(file, name + _A), _matrix(file, name + _B)) for name in names}
    for name, (a, b) in factors.items():
        _check_factors(file.path, name, a, b)
    kinds = {file.tensors[name + suffix].format.lower() for name in names for suffix in (_A, _B)}
    return Adapter(
        path=file.path,
        architecture=file.architecture,
        alpha=float(file.metadata.get("adapter.lora.alpha", 0.0)),
        factors=MappingProxyType(factors),
        dtype=kinds.pop() if len(kinds) == 1 else "mixed",
        metadata=file.metadata,
        base_fingerprint=str(file.metadata.get(FINGERPRINT_KEY, "")),
        notes=notes,
    )


def _pairs(file: GGUFFile) -> tuple[list[str], tuple[str, ...]]:
    """Base tensor names in file order, and notes on what is left out."""
    names: dict[str, set[str]] = {}
    notes: list[str] = []
    for tensor in file.tensors:
        base, suffix = tensor[: -len(_A)], tensor[-len(_A) :]
        if suffix in (_A, _B):
            names.setdefault(base, set()).add(suffix)
        elif tensor.endswith("_norm.weight"):
            # llama.cpp passes over these too: some converters add norms that were not trained.
            notes.append(f"{file.path.name}: {tensor} is not applied (neither does llama.cpp)")
        else:
            raise ModelError(
                f"{file.path}: tensor {tensor} is neither a {_A} nor a {_B} factor; llama.cpp refuses such a"
                " file too: convert or train the adapter again"
            )
    for base, suffixes in names.items():
        if len(suffixes) != 2:
            absent = ({_A, _B} - suffixes).pop()
            raise ModelError(f"{file.path}: {base}{absent} is missing; the file is damaged: write it again")
    if not names:
        raise ModelError(f"{file.path}: the adapter holds no tensors; train or download it again")
    return list(names), tuple(notes)


def _matrix(file: GGUFFile, name: str) -> FloatMatrix:
    weight = file.matrix(name)
    return block_format(weight.format).dequantise(weight.data)


def _check_factors(path: Path, name: str, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
    if name == "token_embd.weight":
        raise ModelError(
            f"{path}: the embedding {name} cannot be in a LoRA adapter (llama.cpp applies it only to inputs,"
            " not to a head that shares it); leave it out of lora.targets"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise ModelError(
            f"{path}: {name}: A {a.shape} must be (rank, in) and B {b.shape} (out, rank) with the same rank"
        )
    for label, matrix in (("A", a), ("B", b)):
        if not np.isfinite(matrix).all():
            count = int(matrix.size - np.isfinite(matrix).sum())
            raise ModelError(
                f"{path}: {name}: factor {label} holds {count} values that are not finite; an adapter with"
                " them would be useless: lower the learning rate or go back to a checkpoint"
            )
