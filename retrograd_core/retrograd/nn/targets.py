"""Which matrices of a model an adapter goes on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from retrograd_hookspecs import ModelError

from .model import CausalLM

ALIASES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "ffn_up": "ffn_up",
    "ffn_down": "ffn_down",
    "ffn_gate": "ffn_gate",
}
"""Alias -> part of the tensor's name."""
AUTO = "auto"
"""Every projection of every block."""

_EMBEDDING = ("token_embd", "token_embd.weight", "embed", "embed_tokens")
_HEAD = ("output", "output.weight", "head", "lm_head")


def resolve_targets(targets: Sequence[str], model: CausalLM) -> list[str]:
    """Names of the tensors that `targets` (aliases, patterns, `auto`) select, in the order of the model.

    Raises `ModelError` for a target that selects nothing or what cannot be adapted, with the candidates.
    """
    if not targets:
        raise ModelError(f"no target is given; candidates: {_candidates(model)}")
    chosen: set[str] = set()
    for target in targets:
        chosen.update(_matches(target, model))
    return [name for name in model.projections if name in chosen]


def _matches(target: str, model: CausalLM) -> list[str]:
    _refuse_embedding_and_head(target, model)
    names = model.projections
    if target == AUTO:
        return list(names)
    pattern = f"blk.*.{ALIASES[target]}.weight" if target in ALIASES else target
    found = [name for name in names if fnmatchcase(name, pattern)]
    if found:
        return found
    others = [name for name in model.file.tensors if fnmatchcase(name, pattern)]
    if others:
        raise ModelError(
            f"target {target!r} selects {_some(others)}: an adapter goes on projections only; candidates:"
            f" {_candidates(model)}"
        )
    close = difflib.get_close_matches(target, [*ALIASES, AUTO, *names], n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ModelError(
        f"target {target!r} selects no tensor of {model.file.path.name}{hint}; candidates:"
        f" {_candidates(model)}"
    )


def _refuse_embedding_and_head(target: str, model: CausalLM) -> None:
    tensors = model.file.tensors
    embeds = target in _EMBEDDING or fnmatchcase("token_embd.weight", target)
    if embeds or (target in _HEAD and model.spec.tied_head):
        tied = " and is also the output head of this model" if model.spec.tied_head else ""
        raise ModelError(
            f"target {target!r} selects token_embd.weight, which holds the token embeddings{tied}: llama.cpp"
            " applies adapters to products only, so it would have no effect on the lookup there; leave it out"
            f" (candidates: {_candidates(model)})"
        )
    if target in _HEAD or ("output.weight" in tensors and fnmatchcase("output.weight", target)):
        raise ModelError(
            f"target {target!r} selects output.weight, the output head: its gradient would need the full"
            f" logits, which never exist in training; leave it out (candidates: {_candidates(model)})"
        )


def _candidates(model: CausalLM) -> str:
    present = {name.split(".")[2] for name in model.projections}
    aliases = [alias for alias, part in ALIASES.items() if part in present]
    return f"{', '.join(aliases)}, {AUTO}, or patterns such as blk.*.attn_q.weight"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
