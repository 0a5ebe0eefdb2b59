"""Serves recorded runs to a browser on this machine, and nothing else."""

from __future__ import annotations

import re
import shutil
import tempfile
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

from .journal import FILE, is_recording
from .page import DATA, INDEX, PAGE, Page

HOST = "127.0.0.1"
_FILES = re.compile(rf"/(?P<run>run-[0-9a-f]+/)?(?P<file>|{PAGE}|{FILE}|{DATA}/(\w|[/-])+\.js)", re.ASCII)
_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".jsonl": "application/jsonl"}


class ViewServer:
    """A server for a directory of `[observe]`, read only, on loopback.

    Of a run whose page is missing or not complete, and that nobody records now, the page is made in a
    temporary directory.
    """

    def __init__(self, directory: Path, port: int = 0) -> None:
        """Raises `OSError` if the port is taken."""
        self.directory = directory.resolve()
        self._pages: dict[str, Page] = {}
        self._lock = Lock()
        self._temporary: list[Path] = []
        self._server = ThreadingHTTPServer((HOST, port), partial(_Handler, self))
        self._server.daemon_threads = True

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self._server.server_port}/"

    @property
    def runs(self) -> list[str]:
        """Addresses of all recorded runs: that of the directory, and of runs that were started beside it."""
        found = [self.directory, *sorted(self.directory.glob("run-*"))]
        names = [path.relative_to(self.directory).as_posix() for path in found if (path / FILE).is_file()]
        return [self.address if name == "." else f"{self.address}{name}/" for name in names]

    def serve(self) -> None:
        """Answer until `close`, or until an interrupt."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop and remove temporary pages; may be called more than once. Not from within `serve`."""
        self._server.shutdown()
        self._release()

    def __enter__(self) -> ViewServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        self._server.server_close()
        for path in self._temporary:
            shutil.rmtree(path, ignore_errors=True)
        self._temporary.clear()

    def find(self, path: str) -> Path | None:
        """The file of a request, None for everything that is not part of a recorded run."""
        match = _FILES.fullmatch(path)
        if match is None:
            return None
        run, name = match["run"] or "", match["file"] or PAGE
        root = self.directory / run
        journal = root / FILE
        if not journal.is_file():
            return None
        if name != FILE:
            root = self._page(run, journal, refresh=name == f"{DATA}/{INDEX}")
        file = root / name
        if not file.is_file() or not file.resolve().is_relative_to(root.resolve()):
            return None
        return file

    def _page(self, run: str, journal: Path, *, refresh: bool) -> Path:
        """The directory that holds the page of a run."""
        with self._lock:
            if run not in self._pages:
                own = Page(journal)
                if not own.is_complete() and not is_recording(journal):
                    temporary = Path(tempfile.mkdtemp(prefix="retrograd-view-"))
                    self._temporary.append(temporary)
                    own = Page(journal, temporary)
                    own.catch_up()
                self._pages[run] = own
            page = self._pages[run]
            if refresh and page.directory in self._temporary:
                page.catch_up()
            return page.directory


class _Handler(BaseHTTPRequestHandler):
    """Reads only; no listings."""

    protocol_version = "HTTP/1.1"

    def __init__(self, view: ViewServer, *arguments: Any) -> None:
        self._view = view
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        # A name that resolves to loopback must not let a web site read what models wrote.
        name = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if name not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, "only requests to this machine's own address are answered")
            return
        try:
            file = self._view.find(unquote(urlsplit(self.path).path))
            if file is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            with file.open("rb") as source:
                size = source.seek(0, 2)
                source.seek(0)
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", _TYPES.get(file.suffix, "application/octet-stream"))
                self.send_header("Content-Length", str(size))
                self.send_header("Cache-Control", "no-cache")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                if with_body:
                    while size > 0 and (part := source.read(min(size, 1 << 20))):
                        self.wfile.write(part)
                        size -= len(part)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except OSError as error:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, error.strerror)
