"""Registration hooks: one a kind of component.

A plugin module implements the hooks of the kinds it offers and is named by an entry point of the
group `retrograd.<kind>`; the entry point's name is the name used in the TOML. Each hook is called once
a run, on modules that the run refers to, in the main thread, before anything is built; it returns
descriptors and does no work. An exception is reported with the distribution that raised it and ends
the run before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from .component import Component
from .markers import hookspec

Components = Sequence[Component[Any, Any]]


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of component: its entry-point group is `retrograd.<name>`, its hook `retrograd_<name>`."""

    name: str
    singular: str
    gives: str
    """What `Component.build` returns, as a type of this package."""
    pip_prefix: str
    """A third party's distribution is likely called `retrograd-<pip_prefix>-<name>`."""

    @property
    def group(self) -> str:
        return f"retrograd.{self.name}"

    @property
    def hook(self) -> str:
        return f"retrograd_{self.name}"


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="algorithms", singular="algorithm", gives="Algorithm", pip_prefix="algorithm"),
        Kind(name="losses", singular="loss", gives="Loss", pip_prefix="loss"),
        Kind(name="optimizers", singular="optimizer", gives="Optimizer", pip_prefix="optimizer"),
        Kind(name="schedules", singular="schedule", gives="Schedule", pip_prefix="schedule"),
        Kind(name="trainables", singular="trainable", gives="Trainable", pip_prefix="trainable"),
        Kind(name="samplers", singular="sampler", gives="Sampler", pip_prefix="sampler"),
        Kind(name="constraints", singular="constraint", gives="GrammarEngine", pip_prefix="constraint"),
        Kind(name="rewards", singular="reward", gives="Reward", pip_prefix="reward"),
        Kind(name="judges", singular="judge", gives="Judge", pip_prefix="judge"),
        Kind(name="environments", singular="environment", gives="EnvironmentProvider", pip_prefix="env"),
        Kind(name="toolsets", singular="toolset", gives="ToolsetDefinition", pip_prefix="tools"),
        Kind(name="tool_factories", singular="tool factory", gives="ToolFactory", pip_prefix="tool"),
        Kind(name="sandboxes", singular="sandbox", gives="SandboxProvider", pip_prefix="sandbox"),
        Kind(name="datasets", singular="dataset", gives="Dataset", pip_prefix="dataset"),
        Kind(name="model_sources", singular="model source", gives="ModelSource", pip_prefix="source"),
        Kind(name="architectures", singular="architecture", gives="Architecture", pip_prefix="arch"),
        Kind(name="quants", singular="quantisation format", gives="Quant", pip_prefix="quant"),
        Kind(name="tokenizers", singular="tokenizer", gives="Tokenizer", pip_prefix="tokenizer"),
        Kind(name="chat_formats", singular="chat format", gives="ChatFormat", pip_prefix="chat"),
        Kind(name="backends", singular="backend", gives="Backend", pip_prefix="backend"),
        Kind(name="kernels", singular="kernel", gives="Sequence[KernelImpl]", pip_prefix="kernel"),
        Kind(name="sinks", singular="sink", gives="Sink", pip_prefix="sink"),
        Kind(name="commands", singular="command", gives="click.Command", pip_prefix="command"),
        Kind(name="hooks", singular="hook plugin", gives="None", pip_prefix="hook"),
    )
}


class RegistrationHooks:
    """The hook specifications. `retrograd_hooks` offers the keys of `[plugin.NAME]`."""

    @hookspec
    def retrograd_algorithms(self) -> Components | None:
        """Algorithms, by `run.algorithm`."""

    @hookspec
    def retrograd_losses(self) -> Components | None:
        """Losses, by the algorithm's `loss` key; options in `[loss.NAME]`."""

    @hookspec
    def retrograd_optimizers(self) -> Components | None:
        """Optimizers, by `training.optimizer`; options in `[optimizer.NAME]`."""

    @hookspec
    def retrograd_schedules(self) -> Components | None:
        """Learning-rate schedules, by `training.lr_scheduler`; options in `[lr_scheduler.NAME]`."""

    @hookspec
    def retrograd_trainables(self) -> Components | None:
        """What is trained, by `training.trainable`; keys in the component's `section`."""

    @hookspec
    def retrograd_samplers(self) -> Components | None:
        """Samplers: what `retrograd_select_sampler` says, else the one with `Component.fallback`."""

    @hookspec
    def retrograd_constraints(self) -> Components | None:
        """Engines of constrained decoding, by `agent.constrain_tool_calls`."""

    @hookspec
    def retrograd_rewards(self) -> Components | None:
        """Rewards."""

    @hookspec
    def retrograd_judges(self) -> Components | None:
        """Judges, by `type` in the algorithm's `judge` table."""

    @hookspec
    def retrograd_environments(self) -> Components | None:
        """Environments, by `agent.environment.type`."""

    @hookspec
    def retrograd_toolsets(self) -> Components | None:
        """Toolsets, by `agent.environment.tools`."""

    @hookspec
    def retrograd_tool_factories(self) -> Components | None:
        """Makers of built-in tools, by `builtin.factory` of a tool's definition."""

    @hookspec
    def retrograd_sandboxes(self) -> Components | None:
        """Sandboxes."""

    @hookspec
    def retrograd_datasets(self) -> Components | None:
        """Data formats, by the algorithm's `data_format`."""

    @hookspec
    def retrograd_model_sources(self) -> Components | None:
        """Model sources, by the scheme of `model.path` (`package:…`)."""

    @hookspec
    def retrograd_architectures(self) -> Components | None:
        """Architectures, by `general.architecture` of the GGUF."""

    @hookspec
    def retrograd_quants(self) -> Components | None:
        """Families of block formats; each says which ggml type names it reads."""

    @hookspec
    def retrograd_tokenizers(self) -> Components | None:
        """Tokenizers, by `tokenizer.ggml.model` of the GGUF."""

    @hookspec
    def retrograd_chat_formats(self) -> Components | None:
        """Chat formats; the first whose `matches` is true, in the order of their names, the one with
        `Component.fallback` last."""

    @hookspec
    def retrograd_backends(self) -> Components | None:
        """Devices, by `model.device`; "gpu" and "auto" take one with `Component.gpu` that is present, "auto"
        else the one with `Component.fallback`."""

    @hookspec
    def retrograd_kernels(self) -> Components | None:
        """Kernels; the entry point's name begins with its backend: `cpu.matmul.q4_k`."""

    @hookspec
    def retrograd_sinks(self) -> Components | None:
        """Metric sinks, by `metrics.sinks` or `Component.selected_by`; options in `[sink.NAME]`."""

    @hookspec
    def retrograd_commands(self) -> Components | None:
        """Subcommands of `retrograd`; `build` returns a click command."""

    @hookspec
    def retrograd_hooks(self) -> Components | None:
        """Plugins of lifecycle hooks; keys in `[plugin.NAME]`. `build` may return an object whose
        hook implementations are registered for the run, or None."""
