"""The parts of retrograd as a run would assemble them, for the measured scripts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from retrograd.assembly import Assembly, assemble
from retrograd.config import Document

VERSIONS = ("retrograd", "numba", "llvmlite", "numpy")


@contextmanager
def assembled(
    model: str, *, tokens: int, threads: int, rank: int = 8, kernels: str = "auto"
) -> Iterator[Assembly]:
    """An SFT run with all defaults: LoRA on every projection, AdamW, passes of `tokens` tokens.

    The data file is only there to make the configuration complete; the scripts bring their own tokens.
    """
    with TemporaryDirectory(prefix="retrograd-benchmark-") as directory:
        data = Path(directory) / "unused.txt"
        data.write_text("unused\n")
        yield assemble(
            Document.from_values(
                {
                    "run": {"algorithm": "sft"},
                    "model": {"path": model, "device": "cpu"},
                    "lora": {"rank": rank, "alpha": 2.0 * rank},
                    "training": {"ctx": tokens, "micro_batch": tokens, "threads": threads},
                    "sft": {"data": str(data)},
                    "output": {"path": str(Path(directory) / "adapter.gguf")},
                    "plugin": {"cpu": {"kernels": kernels}},
                }
            )
        )
