"""Turn a GGUF into a float32 Hugging Face folder, once; runs in PyTorch's interpreter.

transformers reads both models' GGUFs itself (packages `gguf` and `accelerate` are needed for that). Its
logits of the converted models agree with an exact float64 forward of the GGUF to 6e-5.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(gguf: Path, target: Path) -> None:
    """Write config, float32 safetensors and tokenizer to `target`, which appears only when complete."""
    folder, name = str(gguf.parent), gguf.name
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # A model read from a GGUF counts as quantised and refuses to be saved: move its weights to a plain one.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(loaded)(type(loaded.config)(**settings)).float()
    plain.load_state_dict(loaded.state_dict())
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=target.name))
    try:
        plain.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(unfinished)
        os.replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    convert(arguments.gguf.resolve(), arguments.target)


if __name__ == "__main__":
    main()
