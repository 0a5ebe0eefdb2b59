"""Inputs on which kernels are compared with the oracle; see `retrograd.testing.kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from retrograd_hookspecs import FUSED, OPS_BY_FORMAT, QuantMatrix

from .attention_cases import attention_cases
from .fused_cases import fused_cases
from .kernel_case import KernelCase, Random, SameAs, normal
from .quants import random_weights


def kernel_cases(op: str, formats: Sequence[str] = (), seed: int = 0) -> Iterator[KernelCase]:
    """The cases of an op; `formats` are the ggml types of the weights for ops that read some."""
    rng = np.random.default_rng(seed)
    if op in OPS_BY_FORMAT:
        for name in formats:
            yield from fused_cases(op, name, rng) if op in FUSED else _weight_cases(op, name, rng)
    else:
        yield from _CASES[op](op, rng)


def _weight_cases(op: str, name: str, rng: Random) -> Iterator[KernelCase]:
    # 256 columns are whole blocks of every format.
    for tokens, rows, columns in ((1, 5, 256), (7, 33, 512), (40, 130, 256)):
        data = random_weights(rng, rows, columns, name, 0.1)
        data.flags.writeable = False
        weight = QuantMatrix(name=f"random {name}", format=name, data=data, columns=columns)
        label = f"{tokens} tokens, {rows} x {columns}"
        x, y = normal(rng, tokens, columns), normal(rng, tokens, rows)
        if op in ("matmul", "matmul_few"):
            # The op for few rows may round activations to 8 bits.
            tolerance = 4e-6 if op == "matmul" else 2e-2
            arguments = {"x": x, "w": weight, "out": np.full_like(y, np.nan)}
            yield KernelCase(
                op=op,
                label=label,
                arguments=arguments,
                outputs=("out",),
                by_row=("x", "out"),
                tolerance=tolerance,
            )
        elif op == "matmul_input_grad":
            for accumulate in (False, True):
                dx = normal(rng, tokens, columns) if accumulate else np.full_like(x, np.nan)
                arguments = {"dout": y, "w": weight, "dx": dx, "accumulate": accumulate}
                yield KernelCase(
                    op=op,
                    label=f"{label}, accumulate={accumulate}",
                    arguments=arguments,
                    outputs=("dx",),
                    by_row=("dout", "dx"),
                    tolerance=4e-6,
                )
        else:
            ids = rng.integers(0, rows, tokens, dtype=np.int32)
            arguments = {"ids": ids, "w": weight, "scale": 1.5, "out": np.full_like(x, np.nan)}
            yield KernelCase(op=op, label=label, arguments=arguments, outputs=("out",), by_row=("ids", "out"))


def _rms_norm(op: str, rng: Random) -> Iterator[KernelCase]:
    for rows, size in ((1, 5), (3, 16), (9, 579), (40, 512)):
        x, weight = 3.0 * normal(rng, rows, size), normal(rng, size)
        rstd = (1.0 / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1) + 1e-5)).astype(np.float32)
        if op == "rms_norm":
            arguments = {
                "x": x,
                "weight": weight,
                "eps": 1e-5,
                "out": np.full_like(x, np.nan),
                "rstd": np.full_like(rstd, np.nan),
            }
            yield KernelCase(
                op=op,
                label=f"{rows} x {size}",
                arguments=arguments,
                outputs=("out", "rstd"),
                by_row=("x", "out", "rstd"),
            )
            continue
        for accumulate in (False, True):
            arguments = {
                "dout": normal(rng, rows, size),
                "x": x,
                "weight": weight,
                "rstd": rstd,
                "dx": normal(rng, rows, size) if accumulate else np.full_like(x, np.nan),
                "accumulate": accumulate,
            }
            yield KernelCase(
                op=op,
                label=f"{rows} x {size}, accumulate={accumulate}",
                arguments=arguments,
                outputs=("dx",),
                by_row=("dout", "x", "rstd", "dx"),
            )


def _rope(op: str, rng: Random) -> Iterator[KernelCase]:
    for tokens, heads, size, rotated in ((1, 1, 2, 2), (7, 3, 64, 64), (5, 2, 80, 34), (50, 9, 64, 48)):
        angles = rng.uniform(-3.0, 3.0, (60, rotated // 2)).astype(np.float32)
        for interleaved in (False, True):
            for inverse in (False, True):
                arguments = {
                    "x": normal(rng, tokens, heads, size),
                    "positions": rng.integers(0, 60, tokens, dtype=np.int32),
                    "cos": np.cos(angles),
                    "sin": np.sin(angles),
                    "interleaved": interleaved,
                    "inverse": inverse,
                }
                yield KernelCase(
                    op=op,
                    label=f"{tokens} x {heads} x {size}, {rotated} rotated, {interleaved=}, {inverse=}",
                    arguments=arguments,
                    outputs=("x",),
                    by_row=("x", "positions"),
                )


def _gated(op: str, rng: Random) -> Iterator[KernelCase]:
    # The exponent is rounded relative to its own size, which is a larger error of its power.
    tolerance = 2e-6
    for kind in ("silu", "gelu_tanh"):
        for rows, size in ((1, 3), (7, 100), (40, 512)):
            gate, up, dout = (
                4.0 * normal(rng, rows, size),
                normal(rng, rows, size),
                normal(rng, rows, size),
            )
            gate.reshape(-1)[:3] = (-95.0, 0.0, 95.0)
            label = f"{kind}, {rows} x {size}"
            if op == "gated_activation":
                arguments = {"kind": kind, "gate": gate, "up": up, "out": np.full_like(gate, np.nan)}
                yield KernelCase(
                    op=op,
                    label=label,
                    arguments=arguments,
                    outputs=("out",),
                    by_row=("gate", "up", "out"),
                    tolerance=tolerance,
                )
                continue
            inputs = {"kind": kind, "dout": dout, "gate": gate, "up": up}
            fresh = {"dgate": np.full_like(gate, np.nan), "dup": np.full_like(gate, np.nan)}
            in_place = {"dgate": SameAs("gate"), "dup": SameAs("up")}
            for place, results in (("", fresh), (", in place", in_place)):
                yield KernelCase(
                    op=op,
                    label=label + place,
                    arguments=inputs | results,
                    outputs=("dgate", "dup"),
                    by_row=("dout", "gate", "up", "dgate", "dup"),
                    tolerance=tolerance,
                )


def _elementwise(op: str, rng: Random) -> Iterator[KernelCase]:
    for rows, size in ((1, 3), (7, 101), (40, 512)):
        x, y = normal(rng, rows, size), normal(rng, rows, size)
        calls: dict[str, dict[str, Any]] = {
            "add_bias": {"x": x, "bias": normal(rng, size)},
            "add": {"x": x, "out": y},
            "scale": {"factor": 0.3, "out": y},
        }
        output = "x" if op == "add_bias" else "out"
        by_row = ("x", "out") if op == "add" else (output,)
        yield KernelCase(
            op=op, label=f"{rows} x {size}", arguments=calls[op], outputs=(output,), by_row=by_row
        )


def _cross_entropy(op: str, rng: Random) -> Iterator[KernelCase]:
    for rows, size, first, softcap in (
        (1, 1, 0, 0.0),
        (7, 100, 30, 0.0),
        (9, 3003, 70000, 5.0),
        (20, 1024, 0, 30.0),
    ):
        logits = 6.0 * normal(rng, rows, size)
        targets = rng.integers(max(0, first - size), first + 2 * size, rows, dtype=np.int32)
        targets[0] = first + size - 1
        label = f"{rows} x {size} from {first}, softcap {softcap}"
        if op == "logsumexp_tile":
            for started in (False, True):
                arguments = {
                    "logits": logits,
                    "first": first,
                    "targets": targets,
                    "softcap": softcap,
                    "running_max": 4.0 * normal(rng, rows) if started else np.full(rows, -np.inf, np.float32),
                    "running_sum": 1.0 + np.abs(normal(rng, rows)) if started else np.zeros(rows, np.float32),
                    "target_logit": np.full(rows, 7.0, np.float32),
                }
                outputs = ("logits", "running_max", "running_sum", "target_logit")
                yield KernelCase(
                    op=op,
                    label=f"{label}, {started=}",
                    arguments=arguments,
                    outputs=outputs,
                    by_row=("targets", *outputs),
                    # An error of the maximum, which a cap makes, is one of the exponent too.
                    tolerance=3e-6,
                )
            continue
        capped = softcap * np.tanh(logits / softcap) if softcap else logits
        dlogp = normal(rng, rows)
        dlogp[rows // 2] = 0.0
        arguments = {
            "logits": logits,
            "first": first,
            "targets": targets,
            "softcap": softcap,
            "lse": (np.log(np.exp(capped.astype(np.float64)).sum(axis=1)) + 0.1).astype(np.float32),
            "dlogp": dlogp,
        }
        yield KernelCase(
            op=op,
            label=label,
            arguments=arguments,
            outputs=("logits",),
            by_row=("logits", "targets", "lse", "dlogp"),
            tolerance=3e-6,
        )


def _lora(op: str, rng: Random) -> Iterator[KernelCase]:
    sizes = ((1, 5, 3, 1), (7, 64, 33, 2), (9, 100, 48, 8), (37, 129, 70, 17), (20, 64, 80, 256))
    for tokens, inputs, outputs, rank in sizes:
        label = f"{tokens} tokens, {inputs} to {outputs}, rank {rank}"
        x, a, b = normal(rng, tokens, inputs), normal(rng, rank, inputs), normal(rng, outputs, rank)
        shared = {"a": a, "b": b, "scale": 0.7}
        if op == "lora_forward":
            arguments = {"x": x} | shared | {"hidden": np.full((tokens, rank), np.nan, np.float32)}
            arguments["out"] = normal(rng, tokens, outputs)
            yield KernelCase(
                op=op,
                label=label,
                arguments=arguments,
                outputs=("hidden", "out"),
                by_row=("x", "hidden", "out"),
                tolerance=2e-6,
            )
            continue
        arguments = {"dout": normal(rng, tokens, outputs), "x": x, "hidden": x @ a.T} | shared
        arguments |= {"da": normal(rng, rank, inputs), "db": normal(rng, outputs, rank)}
        arguments["dx"] = normal(rng, tokens, inputs)
        yield KernelCase(
            op=op,
            label=label,
            arguments=arguments,
            outputs=("da", "db", "dx"),
            by_row=("dout", "x", "hidden", "dx"),
            tolerance=4e-6,
        )


def _optimizers(op: str, rng: Random) -> Iterator[KernelCase]:
    for size in (1, 100, 20011):
        value, grad = normal(rng, size), normal(rng, size)
        if op == "sum_squares":
            yield KernelCase(
                op=op,
                label=f"{size} elements",
                arguments={"x": value},
                outputs=("result",),
                float32=("x",),
                tolerance=1e-12,
            )
        elif op == "sgd":
            arguments = {"value": value, "grad": grad, "momentum_buffer": normal(rng, size)}
            settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
            yield KernelCase(
                op=op,
                label=f"{size} elements",
                arguments=arguments | settings,
                outputs=("value", "momentum_buffer"),
                float32=tuple(arguments),
            )
        else:
            for step in (1, 1000):
                moments = {"first_moment": 0.1 * normal(rng, size), "second_moment": normal(rng, size) ** 2}
                arguments = {"value": value, "grad": grad} | moments
                settings = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
                yield KernelCase(
                    op=op,
                    label=f"{size} elements, {step=}",
                    arguments=arguments | settings | {"step": step},
                    outputs=("value", "first_moment", "second_moment"),
                    float32=tuple(arguments),
                )


_CASES: Mapping[str, Callable[[str, Random], Iterator[KernelCase]]] = MappingProxyType(
    {
        "lora_forward": _lora,
        "lora_backward": _lora,
        "rms_norm": _rms_norm,
        "rms_norm_backward": _rms_norm,
        "rope": _rope,
        "attention": attention_cases,
        "attention_backward": attention_cases,
        "gated_activation": _gated,
        "gated_activation_backward": _gated,
        "add_bias": _elementwise,
        "add": _elementwise,
        "scale": _elementwise,
        "logsumexp_tile": _cross_entropy,
        "softmax_grad_tile": _cross_entropy,
        "adamw": _optimizers,
        "sgd": _optimizers,
        "sum_squares": _optimizers,
    }
)
