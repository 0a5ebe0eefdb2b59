"""Who is measured: how to find out whether a contestant can run here, and how to start it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import attrs

from .cases import Case

PROBE_SECONDS = 180
"""Importing PyTorch from a cold disk can take a minute."""


@attrs.frozen(kw_only=True)
class Options:
    """What the command line settled, as contestants need it."""

    models: Mapping[str, Path]
    cache: Path
    threads: int
    steps: int
    warmup: int
    torch_python: str = ""
    """Interpreter with PyTorch and PEFT, or ""."""
    node_dir: Path | None = None
    """Directory whose `node_modules` has node-llama-cpp."""
    max_tokens: int = 0
    """Upper bound for generated tokens a sequence; 0 = as the case says."""

    def parameters(self, case: Case) -> dict[str, int | str]:
        """The case's parameters, shortened where `max_tokens` asks for it."""
        parameters = dict(case.parameters)
        if self.max_tokens and "tokens" in parameters:
            parameters["tokens"] = min(self.max_tokens, case.number("tokens"))
        return parameters


@attrs.frozen(kw_only=True)
class Contestant:
    """An implementation of some kinds of case; every run of it is a process of its own."""

    name: str
    title: str
    kinds: tuple[str, ...]
    problem: Callable[[Options], str]
    """Why it cannot run here, or ""."""
    command: Callable[[Case, Options], list[str]]
    prepare: Callable[[Case, Options], list[str] | None] = lambda _case, _options: None
    """Command that makes what the runs of a case need (a converted model), or None if it is there."""
    ours: bool = False
    """retrograd itself, which the ratios are of, as it is or with a setting."""
    accepts: Callable[[Case], bool] = lambda _case: True
    """Whether it takes this case of its kinds."""

    def runs(self, case: Case) -> bool:
        """Whether the case is for this contestant."""
        return case.kind in self.kinds and self.accepts(case)


def names_of_ours() -> tuple[str, ...]:
    """Names of the contestants that are retrograd, the one without settings first."""
    return tuple(contestant.name for contestant in all_contestants() if contestant.ours)


def all_contestants() -> tuple[Contestant, ...]:
    """Everyone, retrograd first."""
    return (
        Contestant(
            name="retrograd",
            title="retrograd",
            kinds=("sft", "prompt", "generate", "grpo"),
            problem=lambda _options: _modules_problem(sys.executable, ("retrograd", "retrograd_plugins")),
            command=_retrograd_command,
            ours=True,
        ),
        Contestant(
            name="retrograd-bf16",
            title='retrograd, kernels = "amx-bf16"',
            kinds=("sft", "grpo"),
            problem=_tiles_problem,
            command=lambda case, options: [*_retrograd_command(case, options), "--kernels", "amx-bf16"],
            ours=True,
        ),
        *(_torch(variant, title) for variant, title in TORCH_VARIANTS.items()),
        Contestant(
            name="llama.cpp",
            title="llama.cpp (node-llama-cpp's prebuilt binary)",
            kinds=("prompt", "generate"),
            problem=_node_problem,
            command=_llama_cpp_command,
        ),
        *(_trl(dtype) for dtype in ("float32", "bfloat16")),
        Contestant(
            name="numpy",
            title="Numba and NumPy",
            kinds=("bandwidth", "gemm"),
            problem=lambda _options: _modules_problem(sys.executable, ("numpy", "numba")),
            command=lambda case, options: _limits_command(sys.executable, case, options),
            accepts=lambda case: case.parameters.get("dtype") != "bfloat16",
        ),
        Contestant(
            name="torch",
            title="PyTorch",
            kinds=("gemm",),
            problem=lambda options: _torch_problem(options, ("torch",)),
            command=lambda case, options: _limits_command(options.torch_python, case, options),
        ),
    )


TORCH_VARIANTS: Mapping[str, str] = {
    "float32": "PyTorch + PEFT, float32",
    "autocast": "PyTorch + PEFT, bf16 autocast",
    "bf16": "PyTorch + PEFT, bf16 weights",
    "bf16-compiled": "PyTorch + PEFT, bf16 weights, torch.compile",
}


def select(contestants: Sequence[Contestant], patterns: Sequence[str]) -> tuple[Contestant, ...]:
    """Contestants whose name matches any pattern (shell wildcards), or all.

    Raises ValueError for a pattern that matches none.
    """
    names = [contestant.name for contestant in contestants]
    unmatched = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if unmatched:
        raise ValueError(f"no contestant matches {', '.join(unmatched)}; there are {', '.join(names)}")
    return tuple(c for c in contestants if not patterns or any(fnmatchcase(c.name, p) for p in patterns))


def default_torch_python() -> str:
    """This interpreter if PyTorch can be imported by it, else ""."""
    return "" if _modules_problem(sys.executable, ("torch",)) else sys.executable


