"""Commands of third parties: found by their entry points, left out by a file, told from those of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrograd.cli import run

MODULE = """\
from pathlib import Path

import click

from retrograd.cli.document import open_document
from retrograd_hookspecs import Component, NoConfig, hookimpl


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
def greet(config):
    click.echo("hello " + open_document(config).get("who"))


@hookimpl
def retrograd_commands():
    return [Component(name="greet_file", config=NoConfig, build=lambda c, x: greet, summary="Greet.")]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a distribution `retrograd-greetings`, whose command `greet-file` opens a file."""
    (tmp_path / "retrograd_greetings.py").write_text(MODULE)
    install(tmp_path, "retrograd-greetings", "greet_file = retrograd_greetings")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, name: str, entry: str) -> None:
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[retrograd.commands]\n{entry}\n")


@pytest.mark.parametrize(
    ("disable", "word"),
    [
        ("", ""),
        ("commands.greet_file", "'commands.greet_file'"),
        ("retrograd-greetings", "'retrograd-greetings'"),
        ("commands.chat", ""),
    ],
)
def test_a_file_leaves_a_command_out(
    site: Path, capsys: pytest.CaptureFixture[str], disable: str, word: str
) -> None:
    path = site / "run.toml"
    path.write_text(f'who = "you"\n[plugins]\ndisable = ["{disable}"]\n')
    code = run(["greet-file", str(path)])
    shown = capsys.readouterr()
    if not word:
        assert (code, shown.out) == (0, "hello you\n")
    else:
        assert code == 2
        assert f"{path}:3: plugins.disable: {word} leaves out the command 'greet-file'" in shown.err


def test_a_name_that_two_offer_stops_no_other_command(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "retrograd-others", "greet_file = retrograd_others")
    (site / "run.toml").write_text('who = "you"\n')
    assert run(["greet-file", str(site / "run.toml")]) == 2
    said = capsys.readouterr().err
    assert "'greet-file' is offered by" in said
    assert "retrograd-greetings 1.0" in said
    assert "retrograd-others 1.0" in said
    assert run(["plugins", "list", "--kind", "commands"]) == 0
