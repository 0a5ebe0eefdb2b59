"""A decoder-only language model over explicit modules: forward and backward, no tape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np

from retrograd_hookspecs import ArchitectureSpec, Backend, KernelTable, ModelFile, TrainingError

from .attention import KeyValueStore
from .batch import PassBatch
from .block_stack import FusedBlocks
from .kept import KeptArrays
from .kv_cache import KVCache, KVGradients
from .precision import restore, storage_dtype, store
from .projection import Projection
from .weights import ModuleBuilder
from .workspace import Scope, Workspace


@attrs.frozen(kw_only=True)
class Checkpointing:
    """Gradient checkpointing: keep the input of every `stride`-th block as `dtype`, recompute the rest.

    `dtype` "f32" keeps it as computed, so that gradients are bit for bit those without checkpointing.

    Source: Chen et al. 2016 (arXiv:1604.06174), section 3.
    """

    stride: int = 4
    dtype: str = "f32"


class CausalLM:
    """Embedding, decoder blocks, head, and the arrays they share.

    Args:
        file: the GGUF; its weights stay mapped.
        spec: what the architecture made of its metadata.
        token_capacity: tokens of the largest pass, for which arrays are sized.
    """

    def __init__(
        self,
        file: ModelFile,
        spec: ArchitectureSpec,
        kernels: KernelTable,
        backend: Backend,
        *,
        token_capacity: int = 0,
    ) -> None:
        self.file = file
        self.spec = spec
        self.kernels = kernels
        self.backend = backend
        self.workspace = Workspace(backend, token_capacity)
        self._scratch = self.workspace.scope("scratch")
        # A block's input and output take turns.
        self._streams = [KeptArrays(kernels, self.workspace.scope(f"scratch/{turn}")) for turn in range(2)]
        builder = ModuleBuilder(file, spec, kernels, backend, self._scratch)
        self.embedding = builder.embedding()
        self.blocks = [builder.block(index) for index in range(spec.block_count)]
        self.head = builder.head()
        builder.require_all_taken()
        self.projections: dict[str, Projection] = builder.projections
        """By tensor name (`blk.0.attn_q.weight`): where adapters attach."""
        self.rope_tables = builder.rope_tables
        self._fused = FusedBlocks(spec, self.blocks, kernels)
        self._few_rows = False
        self._few_projections = False

    def forward(self, batch: PassBatch, store: KeyValueStore | None = None) -> Any:
        """The residual stream (T, E) after the last block; nothing is kept for a backward pass."""
        x = self._embed(batch)
        if self._few_rows:
            if store is not None and self._fused.forward(x, batch, store):
                return x
            self._set_few_rows(True)
        return self._run(x, range(len(self.blocks)), batch, store)

    def forward_keeping(
        self,
        batch: PassBatch,
        store: KeyValueStore | None = None,
        checkpointing: Checkpointing | None = None,
    ) -> Any:
        """As `forward`, and keep what `backward` of the same pass needs."""
        groups = self._groups(checkpointing)
        x = self._embed(batch)
        for number, group in enumerate(groups[:-1]):
            assert checkpointing is not None  # without it there is one group
            self._save(x, number, checkpointing)
            x = self._run(x, group, batch, store)
        if groups[-1][0] % 2:
            first = self._stream(0, *x.shape)
            first[...] = x
            x = first
        return self._run_keeping(x, groups[-1], batch, store)

    def backward(
        self,
        grad: Any,
        batch: PassBatch,
        store: KeyValueStore | None = None,
        checkpointing: Checkpointing | None = None,
    ) -> None:
        """Backward from `grad` (T, E), the gradient by what `forward_keeping` returned; it is overwritten.

        Adds to the gradients of all attached parameters. Ends at the first block that has any: the
        embedding is never trained.
        """
        groups = self._groups(checkpointing)
        lowest = self._first_trained()
        for number in reversed(range(len(groups))):
            group = groups[number]
            if group[-1] < lowest:
                break
            if number < len(groups) - 1:
                assert checkpointing is not None  # without it there is one group
                x = self._stream(0, *grad.shape)
                self._load(x, number, checkpointing)
                self._run_keeping(x, group, batch, store)
            for index in reversed(group):
                if index < lowest:
                    break
                slot = index - group[0]
                keep = self._keep(slot)
                x = self._streams[slot % 2].load("x", keep, *grad.shape)
                self.blocks[index].backward(grad, x, batch, keep, store)

    def new_cache(self, name: str, dtype: Any = None) -> KVCache:
        """A key/value cache for this model; `dtype` None is the compute dtype."""
        self._fused.forget()
        spec = self.spec
        return KVCache(
            name=name,
            workspace=self.workspace,
            blocks=spec.block_count,
            heads=spec.head_count_kv,
            head_length=spec.head_length,
            dtype=dtype,
        )

    def new_cache_gradients(self, name: str) -> KVGradients:
        """Gradients for a cache of `new_cache`."""
        spec = self.spec
        return KVGradients(
            name=name,
            workspace=self.workspace,
            blocks=spec.block_count,
            heads=spec.head_count_kv,
            head_length=spec.head_length,
        )

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The base model: inside the block no projection applies its adapter."""
        attached = {name: projection.lora for name, projection in self.projections.items()}
        for projection in self.projections.values():
            projection.lora = None
        try:
            yield
        finally:
            for name, lora in attached.items():
                self.projections[name].lora = lora

    @contextmanager
    def few_rows(self) -> Iterator[None]:
        """Inside the block, `forward` is made for passes of a few tokens: faster, and not bit for bit that of
        training. All blocks are one call of `decode_blocks` where a kernel serves it and all runs of the pass
        are cached; else products with weights are `matmul_few`."""
        self._few_rows = self.head.few_rows = True
        try:
            yield
        finally:
            self._few_rows = self.head.few_rows = False
            self._set_few_rows(False)

    def _set_few_rows(self, few: bool) -> None:
        """Tell all projections, of which there are hundreds, and only where they are asked one by one."""
        if few != self._few_projections:
            self._few_projections = few
            for projection in self.projections.values():
                projection.few_rows = few

    @property
    def sampling_cache_dtype(self) -> np.dtype[Any] | None:
        """Type of the cache of fast sampling: float16 where one call decodes all blocks, which reads it as it
        is. None, the compute dtype, elsewhere: there a cache of float16 is widened anew with every token."""
        return np.dtype(np.float16) if self._fused.served else None

    def weight_bytes(self) -> int:
        """Bytes of all tensors, as mapped."""
        return sum(info.bytes for info in self.file.tensors.values())

    def _embed(self, batch: PassBatch) -> Any:
        x = self._stream(0, batch.length, self.spec.embedding_length)
        self.embedding.forward(batch.tokens, x)
        return x

    def _run(self, x: Any, blocks: range, batch: PassBatch, store: KeyValueStore | None) -> Any:
        """Blocks in order, keeping nothing: all in the arrays of the first slot, and the inputs of the
        first two slots take turns as input and output."""
        for index in blocks:
            out = self._stream((index + 1) % 2, *x.shape)
            self.blocks[index].forward(x, out, batch, self.workspace.scope("kept/0", keeps=False), store)
            x = out
        return x

    def _run_keeping(self, x: Any, blocks: range, batch: PassBatch, store: KeyValueStore | None) -> Any:
        """Blocks in order; the output of each is the kept input of the next."""
        for slot, index in enumerate(blocks):
            keep, out = self._keep(slot), self._stream(slot + 1, *x.shape)
            self.blocks[index].forward(x, out, batch, keep, store)
            self._streams[slot % 2].save("x", x, keep)
            x = out
        return x

    def _stream(self, slot: int, rows: int, width: int) -> Any:
        """The residual stream (T, E) as it enters the block of a slot."""
        return self._streams[slot % 2].fresh("x", self._keep(slot), rows, width)

    def _keep(self, slot: int) -> Scope:
        return self.workspace.scope(f"kept/{slot}")

    def _groups(self, checkpointing: Checkpointing | None) -> list[range]:
        count = len(self.blocks)
        stride = count if checkpointing is None else checkpointing.stride
        return [range(first, min(first + stride, count)) for first in range(0, count, stride)]

    def _first_trained(self) -> int:
        for index in range(len(self.blocks)):
            prefix = f"blk.{index}."
            if any(p.lora for name, p in self.projections.items() if name.startswith(prefix)):
                return index
        return len(self.blocks)

    def _checkpoint(self, x: Any, number: int, checkpointing: Checkpointing) -> Any:
        dtype = storage_dtype(checkpointing.dtype, self.backend.compute_dtype)
        return self.workspace.scope("checkpoints").rows(f"{number}", *x.shape, dtype=dtype)

    def _save(self, x: Any, number: int, checkpointing: Checkpointing) -> None:
        stored = self._checkpoint(x, number, checkpointing)
        store(x, stored, checkpointing.dtype, self._scratch)
        if checkpointing.dtype == "f16" and not np.isfinite(self.backend.to_host(stored)).all():
            raise TrainingError(
                f"the activations before block {number * checkpointing.stride} exceed the range of f16"
                ' (65504) or are not finite; set training.checkpoint_dtype = "bf16" or "f32"'
            )

    def _load(self, x: Any, number: int, checkpointing: Checkpointing) -> None:
        restore(self._checkpoint(x, number, checkpointing), x, checkpointing.dtype, self._scratch)
