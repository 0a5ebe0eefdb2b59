"""`mcp.json` files, as Claude Desktop, Cursor, Copilot (`mcpServers`) and VS Code (`servers`) write them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from retrograd.agent.variables import expand
from retrograd.config import Document, structure
from retrograd.config.document import join_key
from retrograd.config.messages import show_typed
from retrograd_hookspecs import ConfigError, Problem

from .config import McpServer

_ROOTS = ("mcpServers", "servers")
_EDITOR_FOLDERS = frozenset({".vscode", ".cursor"})
_HTTP_TYPES = frozenset({"http", "streamable-http", "streamableHttp"})
_OWN_KEYS = frozenset(
    (
        *("allowed_tools", "denied_tools", "required", "stateless", "tool_timeout_secs"),
        *("max_tool_result_bytes", "env_passthrough"),
    )
)
"""Keys of `[[agent.mcp_servers]]` that an entry may have beside those of the format."""


def load_mcp_config(
    path: Path, environ: Mapping[str, str] | None = None
) -> tuple[tuple[McpServer, ...], tuple[str, ...]]:
    """The servers of an `mcp.json` file, and the names of those that it disables.

    `${VAR}`, `${env:VAR}`, `${VAR:-default}`, `${workspaceFolder}` and `${userHome}` are replaced once. Keys
    that only an editor reads are left alone.

    Args:
        environ: variables; those of this process by default.

    Raises:
        ConfigError: the file cannot be read, or anything in it is wrong, with every problem found.
    """
    return _Reader(path, os.environ if environ is None else environ).read()


class _Reader:
    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self._path = path
        self._environ = environ
        self._directory = path.absolute().parent
        in_editor_folder = self._directory.name in _EDITOR_FOLDERS
        self._folder = self._directory.parent if in_editor_folder else self._directory
        self._problems: list[Problem] = []

    def read(self) -> tuple[tuple[McpServer, ...], tuple[str, ...]]:
        content = self._content()
        roots = [root for root in _ROOTS if root in content]
        if not roots:
            self._problem("", "there is neither mcpServers nor servers", "one of them holds the servers")
        servers, disabled = [], []
        for root in roots:
            entries = content[root]
            if not isinstance(entries, Mapping):
                self._problem(root, f"expected a table of servers, got {show_typed(entries)}")
                continue
            for name, entry in entries.items():
                if not isinstance(entry, Mapping):
                    self._problem(join_key((root, name)), f"expected a table, got {show_typed(entry)}")
                elif entry.get("disabled") is True:
                    disabled.append(name)
                else:
                    server = self._server(root, name, entry)
                    servers += [server] if server is not None else []
        if self._problems:
            raise ConfigError(self._problems)
        return tuple(servers), tuple(disabled)

    def _content(self) -> Mapping[str, Any]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            self._refuse(f"cannot read the file: {error.strerror or error}")
        except json.JSONDecodeError as error:
            self._refuse(f"not JSON: {error.msg}", line=error.lineno)
        except UnicodeDecodeError:
            self._refuse("not UTF-8")
        if not isinstance(content, Mapping):
            self._refuse(f"expected a JSON object, got {show_typed(content)}")
        return content

    def _server(self, root: str, name: str, entry: Mapping[str, Any]) -> McpServer | None:
        before = len(self._problems)
        path = (root, name)
        values: dict[str, Any] = {key: entry[key] for key in _OWN_KEYS if key in entry}
        values["name"] = name
        kind = entry.get("type")
        if kind == "sse":
            self._problem(
                join_key((*path, "type")),
                "the old SSE transport is not supported",
                "ask the server for streamable HTTP; its address often ends with /mcp",
            )
        elif kind is not None and kind != "stdio" and kind not in _HTTP_TYPES:
            self._problem(join_key((*path, "type")), f"unknown transport {show_typed(kind)}", "stdio or http")
        if "url" in entry:
            values["url"] = self._text((*path, "url"), entry["url"])
            values["headers"] = self._texts((*path, "headers"), entry.get("headers") or {})
        if "command" in entry:
            args = entry.get("args") or []
            if not isinstance(args, list):
                self._problem(join_key((*path, "args")), f"expected an array, got {show_typed(args)}")
                args = []
            command = [self._text((*path, "command"), entry["command"])]
            values["command"] = [*command, *(self._text((*path, "args"), arg) for arg in args)]
            values["env"] = {
                **self._env_file((*path, "envFile"), entry.get("envFile")),
                **self._texts((*path, "env"), entry.get("env") or {}),
            }
            values["cwd"] = self._cwd((*path, "cwd"), entry.get("cwd"))
        if len(self._problems) > before:
            return None
        document = Document.from_values(
            {key: value for key, value in values.items() if value is not None},
            name=str(self._path),
            base_dir=self._directory,
        )
        server, problems = structure(McpServer, document.table(""))
        for problem in problems:
            self._problem(f"{join_key(path)}.{problem.key}", problem.message, problem.hint)
        return server

    def _text(self, path: tuple[str, ...], value: Any) -> str:
        if not isinstance(value, str):
            self._problem(join_key(path), f"expected a string, got {show_typed(value)}")
            return ""
        try:
            return expand(value, self._environ, self._folder)
        except ValueError as error:
            self._problem(join_key(path), str(error))
            return ""

    def _texts(self, path: tuple[str, ...], value: Any) -> dict[str, str]:
        if not isinstance(value, Mapping):
            self._problem(join_key(path), f"expected a table, got {show_typed(value)}")
            return {}
        return {
            name: self._text((*path, name), str(text) if isinstance(text, int | float) else text)
            for name, text in value.items()
        }

    def _cwd(self, path: tuple[str, ...], value: Any) -> str | None:
        return self._text(path, value) if value is not None else None

    def _env_file(self, path: tuple[str, ...], value: Any) -> dict[str, str]:
        if value is None:
            return {}
        from dotenv import dotenv_values

        file = self._directory / self._text(path, value)
        if not file.is_file():
            self._problem(join_key(path), f"there is no file {file}")
            return {}
        found = dotenv_values(file, interpolate=False, encoding="utf-8")
        return {name: text for name, text in found.items() if text is not None}

    def _problem(self, key: str, message: str, hint: str = "") -> None:
        self._problems.append(Problem(where=str(self._path), key=key, message=message, hint=hint))

    def _refuse(self, message: str, line: int = 0) -> NoReturn:
        where = f"{self._path}:{line}" if line else str(self._path)
        raise ConfigError([Problem(where=where, message=message)])
