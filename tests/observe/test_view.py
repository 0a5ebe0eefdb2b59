"""`retrograd view`: one directory, read only, on this machine."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrograd.observe import Observer
from retrograd.observe.page import Page
from retrograd.observe.server import HOST, ViewServer

from .examples import FACTS, decode, group, record_sums, rollout, until


@pytest.fixture
def directory(sums: Path, tmp_path: Path) -> Path:
    """A copy of the example that may be changed."""
    return Path(shutil.copytree(sums, tmp_path / "observe"))


@pytest.fixture
def server(directory: Path) -> Iterator[ViewServer]:
    made = ViewServer(directory)
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.close()
    thread.join()


def request(
    server: ViewServer, path: str, *, method: str = "GET", host: str | None = None
) -> tuple[int, bytes, str]:
    """Status, body and type; the path goes out as it is written here."""
    port = int(server.address.rstrip("/").rsplit(":", 1)[1])
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    connection.putrequest(method, path, skip_host=host is not None)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers.get("Content-Type", "")
    connection.close()
    return found


def test_the_files_of_a_run(server: ViewServer, directory: Path) -> None:
    for path, file, kind in (
        ("/", "index.html", "text/html; charset=utf-8"),
        ("/index.html", "index.html", "text/html; charset=utf-8"),
        ("/observe.jsonl", "observe.jsonl", "application/jsonl"),
        ("/observe-data/index.js?12", "observe-data/index.js", "text/javascript"),
        ("/observe-data/groups/0000/003.js?1", "observe-data/groups/0000/003.js", "text/javascript"),
    ):
        assert request(server, path) == (200, (directory / file).read_bytes(), kind)
    assert request(server, "/", method="HEAD")[:2] == (200, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/observe-data/../../secret.txt",
        "/observe-data/groups/%2e%2e/%2e%2e/%2e%2e/secret.js",
        "/..%2fsecret.txt",
        "//etc/passwd",
        "/notes.txt",
        "/observe-data/",
        "/observe-data/groups",
        "/observe-data/link.js",
        "/run-abc/../observe.jsonl",
        "/run-abc/",
        "/%00",
        "/index.html%0a",
        "/index.html/",
    ],
)
def test_nothing_else_is_served(server: ViewServer, directory: Path, path: str) -> None:
    for name in ("../secret.txt", "../secret.js", "notes.txt"):
        (directory / name).write_text("secret")
    (directory / "observe-data" / "link.js").symlink_to(directory.parent / "secret.js")
    status, body, _ = request(server, path)
    assert status == 404
    assert b"secret" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(server: ViewServer, method: str) -> None:
    assert request(server, "/observe.jsonl", method=method)[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example"])
def test_a_web_site_cannot_read_by_its_own_name(server: ViewServer, host: str) -> None:
    assert request(server, "/", host=host)[0] == 403


def test_only_this_machine_is_answered(server: ViewServer) -> None:
    assert server.address.startswith("http://127.0.0.1:")
    assert server._server.server_address[0] == "127.0.0.1"


def test_a_page_that_is_missing_is_made_elsewhere(sums: Path, tmp_path: Path) -> None:
    """Somebody kept the records only."""
    shutil.copy(sums / "observe.jsonl", tmp_path)
    server = ViewServer(tmp_path)
    page, index = server.find("/"), server.find("/observe-data/index.js")
    assert page is not None
    assert index is not None
    assert Page(tmp_path / "observe.jsonl", page.parent).is_complete()
    first = index.read_bytes()
    assert server.find("/observe-data/index.js") == index
    assert index.read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["observe.jsonl"]
    with server:
        pass
    assert not page.exists()


def test_a_run_that_goes_on_is_shown_from_its_own_page(tmp_path: Path) -> None:
    observer = Observer(tmp_path, FACTS, decode=decode, message=pytest.fail)
    observer.run(settings={})
    until(lambda: (tmp_path / "observe-data" / "index.js").exists())
    with (tmp_path / "observe.jsonl").open("ab") as file:  # as if it were in the middle of an update
        file.write(b'{"v":1,"kind":"prompt"}\n')
    with ViewServer(tmp_path) as server:
        assert server.find("/") == tmp_path.resolve() / "index.html"
    observer.close()


def test_runs_that_were_started_beside_each_other(tmp_path: Path) -> None:
    record_sums(tmp_path, 1, groups=1)
    record_sums(tmp_path / "run-0a1b2c3d", 1, groups=1)
    with ViewServer(tmp_path) as server:
        assert server.runs == [server.address, f"{server.address}run-0a1b2c3d/"]
        assert server.find("/run-0a1b2c3d/") == tmp_path.resolve() / "run-0a1b2c3d" / "index.html"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "retrograd", "view", *map(str, arguments)]


def test_the_command_serves_until_an_interrupt(sums: Path) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command(sums), stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    port = int(address.rstrip("/").rsplit(":", 1)[1])
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    connection.request("GET", "/observe-data/index.js")
    assert connection.getresponse().status == 200
    connection.close()
    again = subprocess.run(command(sums, "--port", port), capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert f"port {port} cannot be used" in again.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0


def test_a_directory_without_records_is_a_mistake(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "holds no observe.jsonl: give the directory of [observe]" in done.stderr


def test_a_group_name_needs_no_care(tmp_path: Path) -> None:
    """Files of the page are numbered: no name of a group reaches a path."""
    observer = Observer(tmp_path, FACTS, decode=decode, message=pytest.fail)
    observer.run(settings={})
    observer.update(1, [group("../../x\x00/é", [rollout("m", ["a"])])], {})
    observer.close()
    with ViewServer(tmp_path) as server:
        assert server.find("/observe-data/groups/0000/000.js") is not None
