"""From a document to the parts of a run: what hooks choose and refuse, and what is remembered of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from retrograd.answers import template_variables, with_adapter
from retrograd.assembly import Assembly, assemble
from retrograd.config import Document
from retrograd.errors import ConfigError, PluginError
from retrograd.inspection import served_ops

MakeModel = Callable[..., Path]
HEAD = "import attrs\nfrom retrograd_hookspecs import Component, ConfigError, NoConfig, hookimpl, key\n\n\n"


@pytest.fixture
def local(tmp_path: Path, tiny_model: MakeModel) -> Callable[..., Assembly]:
    """The assembly of a run with a file of hooks."""

    def make(code: str, *, algorithm: bool = False, **tables: Mapping[str, Any]) -> Assembly:
        (tmp_path / "hooks.py").write_text(HEAD + code)
        (tmp_path / "train.jsonl").write_text("")
        values: dict[str, Any] = {
            "model": {"path": str(tiny_model()), "device": "reference"},
            "plugins": {"load": ["hooks.py"]},
            **tables,
        }
        if algorithm:
            given = {"run": {"algorithm": "sft"}, "sft": {"data": "train.jsonl"}, "lora": {}}
            values = {**given, "output": {"path": "a.gguf"}, **values}
        values = {table: keys for table, keys in values.items() if keys is not None}
        return assemble(Document.from_values(values, base_dir=tmp_path), algorithm=algorithm)

    return make


def test_configure_sees_the_configuration_and_may_refuse_it(local: Callable[..., Assembly]) -> None:
    code = (
        "@hookimpl\n"
        "def retrograd_configure(config):\n"
        "    if config.training.lr > 1:\n"
        "        raise ConfigError(f'lr = {config.training.lr} is above 1')\n"
    )
    local(code, training={"lr": 0.5})
    with pytest.raises(ConfigError, match=r"lr = 2\.0 is above 1"):
        local(code, training={"lr": 2.0})


def test_a_hook_that_fails_is_named(local: Callable[..., Assembly]) -> None:
    with pytest.raises(PluginError, match="retrograd_configure: a hook raised KeyError: 'boom'"):
        local("@hookimpl\ndef retrograd_configure(config):\n    raise KeyError('boom')\n")
    with pytest.raises(PluginError, match="retrograd_select_backend: a hook raised ZeroDivisionError"):
        local("@hookimpl\ndef retrograd_select_backend(device, available):\n    return 1 // 0\n")


def test_a_hook_chooses_the_backend(local: Callable[..., Assembly], tiny_model: MakeModel) -> None:
    code = (
        "@hookimpl\n"
        "def retrograd_select_backend(device, available):\n"
        "    return 'reference' if device == 'abacus' and 'reference' in available else None\n"
    )
    device = {"path": str(tiny_model()), "device": "abacus"}
    assert local(code, model=device).services.get("backend").name == "reference"


TRAINABLE = """\
@attrs.frozen(kw_only=True)
class Soft:
    'Keys.'

    seed: int = key(3, doc='Seed.')
    start: str = key('', doc='File to start from.')


@hookimpl
def retrograd_trainables():
    build = lambda config, context: config
    return [
        Component(name='soft', config=Soft, build=build, summary='', section='prompt', starts_from='start')
    ]
