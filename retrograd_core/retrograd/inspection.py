"""What a model is, what of it can be trained, and which kernels would run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from retrograd_hookspecs import OPS, OPS_BY_FORMAT, ConfigError, KernelError, Problem

from .assembly import Assembly, assemble, trainable_of
from .config import Document, keys_of
from .progress import size


@attrs.frozen(kw_only=True)
class ServedOp:
    """An op, the weight format it reads ("" if none), and the kernel that serves it."""

    op: str
    format: str
    variant: str
    fast: bool

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return attrs.asdict(self)

    def line(self) -> str:
        """One line of a table."""
        speed = "" if self.fast else "  fallback: correct but slow"
        return f"{self.op:<26} {self.format:<8} {self.variant or '-'}{speed}"


def served_ops(document: Document, targets: Sequence[str] = ()) -> list[ServedOp]:
    """Every op of a training step on this model and device.

    Raises: `KernelError` if one has no kernel, `ConfigError` if the trainable has no `targets`.
    """
    if targets:
        table, trainable = trainable_of(document)
        if "targets" not in {key.name for key in keys_of(trainable.config)}:
            message = f"the trainable {trainable.name!r} has no key `targets`"
            raise ConfigError([Problem(where="--targets", message=message)])
        document = document.with_value(f"{table}.targets", list(targets), where="--targets")
    assembly = assemble(document, algorithm=False)
    assembly.services.get("trainable").attach(assembly.services.get("model"))
    return _served(assembly)


def _served(assembly: Assembly) -> list[ServedOp]:
    file, table = assembly.services.get("model_file"), assembly.services.get("kernels")
    formats = sorted({info.format for info in file.tensors.values() if len(info.shape) == 2})
    embedded = file.tensors["token_embd.weight"].format
    rows = []
    for op in OPS:
        wanted = ([embedded] if op == "embedding" else formats) if op in OPS_BY_FORMAT else [""]
        for format in wanted:
            kernel = table.serving(op, format)
            rows.append(ServedOp(op=op, format=format, variant=kernel.variant, fast=kernel.fast))
    return rows


def inspect_model(document: Document) -> dict[str, dict[str, Any]]:
    """Sections of facts, each a mapping of printable values."""
    assembly = assemble(document, algorithm=False)
    services = assembly.services
    file, spec = services.get("model_file"), services.get("architecture")
    tokenizer, template = services.get("tokenizer"), services.get("template")
    backend = services.get("backend")
    counts = Counter(info.format for info in file.tensors.values())
    return {
        "model": {
            "file": str(file.path),
            "name": file.metadata.get("general.name", ""),
            "architecture": file.architecture,
            "parameters": _parameters(file),
            "size": size(sum(info.bytes for info in file.tensors.values())),
            "tensor types": [f"{name} × {count}" for name, count in counts.most_common()],
        },
        "shape": {
            "blocks": spec.block_count,
            "width": spec.embedding_length,
            "feed-forward width": spec.feed_forward_length,
            "heads": f"{spec.head_count} query, {spec.head_count_kv} key/value, {spec.head_length} wide",
            "vocabulary": spec.vocabulary_size,
            "context length": spec.context_length,
            "sliding window": max((block.window for block in spec.blocks), default=0) or "none",
            "head": "shares the embedding" if spec.tied_head else "own matrix",
        },
        "LoRA targets": lora_targets(file),
        "tokenizer": {
            "model": file.metadata.get("tokenizer.ggml.model", ""),
            "pre": file.metadata.get("tokenizer.ggml.pre", "none"),
            "BOS": _token(tokenizer, tokenizer.bos_id) + ("" if tokenizer.adds_bos else " (not added)"),
            "stops at": [_token(tokenizer, token) for token in sorted(tokenizer.stop_ids)],
        },
        "chat": _chat(assembly, template),
        "device": {
            "backend": backend.name,
            "description": backend.device.description,
            "features": sorted(backend.device.features) or "none",
            "threads": backend.device.threads,
            "free memory": size(backend.device.memory_bytes),
        },
        "kernels": _kernels(assembly),
    }


def lora_targets(file: Any) -> dict[str, Any]:
    """Alias -> tensor pattern, count and format of the matrices that an adapter can be put on."""
    found: dict[str, list[Any]] = {}
    for name, info in file.tensors.items():
        if name.startswith("blk.") and len(info.shape) == 2:
            found.setdefault(name.split(".")[2], []).append(info)
    aliases = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o"}
    return {
        aliases.get(part, part): f"blk.*.{part}.weight × {len(infos)},"
        f" {infos[0].shape[1]} → {infos[0].shape[0]}, {'/'.join(sorted({i.format for i in infos}))}"
        for part, infos in found.items()
    }


def _chat(assembly: Assembly, template: Any) -> dict[str, Any]:
    from .tool_prompt import probe_template

    support = probe_template(template)
    in_model = "tokenizer.chat_template" in assembly.services.get("model_file").metadata
    return {
        "template": "in the model" if in_model else "none in the model: ChatML is used",
        "tools": "native" if support.tools else "written into the prompt",
        "tool-call format": assembly.services.get("chat_format").name,
    }


def _kernels(assembly: Assembly) -> dict[str, Any]:
    try:
        rows = _served(assembly)
    except KernelError as error:
        return {"missing": str(error)}
    return {
        f"{row.op} {row.format}".strip(): row.variant + ("" if row.fast else " (fallback)") for row in rows
    }


def _parameters(file: Any) -> str:
    count = 0
    for info in file.tensors.values():
        values = 1
        for extent in info.shape:
            values *= extent
        count += values
    return f"{count / 1e6:.1f} M"


def _token(tokenizer: Any, token: int | None) -> str:
    return "none" if token is None else f"{tokenizer.token_text(token)} ({token})"