def _torch(variant: str, title: str) -> Contestant:
    def problem(options: Options) -> str:
        missing = _torch_problem(options, ("torch", "transformers", "peft", "accelerate", "gguf"))
        if not missing and variant.endswith("compiled") and not _has_compiler():
            return "torch.compile needs a C++ compiler (CXX, g++ or clang++), and there is none"
        return missing

    def command(case: Case, options: Options) -> list[str]:
        return [
            options.torch_python,
            "-m",
            "benchmarks.torch_sft",
            *("--model", str(_converted(case, options))),
            *("--variant", variant),
            *_flags(case, options),
        ]

    return Contestant(
        name=f"torch-{variant}",
        title=title,
        kinds=("sft",),
        problem=problem,
        command=command,
        prepare=_convert,
    )


def _trl(dtype: str) -> Contestant:
    needed = ("torch", "transformers", "peft", "accelerate", "gguf", "trl", "datasets")

    def command(case: Case, options: Options) -> list[str]:
        return [
            options.torch_python,
            "-m",
            "benchmarks.trl_grpo",
            *("--model", str(_converted(case, options))),
            *("--dtype", dtype),
            *_flags(case, options),
        ]

    return Contestant(
        name=f"trl-{dtype}",
        title=f"TRL GRPOTrainer, {dtype}",
        kinds=("grpo",),
        problem=lambda options: _torch_problem(options, needed),
        command=command,
        prepare=_convert,
    )


def _converted(case: Case, options: Options) -> Path:
    gguf = options.models[case.model]
    # The size tells files of the same name apart, so that a replaced model is converted again.
    return options.cache / f"{case.model}-{gguf.stat().st_size}-float32"


def _convert(case: Case, options: Options) -> list[str] | None:
    target = _converted(case, options)
    if (target / "config.json").is_file():
        return None
    return [
        options.torch_python,
        "-m",
        "benchmarks.torch_convert",
        str(options.models[case.model]),
        str(target),
    ]


def _retrograd_command(case: Case, options: Options) -> list[str]:
    module = {"sft": "retrograd_sft", "grpo": "retrograd_grpo"}.get(case.kind, "retrograd_generate")
    return [
        sys.executable,
        "-m",
        f"benchmarks.{module}",
        *("--model", str(options.models[case.model])),
        *_flags(case, options),
    ]


def _limits_command(python: str, case: Case, options: Options) -> list[str]:
    return [python, "-m", "benchmarks.limits", "--kind", case.kind, *_flags(case, options)]


def _llama_cpp_command(case: Case, options: Options) -> list[str]:
    request = {
        "nodeDir": str(options.node_dir),
        "model": str(options.models[case.model]),
        "threads": options.threads,
        "steps": options.steps,
        "warmup": options.warmup,
        **options.parameters(case),
    }
    return ["node", str(Path(__file__).with_name("llama_cpp.mjs")), json.dumps(request)]


def _flags(case: Case, options: Options) -> list[str]:
    settings = options.parameters(case) | {
        "threads": options.threads,
        "steps": options.steps,
        "warmup": options.warmup,
    }
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def _torch_problem(options: Options, modules: tuple[str, ...]) -> str:
    if not options.torch_python:
        return "PyTorch is not importable here; give --torch-python PATH of an interpreter that has it"
    return _modules_problem(options.torch_python, modules)


def _node_problem(options: Options) -> str:
    if shutil.which("node") is None:
        return "node is not on the PATH"
    if options.node_dir is None:
        return (
            "give --node-dir DIR, where `npm install node-llama-cpp` was run"
            " (with --ignore-scripts nothing is compiled)"
        )
    package = options.node_dir / "node_modules" / "node-llama-cpp" / "package.json"
    return "" if package.is_file() else f"--node-dir {options.node_dir} has no node_modules/node-llama-cpp"


def _tiles_problem(_options: Options) -> str:
    missing = _modules_problem(sys.executable, ("retrograd", "retrograd_plugins"))
    if missing:
        return missing
    from retrograd_plugins.kernels.cpu._simd_features import usable_variants

    return "" if "amx" in usable_variants() else "this processor has no AMX, or the system refused it"


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)


@lru_cache
def _modules_problem(python: str, modules: tuple[str, ...]) -> str:
    """Why `python` cannot import one of `modules`, or ""."""
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n"
        "    except Exception as error: sys.exit(f'{name}: {error}')\n"
    )
    try:
        probe = subprocess.run(
            [python, "-c", script, *modules],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not run: {error}"
    if probe.returncode == 0:
        return ""
    reason = probe.stderr.strip().splitlines()[-1:] or [f"status {probe.returncode}"]
    return f"{python} cannot import {reason[0]}"