"""


def test_a_trainable_of_a_third_party_is_treated_like_a_built_in_one(
    local: Callable[..., Assembly], tmp_path: Path
) -> None:
    start = tmp_path / "soft.gguf"
    start.write_text("")
    training = {"trainable": "soft"}
    assembly = local(TRAINABLE, algorithm=True, training=training, prompt={"seed": 7}, lora=None)
    assert assembly.services.get("seed") == 7
    assert with_adapter(assembly.document, start).get("prompt") == {"start": str(start)}
    with pytest.raises(ConfigError, match="the trainable 'soft' has no key `targets`"):
        served_ops(assembly.document, ["q"])
    with pytest.raises(ConfigError, match="no trainable 'softer' is installed"):
        with_adapter(assembly.document.with_value("training.trainable", "softer", where="test"), start)
    with pytest.raises(ConfigError, match=r"\[lora\]: this section does not apply with training.trainable"):
        local(TRAINABLE, algorithm=True, training=training, prompt={})
    tables: dict[str, Any] = {
        "checkpoint": {"directory": "c", "mode": "steps", "every_steps": 1, "resume_from": "c/1.state"},
        "prompt": {"start": "a"},
        "lora": None,
    }
    with pytest.raises(ConfigError, match=r"prompt\.start: cannot be combined with a resume"):
        local(TRAINABLE, algorithm=True, training=training, **tables)
    no_start = local(TRAINABLE.replace(", starts_from='start'", ""), training=training)
    with pytest.raises(ConfigError, match="the trainable 'soft' cannot start from a file"):
        with_adapter(no_start.document, start)


def test_a_chat_has_the_template_variables_of_its_algorithm(local: Callable[..., Assembly]) -> None:
    document = local("").document
    assert template_variables(document) is None
    for algorithm, section in (("sft", "sft"), ("grpo", "grpo"), ("agent_grpo", "agent")):
        run = document.with_value("run.algorithm", algorithm, where="test")
        assert template_variables(run) is None
        run = run.with_value(f"{section}.template_variables", {"thinking": False}, where="test")
        assert template_variables(run) == {"thinking": False}
    with pytest.raises(ConfigError, match="no algorithm 'sftt' is installed"):
        template_variables(document.with_value("run.algorithm", "sftt", where="test"))


@pytest.mark.parametrize("algorithm", ["grpo", "agent_grpo"])
def test_a_penalty_needs_a_reference_where_base_weights_change(
    local: Callable[..., Assembly], algorithm: str
) -> None:
    grpo = {
        **dict.fromkeys(("updates", "prompts_per_update", "grpo_epochs"), 1),
        **dict.fromkeys(("clip_range_low", "clip_range_high", "kl_coefficient"), 0.1),
        "prompts": "train.jsonl",
        "reward_command": ["true"],
        "group_size": 2,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 1, "seed": 0},
    }
    agent = {"scenarios": "train.jsonl", "updates": 1, "kl_coefficient": 0.1}
    tables = {"agent": agent} if algorithm == "agent_grpo" else {"grpo": grpo}
    run = {"run": {"algorithm": algorithm}, "training": {"trainable": "soft"}, "prompt": {}}
    for frozen in (True, False):
        code = TRAINABLE.replace("starts_from", f"frozen_base={frozen}, starts_from")
        said = ""
        try:
            local(code, algorithm=True, sft=None, lora=None, **run, **tables)
        except ConfigError as error:
            said = str(error)
        assert ("kl_coefficient: needs [reference] with training.trainable" in said) is not frozen, said


def test_a_section_of_another_algorithm_is_named_whoever_wrote_that(local: Callable[..., Assembly]) -> None:
    code = (
        "@attrs.frozen(kw_only=True)\n"
        "class Mine:\n"
        "    'Keys.'\n\n"
        "    rate: float = key(1.0, doc='Rate.')\n\n\n"
        "@hookimpl\n"
        "def retrograd_algorithms():\n"
        "    return [Component(name='mine', config=Mine, build=None, summary='', section='my_keys')]\n"
    )
    for section, name in (("my_keys", "mine"), ("agent", "agent_grpo"), ("preference", "preference")):
        with pytest.raises(
            ConfigError, match=rf'\[{section}\].*: it is read if run.algorithm is "{name}", not "sft"'
        ):
            local(code, algorithm=True, **{section: {"rate": 2.0}})
    local(code, my_keys={})  # a command without an algorithm does not care


@pytest.mark.parametrize(("present", "auto"), [("True", "abacus"), ("False", "cpu")])
def test_a_gpu_of_a_third_party_is_taken_where_it_is_present(
    local: Callable[..., Assembly], tiny_model: MakeModel, present: str, auto: str
) -> None:
    code = (
        "@hookimpl\n"
        "def retrograd_backends():\n"
        "    return [Component(name='abacus', config=NoConfig, build=None, summary='', gpu=True,"
        f" present=lambda: {present})]\n"
    )
    for device, expected in (("auto", auto), ("gpu", "abacus"), ("cpu", "cpu")):
        assembly = local(code, model={"path": str(tiny_model()), "device": device})
        assert assembly.one("backends").component.name == expected
    with pytest.raises(ConfigError, match="the backend 'gpu' is not in this version of retrograd yet"):
        local("", model={"path": str(tiny_model()), "device": "gpu"})


SAMPLER = (
    "@hookimpl\n"
    "def retrograd_samplers():\n"
    "    build = lambda config, context: 'my sampler'\n"
    "    return [Component(name='mine', config=NoConfig, build=build, summary='', fallback={fallback})]\n"
)


def test_the_sampler_is_what_a_hook_says_or_the_one_that_serves_by_default(
    local: Callable[..., Assembly],
) -> None:
    hook = (
        "\n\n@hookimpl\n"
        "def retrograd_select_sampler(available):\n"
        "    return 'mine' if available == ['default', 'mine'] else None\n"
    )
    code = SAMPLER.format(fallback=False)
    assert local(code).services.get("sampler") != "my sampler"
    assert local(code + hook).services.get("sampler") == "my sampler"
    replaced = local(
        SAMPLER.format(fallback=True), plugins={"load": ["hooks.py"], "disable": ["samplers.default"]}
    )
    assert replaced.services.get("sampler") == "my sampler"
    with pytest.raises(PluginError, match=r"more than one sampler .*'default' \(retrograd\) and 'mine'"):
        local(SAMPLER.format(fallback=True)).services.get("sampler")
    with pytest.raises(PluginError, match="no sampler that serves by default is installed"):
        local("", plugins={"disable": ["samplers.default"]}).services.get("sampler")


def test_a_key_of_metrics_selects_every_sink_that_reads_it(local: Callable[..., Assembly]) -> None:
    code = (
        "@hookimpl\n"
        "def retrograd_sinks():\n"
        "    return [Component(name='board', config=NoConfig, build=None, summary='',"
        " selected_by='metrics.tensorboard_dir')]\n"
    )
    metrics = {"tensorboard_dir": "board"}
    assert ("sinks", "board") not in local(code, algorithm=True).chosen
    chosen = local(code, algorithm=True, metrics=metrics).chosen
    assert {("sinks", "board"), ("sinks", "tensorboard")} <= set(chosen)
    with pytest.raises(ConfigError, match=r"metrics\.tensorboard_dir: no installed sink reads it"):
        local("", algorithm=True, metrics=metrics, plugins={"disable": ["sinks.tensorboard"]})


def test_a_hook_chooses_a_kernel(local: Callable[..., Assembly]) -> None:
    """It is asked for each op and format with every candidate, and None leaves the choice as it is."""
    code = (
        "import attrs\n\n\n"
        "@hookimpl\n"
        "def retrograd_select_kernel(op, format, candidates):\n"
        "    if op == 'matmul' and format == 'F32':\n"
        "        return attrs.evolve(candidates[0], variant='mine')\n"
    )
    kernels = local(code).services.get("kernels")
    assert kernels.serving("matmul", "F32").variant == "mine"
    assert kernels.serving("matmul", "Q8_0").variant == "reference"


def test_hooks_choose_tokenizer_and_chat_format(local: Callable[..., Assembly]) -> None:
    code = (
        "@hookimpl\n"
        "def retrograd_select_tokenizer(metadata):\n"
        "    return 'mine' if metadata['tokenizer.ggml.model'] == 'gpt2' else None\n\n\n"
        "@hookimpl\n"
        "def retrograd_tokenizers():\n"
        "    build = lambda config, context: 'my tokenizer'\n"
        "    return [Component(name='mine', config=NoConfig, build=build, summary='')]\n\n\n"
        "@hookimpl\n"
        "def retrograd_select_chat_format(template):\n"
        "    return 'granite' if 'im_start' in template else None\n"
    )
    assert local(code).services.get("tokenizer") == "my tokenizer"
    only_format = code.replace("return 'mine' if", "return None if")
    assert local(only_format).services.get("chat_format").name == "granite"


def test_a_file_of_hooks_is_loaded_once(local: Callable[..., Assembly]) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.py is registered already: name it once"):
        local("", plugins={"load": ["hooks.py", "hooks.py"]})


def test_settings_hold_every_value_but_no_secret_and_no_input(local: Callable[..., Assembly]) -> None:
    code = (
        "@attrs.frozen(kw_only=True)\n"
        "class Tracker:\n"
        '    """Keys."""\n\n'
        "    project: str = key('p', doc='Project.')\n"
        "    token: str = key('', doc='Token.', secret=True)\n\n\n"
        "@hookimpl\n"
        "def retrograd_hooks():\n"
        "    return [Component(name='tracker', config=Tracker, build=lambda c, x: None, summary='')]\n"
    )
    plugin = {"tracker": {"token": "hunter2"}}
    settings = local(code, algorithm=True, plugin=plugin).settings()
    assert settings["plugin.tracker.project"] == "p"
    assert settings["training.lr"] == 1e-4
    assert "sft.data" not in settings
    assert "hunter2" not in str(settings)


def test_problems_of_all_kinds_come_together(local: Callable[..., Assembly]) -> None:
    tables: dict[str, Any] = {
        "training": {"optimizer": "adamm", "lr": "high"},
        "lora": {"rank": 0},
        "plugins": {"load": ["none.py"], "require": ["retrograd>=99"], "disable": ["nothing-there"]},
    }
    with pytest.raises(ConfigError) as caught:
        local("", algorithm=True, **tables)
    keys: Sequence[str] = [problem.key for problem in caught.value.problems]
    wanted = {"training.optimizer", "training.lr", "plugins.load", "plugins.require", "plugins.disable"}
    assert wanted <= set(keys)
