"""Kernel contracts: the ops that modules call, and what implements them.

An op is whole-array. The modules of `retrograd.nn` look each op up once, when the model is built, and
call it through a local; nothing is dispatched per token.

Arrays are C-contiguous and of the backend's compute dtype `F` (float64 for `reference`, float32 for
`cpu`) unless stated. `T` tokens of one pass (all its sequences one after another), `K` inputs and `N`
outputs of a projection, `H` query heads, `G` key/value heads (H is a multiple of G), `D` head size,
`r` LoRA rank. Output arrays are given by the caller and fully overwritten unless the text says
"adds to".

**Bitwise rule.** A row of an output depends on its own inputs alone, never on how many other rows the
call has nor where it stands among them: the order of summation is fixed per element. So a token's
result is the same whatever batch it is computed in. Reductions over rows (`da`, `db`) are fixed for
a fixed T and thread count.

**Segments.** Attention works on `segments`, int64 (S, 5), one row a run of consecutive queries:

    query_start, length, context_start, context_length, key_start

Query i of the segment (row `query_start + i` of q) attends to the whole context, rows
[context_start, context_start + context_length) of k and v, and causally to its own keys, rows
[key_start, key_start + i] of k and v. Its logical position is `context_length + i`; the context's j-th row
has position j. Query ranges are disjoint. Contexts may be shared by several segments (a prompt with many
answers), and may lie in the same k and v as the segment's own keys (a key/value cache). With
`window` = w > 0 a query sees only positions greater than its own minus w. Packed independent sequences are
segments with `context_length` 0.

| op | arguments |
|---|---|
| `matmul` (by format) | `(x (T,K), w, out (T,N))`: out = x·Wᵀ, W (N,K) |
| `matmul_input_grad` (by format) | `(dout (T,N), w, dx (T,K), accumulate: bool)`: dx = dout·W, or adds to dx |
| `matmul_few` (by format, optional) | as `matmul`, for few rows; may round activations to 8 bits, so not bit for bit `matmul`. For `training.fast_sampling_context` only. Where there is none, `matmul` serves |
| `project` (by format, optional) | `(x (T,K), weights, adapters, outs)`: sequences with one entry a projection: out (T,N) = x·Wᵀ, and with an adapter as `lora_forward`. Without: `matmul` and `lora_forward` |
| `project_backward` (by format, optional) | `(douts, x, weights, adapters, dx (T,K), accumulate: bool, precise: bool = False)`: dx = the sum of dout·W over the projections, or adds to dx; with adapters as `lora_backward`. `precise` asks for the precision of `project` where the kernel would round more. Without: `matmul_input_grad` and `lora_backward` |
| `decode_blocks` (by format, optional) | `(x (T,E) in place, positions int32 (T,), segments, stack)`: all decoder blocks of a `BlockStack` on a few tokens, whose keys and values are written to its caches. A run's own keys begin where its context ends, so that earlier ones of its own may lie before its tokens: the key of position p is row key_start + p − context_length; runs with one context may have it read once. Products and their rounding are those of `matmul_few`. Returns False, with nothing changed, for shapes that it does not serve, else True. Without: the ops of its parts |
| `embedding` (by format) | `(ids int32 (T,), w, scale: float, out (T,K))`: out = scale·W[ids] |
| `lora_forward` | `(x (T,K), a (r,K), b (N,r), scale, hidden (T,r), out (T,N))`: hidden = x·aᵀ; adds scale·hidden·bᵀ to out |
| `lora_backward` | `(dout (T,N), x, hidden, a, b, scale, da (r,K), db (N,r), dx (T,K))`: adds to da, db and dx |
| `rms_norm` | `(x (T,K), weight (K,), eps, out (T,K), rstd (T,))`: out = x·rstd·weight, rstd = 1/sqrt(mean(x²)+eps) |
| `rms_norm_backward` | `(dout, x, weight, rstd, dx, accumulate: bool)` |
| `rope` | `(x (T,heads,D) in place, positions int32 (T,), cos (P,R/2), sin (P,R/2), interleaved: bool, inverse: bool)`: rotates the first R of D; interleaved pairs (2i, 2i+1), else halves (i, i+R/2); inverse rotates back (the gradient) |
| `attention` | `(q (T,H,D), k (M,G,D), v (M,G,D), segments, scale, window: int, softcap: float, out (T,H,D), lse (T,H))`: softmax(softcap·tanh(scale·qk/softcap))·v; softcap 0 = none; lse = logsumexp of the (capped) scores |
| `attention_backward` | `(dout, q, k, v, out, lse, segments, scale, window, softcap, dq (T,H,D), dk (M,G,D), dv (M,G,D))`: overwrites dq, adds to dk and dv |
| `gated_activation` | `(kind: "silu" or "gelu_tanh", gate (T,K), up (T,K), out (T,K))`: out = act(gate)·up |
| `gated_activation_backward` | `(kind, dout, gate, up, dgate, dup)`: dgate may be gate, dup may be up (in place) |
| `add_bias` | `(x (T,N) in place, bias (N,))` |
| `add` | `(x (T,K), out (T,K))`: adds x to out |
| `scale` | `(factor: float, out)`: out *= factor |
| `logsumexp_tile` | `(logits (T,V'), first: int, targets int32 (T,), softcap, running_max (T,), running_sum (T,), target_logit (T,))`: folds vocabulary entries [first, first+V') in; running_max starts at -inf, running_sum at 0; logits are capped in place; a target inside the tile sets target_logit. logsumexp = running_max + log(running_sum) |
| `softmax_grad_tile` | `(logits (T,V'), first: int, targets int32 (T,), softcap, lse (T,), dlogp (T,))`: logits (uncapped) are overwritten by dlogp·(onehot(target) − softmax), through the cap |
| `narrow` (optional) | `(x F, out uint16)`, both of one shape: x in 16 bits of the kernel's own format, as close as the kernel's products are to F. Modules keep activations for the backward pass in it; where there is none, as they are |
| `widen` (optional) | `(x uint16, out F)`: what `narrow` wrote, rounded |
| `gated_activation_keep` (optional) | `(kind, gate, up, out, kept_gate uint16, kept_up uint16)`: `gated_activation`, and `narrow` of gate and up |
| `gated_activation_kept` (optional) | `(kind, kept_gate, kept_up, out)`: `gated_activation` of what was kept |
| `gated_activation_kept_backward` (optional) | `(kind, dout, kept_gate, kept_up, dgate, dup)`: its gradients. The three are used together, and only if they are of the variant that serves `gated_activation` |
| `adamw` | `(value, grad, first_moment, second_moment, lr, beta1, beta2, eps, weight_decay, step: int)` all 1-D float32; updates value and moments in place (Loshchilov & Hutter 2019, algorithm 2, bias-corrected) |
| `sgd` | `(value, grad, momentum_buffer, lr, momentum, weight_decay)` likewise |
| `sum_squares` | `(x 1-D) -> float`: in float64, in a fixed order |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

OPS_BY_FORMAT = (
    "matmul",
    "matmul_input_grad",
    "matmul_few",
    "project",
    "project_backward",
    "decode_blocks",
    "embedding",
)
STAND_INS = {"matmul_few": "matmul"}
"""Optional ops, and the op of the same arguments that serves where no kernel implements them."""
GATED_KEPT = ("gated_activation_keep", "gated_activation_kept", "gated_activation_kept_backward")
"""Optional ops that take the work of `narrow` and `widen` along."""
OPTIONAL = ("narrow", "widen", *GATED_KEPT)
"""Optional ops that modules do without where no kernel implements them."""
ABSENT = "absent"
"""Variant of an optional op that no kernel implements."""
FUSED = {
    "project": ("matmul", "lora_forward"),
    "project_backward": ("matmul_input_grad", "lora_backward"),
    "decode_blocks": (
        "matmul_few",
        "lora_forward",
        "rms_norm",
        "rope",
        "attention",
        "gated_activation",
        "add_bias",
        "add",
    ),
}
"""Optional ops that do the work of others in one pass, and these others, the first of which reads weights.

