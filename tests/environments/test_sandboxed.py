"""The environments `container` and `local`: contract, configuration, faults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from retrograd.agent.tools import Tools
from retrograd.testing.environments import check_environment
from retrograd_hookspecs import ConfigError, DataError, Environment, RolloutError, Scenario
from retrograd_plugins.environments.container import ContainerEnvironment
from retrograd_plugins.environments.local import LocalEnvironment
from tests.containers.engine import BUSYBOX_IMAGE
from tests.containers.fixtures import Counter
from tests.environments.sandboxed import FIX, VERIFY, bash, provider_of, scenario, with_world, write

EMPTY = {"default": "none", "scenario_toolsets": ["base"], "toolset": {"none": {"tools": []}}}

ACTIONS = [
    bash("ls -A; env | sort; pwd; echo $HOME; hostname; no-such-program"),
    ("list_dir", {"path": "."}),
    ("read_file", {"path": "nothing"}),
    ("python", {"code": "print({'a', 'b', 'c'}); 1 / 0"}),
    bash("sleep 5 & echo started"),
    write("src/sums.py", FIX),
    ("run_tests", {"target": "tests"}),
    ("submit", {}),
]
QUICK = {"command": ["python3", "-c", "from src.sums import add; assert add(2, 3) == 5"]}


@pytest.mark.parametrize("reuse", ["never", "workspace"])
def test_contract_of_containers(docker: Counter, tmp_path: Path, reuse: str) -> None:
    actions = ACTIONS if reuse == "never" else ACTIONS[:3]
    setup = ["git init -q && git add -A && git commit -qm start"]
    verify = VERIFY if reuse == "never" else QUICK
    task = scenario(setup=setup, summary=["git", "log", "-p"], verify=verify)
    pool = {"max_live": 2, "reuse": reuse}
    episode = anyio.run(check_environment, lambda: provider_of(tmp_path, pool=pool), task, actions)
    if reuse == "never":
        assert "1 passed" in episode.observations[-2][0]
        assert episode.observations[-1][3]
        assert episode.score.value == 2.0


def test_contract_in_podman(podman: Counter, tmp_path: Path) -> None:
    pool = {"max_live": 2, "reuse": "workspace"}
    task = scenario(setup=["git init -q"], verify=QUICK)
    anyio.run(check_environment, lambda: provider_of(tmp_path, pool=pool), task, ACTIONS[:2])


def test_contract_of_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A directory of the host has the host's PATH: here without the programs of a virtual environment.
    places = [place for place in os.environ["PATH"].split(os.pathsep) if not place.startswith(os.getcwd())]
    monkeypatch.setenv("PATH", os.pathsep.join(places))
    setup = ["git init -q && git add -A && git commit -qm start"]
    task = scenario(setup=setup, summary=["git", "diff"], verify=QUICK)
    actions = [action for action in ACTIONS if action[0] != "run_tests"]  # slow with all that the host has
    episode = anyio.run(check_environment, lambda: provider_of(tmp_path, "local"), task, actions)
    assert episode.score.value == 1.0
    assert "\n/work\n/tmp\n" in episode.observations[0][0]


def test_configuration() -> None:
    config = ContainerEnvironment(Tools("python"))
    assert (config.tools.default, config.profile, config.image, config.allow_network) == ("python",) * 2 + (
        None,
        False,
    )
    assert (config.setup_timeout_secs, config.verify_timeout_secs) == (300.0, None)
    limits, pool = config.limits, config.pool
    assert (limits.cpus, limits.memory_mb, limits.pids, limits.exec_timeout_secs) == (1.0, 1024, 256, 30.0)
    assert limits.max_output_bytes == 65536
    assert (pool.max_live, pool.min_idle, pool.reuse, pool.max_leases_per_container) == (8, 0, "never", 32)
    with pytest.raises(ValueError, match='must be given with profile = "custom"'):
        ContainerEnvironment(Tools("base"), profile="custom")
    with pytest.raises(ValueError, match="must be true"):
        LocalEnvironment(Tools("base"))


@pytest.mark.parametrize(
    ("type", "keys", "said"),
    [
        ("local", {"allow_unsandboxed": False}, "allow_unsandboxed: must be true"),
        ("container", {"pool": {"min_idle": 3, "max_live": 2}}, "must be at most max_live = 2, got 3"),
        ("container", {"limits": {"memory": 5}}, "did you mean memory_mb?"),
        ("container", {"profile": "rust"}, "python"),
        ("container", {"image": "a b"}, "must name an image"),
    ],
)
def test_configuration_that_is_refused(tmp_path: Path, type: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.environment") as caught:
        provider_of(tmp_path, type, **keys)
    assert said in str(caught.value)


def prepared(provider: Any, *scenarios: Scenario) -> str:
    """What `prepare` raised."""

    async def run() -> str:
        try:
            await provider.prepare(scenarios)
        except (DataError, RolloutError) as error:
            return str(error)
        finally:
            await provider.close()
        return ""

    return anyio.run(run)


def test_scenarios_are_validated_before_the_engine_is_asked(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    said = prepared(provider_of(tmp_path), scenario(toolset="pyton"), scenario(files={"/x": ""}))
    assert "did you mean python?" in said
    assert "must be a relative path" in said


def test_tools_that_the_image_cannot_run_are_named(docker: Counter, tmp_path: Path) -> None:
    said = prepared(provider_of(tmp_path, image=BUSYBOX_IMAGE), scenario())
    assert "tools cannot work: bash (" in said
    assert "pytest" in said
    assert BUSYBOX_IMAGE in said


def test_a_setup_that_fails_breaks_the_world_with_the_end_of_its_output(
    docker: Counter, tmp_path: Path
) -> None:
    async def never(world: Environment) -> None:
        raise AssertionError("the world was started")

    failing = scenario(setup=["true", "echo a lot; echo bad luck >&2; exit 3"])
    with pytest.raises(RolloutError, match=r"scenarios.jsonl:1: setup\[1\] .* exit code 3: a lot\nbad luck"):
        with_world(provider_of(tmp_path), failing, never)
    with pytest.raises(RolloutError, match=r"took longer than setup_timeout_secs = 0\.5 s"):
        with_world(provider_of(tmp_path, setup_timeout_secs=0.5), scenario(setup=["sleep 100"]), never)


def test_actions_that_fail_are_observations(docker: Counter, tmp_path: Path) -> None:
    async def use(world: Environment) -> None:
        late = await world.step(*bash("sleep 1000"))
        assert late.is_error
        assert "time limit" in late.observation
        for name, arguments in (("no_tool", {}), ("bash", {}), ("bash", {"command": 5}), ("bash", {"x": 1})):
            result = await world.step(name, arguments)
            assert result.is_error, result
        full = await world.step(*bash("head -c 500000000 /dev/zero >big"))
        assert "No space left" in full.observation
        assert (await world.step(*write("more", "x" * 100_000))).is_error
        assert not (await world.step(*bash("rm big && echo room"))).is_error
        bomb = await world.step(*bash("b() { b | b & }; b; sleep 1000"))
        assert bomb.is_error
        assert not (await world.step(*bash("echo alive"))).is_error
        flood = await world.step(*bash("head -c 100000000 /dev/zero | tr '\\0' x"))
        assert "cut" in flood.observation
        assert len(flood.observation) < 200_000

    keys = {"limits": {"memory_mb": 256, "exec_timeout_secs": 2.0, "pids": 64}}
    with_world(provider_of(tmp_path, **keys), scenario(), use)


def test_a_container_that_dies_breaks_its_world_alone(docker: Counter, tmp_path: Path) -> None:
    async def use(world: Environment) -> None:
        async def kill() -> None:
            await anyio.sleep(0.5)
            name = world._sandbox.name  # type: ignore[attr-defined]
            await anyio.to_thread.run_sync(docker.api.kill, name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            with pytest.raises(RolloutError, match="the container died"):
                await world.step(*bash("sleep 1000"))
        with pytest.raises(RolloutError, match="the container died"):
            await world.step(*bash("true"))
        score = await world.grade()
        assert score.kind == "error"
        assert "the container died" in score.explanation

    with_world(provider_of(tmp_path), scenario(), use)


def test_a_toolset_without_tools_is_remarked(tmp_path: Path) -> None:
    async def run() -> list[str]:
        provider = provider_of(tmp_path, "local", tools=EMPTY)
        try:
            return [finding.message for finding in await provider.prepare([scenario()])]
        finally:
            await provider.close()

    assert "the toolset 'none' has no tools" in anyio.run(run)
