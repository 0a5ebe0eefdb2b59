"""Verification out of the reach of what the model left behind.

Before `verify` runs,

1. every process is killed, and every file outside the working directory deleted: a patched home, a program on
   the path, a server in the background;
2. what setup had installed outside the working directory is put back from a copy that was taken before the
   model's first turn;
3. protected files (the tests, and what decides how tests are run) are brought back to what they were at the
   start: changed and deleted ones are written anew, those that were added are removed;
4. the files of `verify.files`, which the model has never seen, are written.

The reward is the exit code, read by this process. Code of the model that the command itself runs can still
end it with exit code 0: a command that checks what its tests report is harder to deceive.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import attrs

from retrograd.agent.tools import command_text
from retrograd_hookspecs import RolloutError, Sandbox, Score

from ._sandboxed_tasks import Task, Verify, protects

WORK, OUTSIDE = "/work", "/tmp"
MAX_COPY_BYTES = 256 << 20
"""Most that setup may leave outside the working directory, and most that is protected in it."""
_MAX_LISTING_BYTES = 32 << 20
_LIST = r"""
cd "$1" || exit 1
find . ! -name . \( -type f -o -type l \) -print0
"""
_TAKE_AWAY = r"""
cd "$1" || exit 1
shift
for path in "$@"; do
  above=$path
  while :; do
    case $above in */*) above=${above%/*} ;; *) break ;; esac
    if [ -h "$above" ] || { [ -e "$above" ] && [ ! -d "$above" ]; }; then rm -f "$above" || exit 1; fi
    [ -d "$above" ] && chmod u+rwx "$above"
  done
  rm -rf "$path" || exit 1
done
"""
"""Removes paths, and what stands where their directories should be: links lead elsewhere."""
_BATCH = 500


@attrs.frozen(kw_only=True)
class Verifier:
    """What is needed to verify a trajectory, taken before the model acts.

    `protected` are paths in the working directory, `copy` is a tar of them and `outside` one of what is
    outside; None for nothing. `written` are the files of a scenario without setup instead. `given` are all
    paths that the scenario came with: one that is missing was deleted by the model.
    """

    verify: Verify
    protected: tuple[str, ...]
    written: dict[str, bytes]
    copy: bytes | None
    outside: bytes | None
    given: frozenset[str]

    @classmethod
    async def after_setup(cls, sandbox: Sandbox, task: Task, verify: Verify) -> Verifier:
        """Take copies. Raises: `RolloutError` if they would be too large."""
        matches, given = protects(verify.protect), frozenset(task.files)
        if not task.setup:
            written = {path: data for path, data in task.files.items() if matches(path)}
            return cls(
                verify=verify,
                protected=tuple(written),
                written=written,
                copy=None,
                outside=None,
                given=given,
            )
        protected = tuple(path for path in await _files(sandbox, WORK) if matches(path))
        copy = await _tar(sandbox, WORK, protected) if protected else None
        outside = await _tar(sandbox, OUTSIDE, ["."]) if await _files(sandbox, OUTSIDE) else None
        return cls(verify=verify, protected=protected, written={}, copy=copy, outside=outside, given=given)

    async def verify_in(self, sandbox: Sandbox, timeout_secs: float | None) -> Score:
        """Run the command; its score. Raises: `RolloutError` if it cannot be run."""
        command = self.verify.command
        try:
            await self._restore(sandbox)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return Score(kind="value", value=0.0, explanation="the disk is full: verify has no room")
            raise RolloutError(f"a file could not be written: {error}") from error
        limit = float("inf") if timeout_secs is None else timeout_secs
        result = await sandbox.exec(command, timeout_secs=limit)
        if not result.timed_out and result.exit_code in (126, 127):
            found = await sandbox.exec(["sh", "-c", 'command -v "$1"', "sh", command[0]])
            # In a line of the shell, the program that is missing may be any.
            is_missing = found.exit_code != 0 or command[:2] == ("sh", "-c")
            if is_missing and command[0].removeprefix("./") not in self.given:
                raise RolloutError(f"its program is missing: {command_text(result)[-500:]}")
        success = result.exit_code == 0 and not result.timed_out
        return Score(
            kind="value",
            value=self.verify.reward_on_success if success else 0.0,
            explanation=command_text(result, 2000),
        )

    async def _restore(self, sandbox: Sandbox) -> None:
        await sandbox.clear(keep=(WORK,))
        if self.outside is not None:
            await _untar(sandbox, OUTSIDE, self.outside)
        matches = protects(self.verify.protect)
        present = [path for path in await _files(sandbox, WORK) if matches(path)]
        stale = sorted({*present, *self.protected, *self.verify.files})
        for start in range(0, len(stale), _BATCH):
            batch = stale[start : start + _BATCH]
            result = await sandbox.exec(["sh", "-c", _TAKE_AWAY, "sh", WORK, *batch])
            if result.exit_code:
                raise RolloutError(f"protected files could not be removed: {command_text(result)[-500:]}")
        if self.copy is not None:
            await _untar(sandbox, WORK, self.copy)
        await sandbox.write({**self.written, **self.verify.files})


async def _files(sandbox: Sandbox, directory: str) -> list[str]:
    """Files and links below a directory, relative to it, sorted."""
    result = await sandbox.exec(
        ["sh", "-c", _LIST, "sh", directory], max_output_bytes=_MAX_LISTING_BYTES, timeout_secs=60
    )
    if result.truncated or result.timed_out:
        raise RolloutError(f"there are too many files in {directory}")
    names = result.stdout.decode("utf-8", "surrogateescape").split("\0")
    return sorted(name.removeprefix("./") for name in names if name)


async def _tar(sandbox: Sandbox, directory: str, paths: Sequence[str]) -> bytes:
    # A name with a line break cannot be listed; the prefix keeps one from being read as an option.
    lines = (f"./{path}\n" for path in paths if "\n" not in path)
    names = "".join(lines).encode("utf-8", "surrogateescape")
    result = await sandbox.exec(
        ["tar", "-cf", "-", "-C", directory, "-T", "-"],
        stdin=names,
        max_output_bytes=MAX_COPY_BYTES,
        timeout_secs=300,
    )
    if result.truncated:
        raise RolloutError(
            f"setup leaves more than {MAX_COPY_BYTES >> 20} MiB in {directory} that verify needs; have it in"
            " the image, or in the package cache"
        )
    if result.exit_code:
        raise RolloutError(f"files of setup could not be copied: {command_text(result)[-500:]}")
    return result.stdout


async def _untar(sandbox: Sandbox, directory: str, data: bytes) -> None:
    result = await sandbox.exec(["tar", "-xf", "-", "-C", directory], stdin=data, timeout_secs=300)
    if result.exit_code:
        if b"No space left" in result.stderr:
            raise OSError(errno.ENOSPC, "No space left on device", directory)
        raise RolloutError(f"files of setup could not be put back: {command_text(result)[-500:]}")
