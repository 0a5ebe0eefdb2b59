"""Tools that are programs inside the sandbox: `exec = {argv, script, protocol, timeout_secs}`."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import attrs

from retrograd_hookspecs import (
    ConfigError,
    ExecResult,
    Problem,
    RolloutError,
    Sandbox,
    StepResult,
    ToolDefinition,
    ToolSpec,
)

from .texts import MAX_RESULT_BYTES, cap_text, command_text

SCRIPT_MARK = "{script}"
_REPLY_KEYS = frozenset({"content", "is_error", "reward", "done"})
_SHOWN_CHARACTERS = 200


@attrs.frozen(kw_only=True)
class ProgramTool:
    """A program inside the sandbox, with the arguments of a call as one JSON object on stdin.

    `argv` may hold `{script}`, the path of `script` in the sandbox. The script is written before each call,
    so that a model that changes it changes nothing.
    """

    spec: ToolSpec
    argv: tuple[str, ...]
    label: str
    """`id@version`."""
    script: bytes | None = None
    script_name: str = ""
    protocol: Literal["text", "json"] = "text"
    timeout_secs: float | None = None

    @property
    def script_digest(self) -> str:
        """SHA-256 of the script; "" without one."""
        return hashlib.sha256(self.script).hexdigest() if self.script is not None else ""

    async def call(self, sandbox: Sandbox, arguments: Mapping[str, Any]) -> StepResult:
        """Run the program. Raises `RolloutError` for a reply that does not keep to the protocol."""
        argv = self.argv
        if self.script is not None:
            path = f"{sandbox.scratch}/tools/{self.script_digest[:12]}/{self.script_name}"
            try:
                await sandbox.write({path: self.script})
            except OSError as error:
                what = f"the tool {self.label} cannot be put into the sandbox: {error}"
                raise RolloutError(what) from error
            argv = tuple(part.replace(SCRIPT_MARK, path) for part in argv)
        given = json.dumps(arguments, ensure_ascii=False, sort_keys=True).encode()
        result = await sandbox.exec(argv, stdin=given, timeout_secs=self.timeout_secs)
        failed = result.exit_code != 0 or result.timed_out
        if self.protocol == "text" or failed:
            return StepResult(observation=command_text(result), is_error=failed)
        return self._reply(result)

    def _reply(self, result: ExecResult) -> StepResult:
        if result.truncated:
            self._broken("its reply is longer than the sandbox keeps of an output", result)
        try:
            reply = json.loads(result.stdout, parse_constant=_no_constant)
        except ValueError as error:
            self._broken(f"it did not print one JSON object: {error}", result)
        if not isinstance(reply, dict):
            self._broken("it printed JSON that is no object", result)
        unknown = sorted(set(reply) - _REPLY_KEYS)
        if unknown:
            self._broken(f"its reply has the unknown key {unknown[0]!r}", result)
        content, reward = reply.get("content"), reply.get("reward")
        if not isinstance(content, str):
            self._broken("its reply has no text as `content`", result)
        for name in ("is_error", "done"):
            if not isinstance(reply.get(name, False), bool):
                self._broken(f"`{name}` of its reply is neither true nor false", result)
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            self._broken("`reward` of its reply is no number", result)
        if reward is not None and not math.isfinite(reward):
            self._broken("`reward` of its reply is not finite", result)
        return StepResult(
            observation=cap_text(content, MAX_RESULT_BYTES),
            is_error=reply.get("is_error", False),
            reward=float(reward) if reward is not None else None,
            done=reply.get("done", False),
        )

    def _broken(self, what: str, result: ExecResult) -> NoReturn:
        shown = repr(result.stdout[:_SHOWN_CHARACTERS].decode("utf-8", errors="replace"))
        said = result.stderr[-_SHOWN_CHARACTERS:].decode("utf-8", errors="replace").strip()
        stderr = f"; stderr: {said!r}" if said else ""
        raise RolloutError(f"the tool {self.label} is broken: {what}; it printed {shown}{stderr}")


def load_program(definition: ToolDefinition) -> ProgramTool:
    """The tool of a definition with `exec`.

    Raises:
        ConfigError: its script cannot be read, or nothing says how to run it; keys are below the definition.
    """
    given = definition.exec or {}
    argv = tuple(given.get("argv") or ())
    path = Path(given["script"]) if given.get("script") else None
    script = _read(path) if path is not None else None
    uses_script = any(SCRIPT_MARK in part for part in argv)
    if script is None and uses_script:
        _refuse("exec.argv", f"holds {SCRIPT_MARK}, but there is no script", "give script")
    if script is not None and not uses_script:
        argv = (*(argv or _interpreter(script, path)), SCRIPT_MARK)
    return ProgramTool(
        spec=ToolSpec(
            name=definition.name or definition.id,
            description=definition.description,
            input_schema=definition.input_schema or {"type": "object", "properties": {}},
            version=definition.version,
        ),
        argv=argv,
        label=f"{definition.id}@{definition.version}",
        script=script,
        script_name=path.name if path is not None else "",
        protocol=given.get("protocol") or "text",
        timeout_secs=given.get("timeout_secs"),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        _refuse("exec.script", f"cannot read {path}: {error.strerror or error}", "check the path")


def _interpreter(script: bytes, path: Path | None) -> tuple[str, ...]:
    first = script.split(b"\n", 1)[0].decode("utf-8", errors="replace")
    words = shlex.split(first[2:]) if first.startswith("#!") else []
    if not words:
        _refuse(
            "exec.script",
            f"nothing says what runs {path}",
            'give argv, such as ["python3"], or begin the script with #!',
        )
    return tuple(words)


def _refuse(key: str, message: str, hint: str) -> NoReturn:
    raise ConfigError([Problem(where="", key=key, message=message, hint=hint)])


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
