"""The error tree. Every error a user can meet derives from `RetrogradError`.

A message says what went wrong, where, the value seen, and what to do. The command line prints the
message alone; `--debug` adds the traceback.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs


class RetrogradError(Exception):
    """Base of all errors that retrograd raises on purpose.

    `exit_code` is what the command line returns: 1 for a run that failed, 2 for a mistake in the
    request (configuration, usage, data).
    """

    exit_code = 1


@attrs.frozen(kw_only=True)
class Problem:
    """One mistake in a configuration or data file.

    `where` is `file:line` (or `--set`, `Trainer(...)`), `key` the dotted key or "", `message` what
    is wrong with the value seen, `hint` how to mend it (nearest valid key, pip line) or "".
    """

    where: str
    key: str = ""
    message: str
    hint: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: {self.key}" if self.key else self.where
        return f"{place}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class _ProblemsError(RetrogradError):
    exit_code = 2

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        if isinstance(problems, str):
            problems = (Problem(where="retrograd", message=problems),)
        self.problems: tuple[Problem, ...] = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        head = f"{len(lines)} problems:\n  " if len(lines) > 1 else ""
        super().__init__(head + "\n  ".join(lines))


class ConfigError(_ProblemsError):
    """The configuration is refused; `problems` holds every mistake found, not only the first."""


class DataError(_ProblemsError):
    """A data file is refused; `problems` names `file:line` for each bad record."""


class PluginError(RetrogradError):
    """A plugin is missing, broken, or in conflict with another one."""

    exit_code = 2


class ModelError(RetrogradError):
    """A model file cannot be read, is damaged, or asks for something that is not supported."""


class TokenizerError(ModelError):
    """The tokenizer or chat template of a model cannot be reproduced exactly."""


class KernelError(RetrogradError):
    """No kernel serves an op, or a kernel failed."""


class TrainingError(RetrogradError):
    """Training cannot go on: non-finite loss, no memory, nothing to train."""


class CheckpointError(RetrogradError):
    """A checkpoint cannot be written, is damaged, or belongs to another run."""


class RolloutError(RetrogradError):
    """A rollout failed. Recorded as data, excluded and counted; never a reward of zero."""
