"""One run at a time writes an adapter, and one fills a checkpoint directory.

Two of them would replace each other's results and checkpoints without a word. The locks are those of the
operating system: they end with the process, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retrograd_hookspecs import ConfigError, Problem


def check_unused(output: Path, checkpoints: Path | None) -> None:
    """Raises `ConfigError` if a run that goes on writes the same result or checkpoints."""
    with contextlib.ExitStack() as held:
        for key, name, path in _places(output, checkpoints):
            with contextlib.suppress(OSError):
                held.enter_context(_locked(path, os.O_RDONLY, key, name))


@contextmanager
def sole_run(output: Path, checkpoints: Path | None) -> Iterator[None]:
    """Hold the result and the checkpoint directory (it is made). Raises `ConfigError` as `check_unused`."""
    with contextlib.ExitStack() as held:
        for key, name, path in _places(output, checkpoints):
            directory = path == checkpoints
            with contextlib.suppress(OSError):  # who writes there says why that is impossible
                (path if directory else path.parent).mkdir(parents=True, exist_ok=True)
                flags = os.O_RDONLY if directory else os.O_RDWR | os.O_CREAT
                held.enter_context(_locked(path, flags, key, name))
                if not directory:
                    held.callback(path.unlink, missing_ok=True)
        yield


def _places(output: Path, checkpoints: Path | None) -> Iterator[tuple[str, Path, Path]]:
    """Key, what it names, and the file or directory whose lock stands for it."""
    yield "output.path", output, output.with_name(f".{output.name}.lock")
    if checkpoints is not None:
        yield "checkpoint.directory", checkpoints, checkpoints


@contextmanager
def _locked(path: Path, flags: int, key: str, name: Path) -> Iterator[None]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        message = f"another run writes {name} now"
        hint = "each run needs its own; wait until that one ends, or give another"
        raise ConfigError([Problem(where="configuration", key=key, message=message, hint=hint)]) from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(descriptor)
