"""Stock llama.cpp for tests, through node-llama-cpp's prebuilt binary: no compiler is needed.

One node process serves a whole test session; it starts with the first request. Tokens go in as ids, so
that only the computation is compared and never the tokenizer, unless `tokenize` is what is tested. The
KV cache is float32 and flash attention is off, so that on an F32 model the logits agree to about 1e-4.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PACKAGES = ("node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1")
_SERVER = Path(__file__).with_name("server.mjs")


class LlamaCppError(AssertionError):
    """llama.cpp refused a model, an adapter or a request; the text is its own."""


class LlamaCpp:
    """A llama.cpp process. `node_dir` holds the `node_modules` with node-llama-cpp."""

    def __init__(self, node_dir: Path, *, threads: int = 2) -> None:
        self._node_dir = node_dir
        self._threads = threads
        self._process: subprocess.Popen[str] | None = None
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the process
        self.warnings: list[str] = []
        """What llama.cpp logged as a warning or an error during the last request."""

    def tokenize(self, model: Path, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Token ids of each text, no BOS added. `special`: names of special tokens become these tokens."""
        reply = self._request("tokenize", model=str(model), texts=list(texts), special=special)
        return [[int(token) for token in row] for row in reply["tokens"]]

    def detokenize(
        self, model: Path, sequences: Sequence[Sequence[int]], *, special: bool = True
    ) -> list[str]:
        """Text of each sequence of token ids."""
        rows = [[int(token) for token in row] for row in sequences]
        return [
            str(text)
            for text in self._request("detokenize", model=str(model), sequences=rows, special=special)[
                "texts"
            ]
        ]

    def info(self, model: Path) -> dict[str, Any]:
        """`bos`, `eos`, `eot` ids (None if there is none) and `addsBos`."""
        reply = self._request("info", model=str(model))
        return {key: reply.get(key) for key in ("bos", "eos", "eot", "addsBos")}

    def end_of_generation(self, model: Path, vocabulary_size: int) -> frozenset[int]:
        """Ids of the tokens that end a generation."""
        reply = self._request("endOfGeneration", model=str(model), count=vocabulary_size)
        return frozenset(int(token) for token in reply["tokens"])

    def logits(
        self, model: Path, tokens: Sequence[int], *, adapter: Path | None = None, scale: float = 1.0
    ) -> npt.NDArray[np.float32]:
        """Raw logits (T, V) after each of the T tokens, optionally with a LoRA adapter."""
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "logits.f32"
            reply = self._request(
                "logits",
                model=str(model),
                adapter=str(adapter) if adapter else None,
                scale=scale,
                tokens=[int(token) for token in tokens],
                threads=self._threads,
                out=str(out),
            )
            return np.fromfile(out, dtype="<f4").reshape(len(tokens), reply["vocabulary"])

    def next_token_logprobs(
        self, model: Path, tokens: Sequence[int], *, adapter: Path | None = None, scale: float = 1.0
    ) -> npt.NDArray[np.float64]:
        """Log-probabilities (T, V) of the token that follows each of the T tokens."""
        logits = self.logits(model, tokens, adapter=adapter, scale=scale).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits

    def greedy(
        self,
        model: Path,
        tokens: Sequence[int],
        count: int,
        *,
        adapter: Path | None = None,
        scale: float = 1.0,
    ) -> list[int]:
        """The `count` most likely tokens after `tokens`, one after another; EOS does not stop it."""
        reply = self._request(
            "greedy",
            model=str(model),
            adapter=str(adapter) if adapter else None,
            scale=scale,
            tokens=[int(token) for token in tokens],
            threads=self._threads,
            count=count,
        )
        return [int(token) for token in reply["tokens"]]

    def close(self) -> None:
        """End the process; may be called more than once."""
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _request(self, operation: str, **arguments: Any) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"operation": operation, **arguments}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            # A failed assertion inside llama.cpp aborts the process; the next request starts a new one.
            process.wait()
            self._process = None
            self._stderr.seek(0)
            tail = self._stderr.read()[-3000:]
            raise LlamaCppError(
                f"llama.cpp ended with status {process.returncode} during {operation}:\n{tail}"
            )
        reply: dict[str, Any] = json.loads(line)
        self.warnings = reply["warnings"]
        if "error" in reply:
            raise LlamaCppError("\n".join([reply["error"], *self.warnings]))
        return reply

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [node_program(), str(_SERVER)],
                cwd=self._node_dir,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                env={**os.environ, "LLAMACPP_THREADS": str(self._threads)},
            )
        return self._process


def node_program() -> str:
    """Path of node; a failure with the mend if there is none."""
    return _program("node")


def find_or_install(cache: Path) -> Path:
    """Directory with node-llama-cpp: RETROGRAD_NODE_LLAMA, or one under `cache`, installed on first use."""
    chosen = os.environ.get("RETROGRAD_NODE_LLAMA")
    if chosen:
        if not (Path(chosen) / "node_modules" / "node-llama-cpp").is_dir():
            raise LlamaCppError(
                f"RETROGRAD_NODE_LLAMA={chosen} has no node_modules/node-llama-cpp; install it there with"
                f" `npm install {' '.join(PACKAGES)} --ignore-scripts --omit=optional`, or unset the variable"
            )
        return Path(chosen)
    target = cache / "node-llama-cpp-3.22.1"
    if not target.is_dir():
        npm = _program("npm")
        cache.mkdir(parents=True, exist_ok=True)
        # Installed beside its final place and renamed, so that an interrupted installation is not used.
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            building = Path(scratch) / "install"
            building.mkdir()
            (building / "package.json").write_text('{"private": true}\n')
            command = [npm, "install", *PACKAGES, "--ignore-scripts", "--omit=optional", "--no-audit"]
            done = subprocess.run(command, cwd=building, capture_output=True, text=True, check=False)
            if done.returncode:
                raise LlamaCppError(f"`{' '.join(command)}` failed:\n{done.stderr[-3000:]}")
            building.rename(target)
    return target


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise LlamaCppError(
            f"{name} is not on the PATH: the comparison with stock llama.cpp needs Node.js 20 or newer."
            " Install it (Debian and Ubuntu: `apt install nodejs npm`; macOS: `brew install node`)"
        )
    return found
