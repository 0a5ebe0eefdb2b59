"""All decoder blocks as the operands of one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from retrograd_hookspecs import (
    ONE_BY_ONE,
    ArchitectureSpec,
    BlockOperands,
    BlockProjection,
    BlockStack,
    KernelTable,
)

from .attention import KeyValueStore
from .batch import PassBatch
from .block import DecoderBlock
from .norm import RMSNorm
from .projection import Projection


class FusedBlocks:
    """Runs the op `decode_blocks` where one kernel serves it for all weights of the blocks."""

    def __init__(self, spec: ArchitectureSpec, blocks: Sequence[DecoderBlock], kernels: KernelTable) -> None:
        self._spec = spec
        self._blocks = blocks
        self._projections = [one for block in blocks for one in _projections(block)]
        self._tables = list(
            {id(block.attention.rope_table): block.attention.rope_table for block in blocks}.values()
        )
        self._decode = _served(self._projections, kernels)
        self._made_of: list[Any] = []
        self._stack: BlockStack | None = None

    @property
    def served(self) -> bool:
        """True if a kernel serves the op for this model."""
        return self._decode is not None

    def forward(self, x: Any, batch: PassBatch, store: KeyValueStore) -> bool:
        """x (T, E) through all blocks, in place. False, with nothing done, where the op does not serve: no
        kernel has it, a run of the pass is not cached, or shapes do not suit the kernel."""
        if self._decode is None or not batch.cached or batch.loose:
            return False
        stack = self._current(store, batch.max_position + 1)
        return bool(self._decode(x, batch.positions, batch.shared_segments, stack))

    def forget(self) -> None:
        """Hold no cache any more: beside a larger one it would be the peak of the run."""
        self._made_of, self._stack = [], None

    def _current(self, store: KeyValueStore, positions: int) -> BlockStack:
        """The operands; made anew when an array was replaced."""
        parts = [
            *[table.tables(positions)[0] for table in self._tables],
            store.cache.stored,
            *[one.lora for one in self._projections],
        ]
        same = len(parts) == len(self._made_of) and all(map(is_, parts, self._made_of))
        if not same or self._stack is None:
            spec = self._spec
            self._stack = BlockStack(
                blocks=tuple(
                    _operands(block, *arrays, positions)
                    for block, arrays in zip(self._blocks, store.cache.stored, strict=True)
                ),
                heads=spec.head_count,
                epsilon=spec.norm_epsilon,
                scale=spec.attention_scale or spec.head_length**-0.5,
                softcap=spec.attention_softcap,
                interleaved=spec.rope_interleaved,
                activation=spec.activation,
            )
            self._made_of = parts
        return self._stack


def _projections(block: DecoderBlock) -> tuple[Projection, ...]:
    attention, mlp = block.attention, block.mlp
    return attention.q, attention.k, attention.v, attention.output, mlp.gate, mlp.up, mlp.down


def _served(projections: Sequence[Projection], kernels: KernelTable) -> Callable[..., Any] | None:
    """The function that serves the op for all weights, None if there is no such."""
    impls = [
        kernels.serving("decode_blocks", format) for format in {one.weight.format for one in projections}
    ]
    functions = {impl.fn for impl in impls}
    if len(functions) != 1 or any(impl.variant == ONE_BY_ONE for impl in impls):
        return None
    return functions.pop()


def _operands(block: DecoderBlock, keys: Any, values: Any, positions: int) -> BlockOperands:
    attention = block.attention
    cos, sin = attention.rope_table.tables(positions)
    q, k, v, output, gate, up, down = (_operand(one) for one in _projections(block))
    return BlockOperands(
        attention_norm=block.attention_norm.weight,
        q=q,
        k=k,
        v=v,
        output=output,
        mlp_norm=block.mlp_norm.weight,
        gate=gate,
        up=up,
        down=down,
        cos=cos,
        sin=sin,
        keys=keys,
        values=values,
        window=attention.window,
        q_norm=_weight(attention.q_norm),
        k_norm=_weight(attention.k_norm),
        post_attention_norm=_weight(block.post_attention_norm),
        post_mlp_norm=_weight(block.post_mlp_norm),
    )


def _operand(one: Projection) -> BlockProjection:
    if one.lora is None:
        return BlockProjection(weight=one.weight, bias=one.bias)
    return BlockProjection(
        weight=one.weight, bias=one.bias, a=one.lora.a.weight, b=one.lora.b.weight, scale=one.lora.scale
    )


def _weight(norm: RMSNorm | None) -> Any:
    return None if norm is None else norm.weight
