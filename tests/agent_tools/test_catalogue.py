"""Definitions from plugins, files and configurations: what is in a toolset, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrograd.agent.tools import ToolCatalogue, Tools
from retrograd.agent.tools.config import BuiltinEntry, ExecEntry, ToolEntry, ToolsetEntry
from retrograd.config import load_document, read_table
from retrograd_hookspecs import ConfigError, ToolDefinition, ToolsetDefinition

from .support import catalogue

PROGRAM = ExecEntry(argv=("true",))


def tool(id: str, version: str = "1", **more: Any) -> ToolEntry:
    """A tool that is a program."""
    return ToolEntry(id=id, version=version, description="Does it.", exec=PROGRAM, **more)


def load(path: Path, text: str) -> ToolCatalogue:
    """The catalogue of a file that holds the keys of `[agent.environment.tools]`."""
    path.write_text(text)
    table = load_document(path).table("agent.environment.tools")
    read = read_table(Tools, table)
    assert read.value is not None, read.problems
    return catalogue(read.value, table)


def problems(path: Path, text: str) -> list[str]:
    """The messages that a file is refused with, its directory left out."""
    with pytest.raises(ConfigError) as refused:
        load(path, text)
    return [str(problem).replace(f"{path.parent}/", "") for problem in refused.value.problems]


def labels(found: ToolCatalogue, name: str) -> list[str]:
    """`id@version` of the tools of a toolset."""
    return [entry.label for entry in found.entries(name)]


def test_tools_are_named_in_python_by_their_default() -> None:
    assert Tools("python").default == "python"
    assert Tools("rust", files=(Path("tools.toml"),)).files == (Path("tools.toml"),)


def test_a_toolset_is_included_then_replaced_then_denied() -> None:
    found = catalogue(
        Tools(
            "mine",
            tool=(tool("bash", "2"), tool("other", name="grep"), tool("last")),
            toolset={
                "mine": ToolsetEntry(
                    include=("base",), tools=("bash", "other@1", "last"), deny=("*_file", "submit")
                )
            },
        )
    )
    assert labels(found, "mine") == ["bash@2", "list_dir@1", "other@1", "last@1"]
    assert [spec.name for spec in found.specs()["mine"]] == ["bash", "list_dir", "grep", "last"]
    assert [t.spec.version for t in found.tools_of()] == ["2", "1", "1", "1"]


def test_no_version_means_the_newest() -> None:
    entries = tuple(tool("t", version) for version in ("1.10", "1.9", "2.0rc1", "1"))
    toolsets = {
        "newest": ToolsetEntry(tools=("t",)),
        "old": ToolsetEntry(tools=("t@1.9",)),
    }
    found = catalogue(Tools("newest", scenario_toolsets=("old",), tool=entries, toolset=toolsets))
    assert (labels(found, "newest"), labels(found, "old")) == (["t@2.0rc1"], ["t@1.9"])
    without = catalogue(Tools("newest", tool=entries[:2], toolset=toolsets))
    assert labels(without, "newest") == ["t@1.10"]


def test_builtin_tools_take_parameters_and_other_words(tmp_path: Path) -> None:
    found = load(
        tmp_path / "run.toml",
        """
        [agent.environment.tools]
        default = "mine"
        [[agent.environment.tools.tool]]
        id = "shell"
        version = "1"
        description = "Only for short commands."
        builtin = { factory = "bash", params = { timeout_secs = 2, max_output_bytes = 300 } }
        [agent.environment.tools.toolset.mine]
        tools = ["shell"]
        """,
    )
    [entry] = found.entries("mine")
    assert entry.spec.description == "Only for short commands."
    assert entry.spec.input_schema["required"] == ["command"]
    assert entry.origin == f"{tmp_path}/run.toml:4"


def test_every_mistake_is_reported_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text(
        """
        [[tool]]
        id = "twice"
        version = "1"
        description = "One."
        exec = { argv = ["true"] }
        [[tool]]
        id = "typo"
        version = "1"
        descripton = "One."
        exec = { argv = ["true"] }
        [toolset.python]
        tools = ["bash"]
        [toolset.loop]
        include = ["around"]
        [toolset.around]
        include = ["loop"]
        """
    )
    found = problems(
        tmp_path / "run.toml",
        """
        [agent.environment.tools]
        default = "pyton"
        scenario_toolsets = ["mine", "mine"]
        files = ["more.toml", "none.toml"]
        [[agent.environment.tools.tool]]
        id = "twice"
        version = "1.0"
        description = "Two."
        exec = { argv = ["true"] }
        [[agent.environment.tools.tool]]
        id = "wrong"
        version = "newest"
        exec = { argv = ["true"] }
        [[agent.environment.tools.tool]]
        id = "speechless"
        version = "1"
        exec = { argv = ["run", "{script}"] }
        [[agent.environment.tools.tool]]
        id = "scripted"
        version = "1"
        description = "Runs a script."
        exec = { script = "none.py" }
        [[agent.environment.tools.tool]]
        id = "built"
        version = "1"
        builtin = { factory = "bahs" }
        [[agent.environment.tools.tool]]
        id = "tuned"
        version = "1"
        builtin = { factory = "bash", params = { timeout = 3 } }
        [[agent.environment.tools.tool]]
        id = "schema"
        version = "1"
        description = "Has a wrong schema."
        input_schema = { type = "object", properties = { a = { type = "text" } } }
        exec = { argv = ["true"] }
        [[agent.environment.tools.tool]]
        id = "dot.ted"
        version = "1"
        description = "Cannot be called."
        exec = { argv = ["true"] }
        [agent.environment.tools.toolset.mine]
        include = ["bas"]
        tools = ["gerp", "bash@3", "run_tests", "typo", "wrong"]
        """,
    )
    expected = [
        ("more.toml:10", "tool[1].descripton", "unknown key (did you mean description?)"),
        ("more.toml:12", "toolset.python", "the toolset 'python' is defined already, by toolset 'python' of"),
        ("more.toml:17", "toolset.around.include[0]", "toolsets include each other: loop -> around -> loop"),
        ("none.toml", "", "cannot read the configuration"),
        ("run.toml:3", "default", "there is no toolset 'pyton' (did you mean python?)"),
        ("run.toml:4", "scenario_toolsets[1]", "the toolset 'mine' is named already"),
        ("run.toml:6", "tool[0]", "twice@1.0 is defined already, by more.toml:2"),
        ("run.toml:11", "tool[1].version", "'newest' is not a version"),
        ("run.toml:15", "tool[2].description", "required key is missing"),
        ("run.toml:15", "tool[2].exec.argv", "holds {script}, but there is no script"),
        ("run.toml:19", "tool[3].exec.script", "cannot read none.py: No such file"),
        ("run.toml:24", "tool[4].builtin.factory", "did you mean"),
        ("run.toml:28", "tool[5].builtin.params.timeout", "unknown key (did you mean timeout_secs?)"),
        ("run.toml:32", "tool[6].input_schema", "is no JSON Schema at properties.a.type: 'text'"),
        ("run.toml:38", "tool[7].name", "'dot.ted' cannot be called by a model"),
        ("run.toml:44", "toolset.mine.include[0]", "there is no toolset 'bas' (did you mean base?)"),
        ("run.toml:45", "toolset.mine.tools[0]", "there is no tool 'gerp' (did you mean grep?)"),
        ("run.toml:45", "toolset.mine.tools[1]", "there is no bash@3 (versions of bash: 1)"),
        ("run.toml:45", "toolset.mine.tools[2]", "run_tests is the name of npm_test@1 and of pytest@1"),
    ]
    for place, key, words in expected:
        assert any(line.startswith(place) and key in line and words in line for line in found), (place, found)
    assert len(found) == len(expected), "\n".join(found)


def test_a_denied_name_that_is_no_tool_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"'bahs' denies no tool of this toolset .did you mean bash"):
        catalogue(Tools("mine", toolset={"mine": ToolsetEntry(include=("base",), deny=("bahs",))}))


def test_a_tool_of_a_plugin_cannot_be_redefined() -> None:
    with pytest.raises(ConfigError, match="bash@1 is defined already, by toolset 'base' of retrograd"):
        catalogue(
            Tools("base", tool=(ToolEntry(id="bash", version="1", builtin=BuiltinEntry(factory="bash")),))
        )


def test_a_toolset_of_another_plugin_joins(tmp_path: Path) -> None:
    rust = ToolsetDefinition(
        name="rust",
        include=("base",),
        tools=("cargo_test",),
        definitions=(
            ToolDefinition(
                id="cargo_test", version="3", description="Run the tests.", exec={"argv": ["cargo", "test"]}
            ),
        ),
    )
    found = catalogue(Tools("rust"), None, ("toolset 'rust' of retrograd-rust 1.0", rust))
    assert labels(found, "rust")[-1] == "cargo_test@3"


def test_a_scenario_has_only_the_toolsets_that_are_named() -> None:
    found = catalogue(Tools("python", scenario_toolsets=("base",)))
    assert found.toolsets == ("python", "base")
    with pytest.raises(ConfigError, match="no scenario can have the toolset 'typescript'"):
        found.tools_of("typescript")


def test_the_hash_changes_with_what_the_model_meets(tmp_path: Path) -> None:
    script = tmp_path / "count.py"

    def found(text: str = "#!/usr/bin/env python3\n", where: Path = script, **more: Any) -> str:
        where.parent.mkdir(exist_ok=True)
        where.write_text(text)
        entry = ToolEntry(
            id="count",
            version="1",
            description=more.get("description", "Count."),
            exec=ExecEntry(script=where, timeout_secs=more.get("timeout_secs")),
        )
        tools = ("count", *more.get("tools", ()))
        return catalogue(
            Tools("mine", tool=(entry, *more.get("unused", ())), toolset={"mine": ToolsetEntry(tools=tools)})
        ).catalogue_hash

    first = found()
    assert found() == first
    assert found(where=tmp_path / "elsewhere" / "count.py") == first
    assert found(unused=(tool("unused"),)) == first
    others = {
        found(text="#!/usr/bin/env python3\nprint()\n"),
        found(description="Count things."),
        found(timeout_secs=3.0),
        found(tools=("bash",)),
    }
    assert len(others | {first}) == 5
