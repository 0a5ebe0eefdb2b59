"""Loading plugins: what works, and what is said about each kind of mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from retrograd.assembly import usable
from retrograd.errors import PluginError
from retrograd.plugins import Catalogue, PluginEntry, PluginSession
from retrograd.plugins.session import check_requirements
from retrograd_hookspecs import KINDS, hookimpl

Make = Callable[..., PluginSession]


def test_only_what_is_asked_for_is_imported(extras: None, session: Make) -> None:
    sys.modules.pop("retrograd_extras.focal", None)
    made = session()
    assert made.has("losses", "focal")
    assert "retrograd_extras.focal" not in sys.modules
    registered = made.component("losses", "focal")
    assert "retrograd_extras.focal" in sys.modules
    assert (registered.distribution, registered.version) == ("retrograd-extras", "0.1.0")


def test_a_component_is_registered_once(extras: None, session: Make) -> None:
    made = session()
    assert made.component("optimizers", "lion") is made.component("optimizers", "lion")


def test_two_sessions_do_not_share_plugins(session: Make) -> None:
    class Local:
        @hookimpl
        def retrograd_step_finished(self, run: object, report: object) -> None:
            raise AssertionError("called from another session")

    first, second = session(), session()
    first.register(Local(), "local")
    second.hook.retrograd_step_finished(run=None, report=None)


def test_unknown_name_lists_what_is_installed_and_the_pip_line(session: Make) -> None:
    with pytest.raises(PluginError) as caught:
        session().component("optimizers", "adamm")
    message = str(caught.value)
    assert "no optimizer 'adamm' is installed" in message
    assert "did you mean 'adamw'?" in message
    assert "installed: adamw, sgd" in message
    assert "pip install" not in message  # a typing mistake must not become an installation


def test_a_name_like_no_other_gets_the_likely_pip_line(session: Make) -> None:
    with pytest.raises(PluginError, match="pip install retrograd-optimizer-prodigy-plus`"):
        session().component("optimizers", "prodigy_plus")


@pytest.mark.parametrize(
    ("kind", "name"), [("algorithms", "preference"), ("trainables", "full"), ("backends", "cuda")]
)
def test_what_is_still_to_come_is_said_to_be(session: Make, kind: str, name: str) -> None:
    with pytest.raises(PluginError, match="not in this version of retrograd yet"):
        session().component(kind, name)


def test_a_misspelt_hook_in_a_local_file_is_one_mistake(tmp_path: Path, session: Make) -> None:
    path = tmp_path / "my_hooks.py"
    path.write_text(
        "from retrograd_hookspecs import hookimpl\n@hookimpl\ndef retrograd_step_finnished(run): ...\n"
    )
    made = session()
    with pytest.raises(PluginError, match="did you mean 'retrograd_step_finished'"):
        made.load_file(path)
    assert made.component("optimizers", "sgd").component.name == "sgd"


def test_a_hook_that_raises_names_its_line(tmp_path: Path, session: Make) -> None:
    path = tmp_path / "my_hooks.py"
    path.write_text(
        "from retrograd_hookspecs import hookimpl\n@hookimpl\n"
        "def retrograd_step_finished(report):\n    report['x']\n"
    )
    made = session()
    made.load_file(path)
    with pytest.raises(PluginError, match=r"KeyError: 'x' \(.*my_hooks.py:4\)"):
        made.call("retrograd_step_finished", run=None, report={})


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("optimizers", "raises_on_import", ["failed to import", "this plugin cannot be imported"]),
        ("optimizers", "misnamed", ["registers no component called 'misnamed'", "missnamed"]),
        ("losses", "wrong_type", ["must return a list of retrograd_hookspecs.Component", "dict"]),
        ("losses", "raises_in_hook", ["retrograd_losses() raised KeyError", "no loss today"]),
        ("sinks", "needs_a_package", ["a_package_that_does_not_exist", "pip install"]),
        (
            "sinks",
            "misspelt_hook",
            ["retrograd_step_finnished", "did you mean 'retrograd_step_finished'?"],
        ),
        ("optimizers", "adamw", ["offered by retrograd 0", "retrograd-broken 0.0.1", "disable"]),
    ],
)
def test_a_broken_plugin_is_named(
    broken: None, session: Make, kind: str, name: str, words: list[str]
) -> None:
    with pytest.raises(PluginError) as caught:
        usable(session(), kind, name)
    for word in ["retrograd", *words]:
        assert word in str(caught.value)
    assert "broken" in str(caught.value)


def test_a_conflict_is_settled_by_disable(broken: None, session: Make) -> None:
    made = session(("retrograd-broken",))
    assert made.component("optimizers", "adamw").distribution == "retrograd"
    made = session(("optimizers.raises_on_import",))
    assert not made.has("optimizers", "raises_on_import")


def test_disable_of_nothing_is_an_error() -> None:
    with pytest.raises(PluginError, match="nothing installed is called 'retrograd-brokn'"):
        Catalogue.of(
            [PluginEntry(kind="losses", name="x", module="m", distribution="retrograd-broken", version="1")],
            ["retrograd-brokn"],
        )


def test_local_file(tmp_path: Path, session: Make) -> None:
    path = tmp_path / "my_hooks.py"
    path.write_text(
        "from retrograd_hookspecs import Component, NoConfig, hookimpl\n"
        "@hookimpl\n"
        "def retrograd_schedules():\n"
        "    return [Component(name='mine', config=NoConfig, build=lambda c, x: 3, summary='')]\n"
    )
    made = session()
    made.load_file(path)
    assert made.component("schedules", "mine").distribution == str(path)


def test_local_file_that_is_missing_or_fails(tmp_path: Path, session: Make) -> None:
    with pytest.raises(PluginError, match="there is no file"):
        session().load_file(tmp_path / "absent.py")
    path = tmp_path / "fails.py"
    path.write_text("1 / 0\n")
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        session().load_file(path)


def test_a_frozen_session_takes_no_more(extras: None, session: Make) -> None:
    made = session()
    made.freeze()
    with pytest.raises(PluginError, match="assembled"):
        made.component("optimizers", "lion")


def test_requirements() -> None:
    assert check_requirements(["pluggy>=1"]) == []
    [message] = check_requirements(["pluggy>=999"])
    assert "is installed" in message
    assert "pip install 'pluggy>=999'" in message
    [message] = check_requirements(["retrograd-env-nothing"])
    assert "is not installed" in message
    [message] = check_requirements(["not a requirement!"])
    assert "is not a requirement" in message


def test_every_kind_has_a_hook_specification(session: Make) -> None:
    hook = session().hook
    for kind in KINDS.values():
        assert hasattr(hook, kind.hook)
