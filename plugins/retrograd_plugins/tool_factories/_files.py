"""What tools that handle files share: reading and writing text, with fixed words for what goes wrong."""

from __future__ import annotations

import codecs
import errno

from retrograd.agent.tools import ToolFault
from retrograd_hookspecs import Sandbox

MOST_BYTES = 16 * 1024 * 1024
"""Largest file that is read whole."""

_REASONS = {
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOENT: "there is no such file",
    errno.EISDIR: "it is a directory",
    errno.ENOTDIR: "a part of the path is a file",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOSPC: "no space is left",
    errno.EDQUOT: "no space is left",
    errno.EFBIG: "it is too large",
    errno.EROFS: "the file system is read-only",
    errno.ELOOP: "too many symbolic links",
}
_CLASSES = (
    (FileNotFoundError, errno.ENOENT),
    (IsADirectoryError, errno.EISDIR),
    (NotADirectoryError, errno.ENOTDIR),
    (PermissionError, errno.EACCES),
)


def checked_path(path: str) -> str:
    """A path that can be one. Raises `ToolFault`."""
    if not path or "\0" in path:
        raise ToolFault("path must be the name of a file")
    return path


async def read_bytes(sandbox: Sandbox, path: str, limit: int = MOST_BYTES) -> bytes:
    """A file, at most `limit` bytes. Raises `ToolFault`."""
    try:
        return await sandbox.read(path, limit=limit)
    except OSError as error:
        raise ToolFault(f"{path} cannot be read: {_reason(error)}") from error


async def read_text(sandbox: Sandbox, path: str) -> str:
    """A whole text file. Raises `ToolFault`."""
    data = await read_bytes(sandbox, path, MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ToolFault(f"{path} is larger than {MOST_BYTES} bytes")
    return as_text(data, path)


def as_text(data: bytes, path: str, *, cut: bool = False) -> str:
    """Text of a file; `cut` if it goes on, so that a character may be cut at the end. Raises `ToolFault`."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=not cut)
    except UnicodeDecodeError as error:
        raise ToolFault(f"{path} is not a text file in UTF-8") from error


async def write_text(sandbox: Sandbox, path: str, text: str) -> int:
    """Write a file; its size in bytes. Raises `ToolFault`."""
    data = text.encode("utf-8")
    try:
        await sandbox.write({path: data})
    except OSError as error:
        raise ToolFault(f"{path} cannot be written: {_reason(error)}") from error
    return len(data)


def _reason(error: OSError) -> str:
    """Always the same words, whatever system the sandbox has."""
    number = error.errno
    if number is None:
        number = next((code for kind, code in _CLASSES if isinstance(error, kind)), None)
    return _REASONS.get(number or 0, "the system refused it")