Where no kernel implements a fused op, its parts are called one by one. So they are where a part would be served
by a kernel of higher priority, or the first by one of another variant: who replaces a part is not passed
over. A fused kernel serves projections together if it is registered as the same function for the formats of
all their weights.
"""
ONE_BY_ONE = "one by one"
"""Variant of a fused op whose parts are called one by one."""
OPS = (
    *OPS_BY_FORMAT,
    "lora_forward",
    "lora_backward",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "attention",
    "attention_backward",
    "gated_activation",
    "gated_activation_backward",
    "add_bias",
    "add",
    "scale",
    "narrow",
    "widen",
    *GATED_KEPT,
    "logsumexp_tile",
    "softmax_grad_tile",
    "adamw",
    "sgd",
    "sum_squares",
)
ANY_FORMAT = "*"


@attrs.frozen(eq=False, kw_only=True)
class QuantMatrix:
    """A weight matrix W (rows N, columns K) as it lies in the GGUF.

    `data` is uint8 (N, row bytes), usually a read-only memory map, for every format (F32 and F16
    included). `format` is the type name ("Q4_K", "F32", …). `decode` gives the values of packed rows, uint8
    (n, row bytes), as float32 (n, K), a new array, whoever offers the format; None for one of ggml's.
    """

    name: str
    format: str
    data: npt.NDArray[np.uint8]
    columns: int
    decode: Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]] | None = None

    @property
    def rows(self) -> int:
        return int(self.data.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def row_slice(self, first: int, stop: int) -> QuantMatrix:
        """Rows [first, stop) as a view: rows are self-contained in every ggml format."""
        return attrs.evolve(self, data=self.data[first:stop])


@attrs.frozen(eq=False, kw_only=True)
class LowRank:
    """The adapter of one projection in a call of `project` or `project_backward`."""

    a: Any
    """(r, K)."""
    b: Any
    """(N, r)."""
    scale: float
    hidden: Any
    """(T, r): x·aᵀ, written by `project` and read by `project_backward`."""
    da: Any = None
    """(r, K), added to by `project_backward`; None in `project`."""
    db: Any = None
    """(N, r), likewise."""


@attrs.frozen(eq=False, kw_only=True)
class BlockProjection:
    """A projection of a block in `decode_blocks`: out = x·Wᵀ + scale·(x·aᵀ)·bᵀ + bias."""

    weight: QuantMatrix
    bias: Any = None
    """(N,), or None."""
    a: Any = None
    """(r, K), or None without an adapter."""
    b: Any = None
    """(N, r)."""
    scale: float = 1.0


@attrs.frozen(eq=False, kw_only=True)
class BlockOperands:
    """What `decode_blocks` reads of one decoder block, and the cache that it writes.

    mid = x + post(output(attention(norm(x)))), out = mid + post(down(act(gate(n))·up(n))), n = norm(mid).
    """

    attention_norm: Any
    """(E,), as the weights of all norms over the residual stream."""
    q: BlockProjection
    k: BlockProjection
    v: BlockProjection
    output: BlockProjection
    mlp_norm: Any
    gate: BlockProjection
    up: BlockProjection
    down: BlockProjection
    cos: Any
    """(P, R/2), of all positions of the pass; see `rope`."""
    sin: Any
    keys: Any
    """(M, G, D) of the compute dtype or float16: the rows that segments refer to. The pass writes those of its
    own tokens, and reads them as written."""
    values: Any
    window: int = 0
    q_norm: Any = None
    """(D,), over each head before the rotation, or None."""
    k_norm: Any = None
    post_attention_norm: Any = None
    """(E,), or None."""
    post_mlp_norm: Any = None

    @property
    def projections(self) -> tuple[BlockProjection, ...]:
        """All seven."""
        return self.q, self.k, self.v, self.output, self.gate, self.up, self.down


@attrs.frozen(eq=False, kw_only=True)
class BlockStack:
    """The decoder blocks of a model in `decode_blocks`, in their order.

    Made anew when an array in it is replaced; values may change in place. So a kernel may keep what it
    derives from the arrays' addresses as long as the object lives.
    """

    blocks: tuple[BlockOperands, ...]
    heads: int
    """H."""
    epsilon: float
    scale: float
    """Factor on q·k."""
    softcap: float
    interleaved: bool
    activation: str
    """"silu" or "gelu_tanh"."""


@attrs.frozen(kw_only=True)
class KernelImpl:
    """One implementation of an op. The highest `priority` that the device can run serves it.

    `format` is "" for ops that do not read weights, a ggml type name, or `ANY_FORMAT`. `variant`
    names the instruction set or method ("amx", "avx512", "avx2", "portable", "dequantise"), by
    which a user can force it. `fast` is False for a fallback that `preflight --strict` refuses.
    """

    op: str
    format: str = ""
    fn: Callable[..., Any]
    priority: int = 0
    variant: str = ""
    fast: bool = True


class KernelTable(Protocol):
    """The ops that serve one run; frozen once assembled."""

    def get(self, op: str, format: str = "") -> Callable[..., Any]:
        """The function serving `op`; `KernelError` names the op, format and device if there is none."""

    def serving(self, op: str, format: str = "") -> KernelImpl:
        """The implementation behind `get`, for reports."""


@attrs.frozen(kw_only=True)
class DeviceInfo:
    """What a backend found. `features` are the instruction sets that kernels may use."""

    backend: str
    description: str
    features: frozenset[str] = frozenset()
    threads: int = 1
    memory_bytes: int = 0
    """Memory free for the run when probed, in bytes."""


class Backend(Protocol):
    """A device that holds arrays and runs kernels. Its name selects `kernels` entries by prefix."""

    name: str
    compute_dtype: np.dtype[Any]
    device: DeviceInfo

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Uninitialised array on the device."""

    def from_host(self, array: npt.NDArray[Any]) -> Any:
        """Array on the device holding the values of a host array (may share memory)."""

    def to_host(self, array: Any) -> npt.NDArray[Any]:
        """Host array with the values of a device array (may share memory)."""

    def upload(self, matrix: QuantMatrix) -> QuantMatrix:
        """The weight as kernels of this backend expect it."""


KernelMapping = Mapping[tuple[str, str], KernelImpl]
