"""How each part of a run is built: the services that components name in `needs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from retrograd_hookspecs import (
    ConfigError,
    KernelImpl,
    ModelError,
    ModelFile,
    PluginError,
    Problem,
    RolloutGroup,
    TokenizerError,
)

from .interrupts import Interrupt
from .kernel_table import FrozenKernelTable
from .progress import SilentReporter
from .services import Factory, Services

if TYPE_CHECKING:
    from .assembly import Assembly
    from .engine import EngineSettings
    from .gguf.formats import BlockFormat


DEFAULT_SEED = 42
"""Seed of a run whose trainable has no key for one."""


def factories(assembly: Assembly) -> Mapping[str, Factory]:
    """Every part by name; each is built at most once, when it is first needed."""
    parts = _Parts(assembly)
    return {
        "model_path": parts.model_path,
        "formats": parts.formats,
        "model_file": parts.model_file,
        "backend": parts.backend,
        "kernels": parts.kernels,
        "architecture": parts.architecture,
        "tokenizer": parts.tokenizer,
        "template": parts.template,
        "chat_format": parts.chat_format,
        "model": parts.model,
        "trainable": lambda _: parts.chosen("trainables"),
        "seed": parts.seed,
        "engine": parts.engine,
        "optimizer": lambda _: parts.chosen("optimizers"),
        "schedule": lambda _: parts.chosen("schedules"),
        "sampler": parts.sampler,
        "algorithm": lambda _: parts.chosen("algorithms"),
        "policy": parts.policy,
        "reference": parts.reference,
        "reporter": lambda _: SilentReporter(),
        "observer": parts.observer,
        "interrupt": lambda _: Interrupt(),
        "run": lambda _: None,
        "rollouts_ready": parts.rollouts_ready,
        "tool_components": parts.tool_components,
    }


class _Parts:
    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._config = assembly.config
        self._session = assembly.session

    def chosen(self, kind: str) -> Any:
        item = self._assembly.one(kind)
        return self._assembly.build(kind, item.component.name)

    def model_path(self, services: Services) -> Path:
        locator = self._config.model.path
        if not locator:
            raise ConfigError(
                [
                    Problem(
                        where=self._assembly.document.where("model"),
                        key="model.path",
                        message="no model is given",
                        hint="set [model].path or use --model",
                    )
                ]
            )
        return resolve_model(self._assembly, locator)

    def formats(self, services: Services) -> Mapping[int, BlockFormat]:
        """The tensor formats that plugins offer, by their numbers in a GGUF."""
        from .gguf.formats import format_table

        names = self._session.names("quants")
        return format_table({name: self._assembly.build("quants", name) for name in names})

    def model_file(self, services: Services) -> Any:
        from .gguf import open_model

        return open_model(services.get("model_path"), services.get("formats"))

    def backend(self, services: Services) -> Any:
        return self.chosen("backends")

    def kernels(self, services: Services) -> FrozenKernelTable:
        backend = services.get("backend")
        impls: list[KernelImpl] = []
        for registered in self._session.components("kernels", prefix=f"{backend.name}."):
            impls += self._assembly.build("kernels", registered.component.name)

        def select(op: str, format: str, candidates: Sequence[KernelImpl]) -> KernelImpl | None:
            chosen: KernelImpl | None = self._session.call(
                "retrograd_select_kernel", op=op, format=format, candidates=candidates
            )
            return chosen

        return FrozenKernelTable(impls, backend.device, select)

    def architecture(self, services: Services) -> Any:
        """The `ArchitectureSpec` of the model."""
        return self._described(services.get("model_file"))

    def _described(self, file: ModelFile) -> Any:
        try:
            registered = self._session.component("architectures", file.architecture)
        except PluginError as error:
            raise ModelError(f"{file.path}: architecture {file.architecture!r}: {error}") from error
        return self._assembly.build("architectures", registered.component.name).describe(file)

    def tokenizer(self, services: Services) -> Any:
        file = services.get("model_file")
        name = self._session.call("retrograd_select_tokenizer", metadata=file.metadata)
        name = name or file.metadata.get("tokenizer.ggml.model", "")
        if not self._session.has("tokenizers", name):
            unknown = self._session.catalogue.unknown("tokenizers", name)
            raise ModelError(f"{file.path}: tokenizer.ggml.model is {name!r}: {unknown}")
        try:
            return self._assembly.build("tokenizers", name)
        except TokenizerError as error:
            raise TokenizerError(f"{file.path}: {error}") from error

    def template(self, services: Services) -> Any:
        from .chat_template import JinjaChatTemplate

        return JinjaChatTemplate.from_model(services.get("model_file").metadata, services.get("tokenizer"))

    def chat_format(self, services: Services) -> Any:
        """A hook's choice, else the family that the template writes calls of; a template without tools has
        them in its prompt."""
        from .tool_prompt import probe_template

        template = services.get("template")
        name = self._session.call("retrograd_select_chat_format", template=template.source)
        if not name and not probe_template(template).tools:
            name = self._session.fallback("chat_formats").component.name
        if name:
            return self._assembly.build("chat_formats", name)
        # Sorted by name, those that serve any model last.
        components = [registered.component for registered in self._session.components("chat_formats")]
        components.sort(key=lambda component: component.fallback)
        found = first_match(
            (self._assembly.build("chat_formats", component.name) for component in components),
            template.source,
            services.get("model_file").metadata,
        )
        if found is None:
            raise PluginError("no installed chat format matches this model's chat template")
        return found

    def sampler(self, services: Services) -> Any:
        """A hook's choice, else the one that serves by default."""
        available = self._session.names("samplers")
        name = self._session.call("retrograd_select_sampler", available=available)
        return self._assembly.build("samplers", name or self._session.fallback("samplers").component.name)

    def model(self, services: Services) -> Any:
        """The `CausalLM`, sized for passes of `training.micro_batch` tokens."""
        from .nn.model import CausalLM

        return CausalLM(
            services.get("model_file"),
            services.get("architecture"),
            services.get("kernels"),
            services.get("backend"),
            token_capacity=self._config.training.micro_batch,
        )

    def seed(self, services: Services) -> int:
        """The key `seed` of the trainable's table, from which the data is shuffled too; 42 if it has none."""
        return int(getattr(self._assembly.one("trainables").config, "seed", DEFAULT_SEED))

    def engine(self, services: Services) -> Any:
        """The `TrainingEngine` with the trainable attached."""
        from .engine import TrainingEngine

        return TrainingEngine(services.get("model"), services.get("trainable"), self.engine_settings())

    def engine_settings(self) -> EngineSettings:
        """Settings of the engine. Exact sampling needs keys and values as they are computed: a rounded cache
        would make a token's log-probability depend on whether its sequence is cut."""
        from .engine import EngineSettings

        training = self._config.training
        settings = EngineSettings.from_training(training)
        samples = any(
            "training.fast_sampling_context" in item.component.reads
            for item in self._assembly.chosen.values()
        )
        if samples and not training.fast_sampling_context:
            return attrs.evolve(settings, kv_dtype="compute")
        return settings

    def policy(self, services: Services) -> Any:
        """The `Policy`: the model as a sampler, sequences of at most `training.ctx` tokens."""
        from .engine.generation import Generator
        from .engine.policy import Policy, generation_slots

        training = self._config.training
        engine, model = services.get("engine"), services.get("model")
        fast = training.fast_sampling_context
        generator = Generator(
            model=model,
            sampler=services.get("sampler"),
            ctx=training.ctx,
            slots=generation_slots(training.generation_concurrency),
            pass_tokens=training.generation_batch or 512,
            kv_dtype=model.sampling_cache_dtype if fast else None,
            fast=fast,
            head_plan=None if fast else engine.settings.head_plan(),
        )
        return Policy(generator, slot_tokens=training.ctx)

    def reference(self, services: Services) -> Any:
        """The `Reference` of a KL penalty."""
        from .engine import TrainingEngine
        from .gguf import open_model
        from .nn.model import CausalLM
        from .reference import BaseReference, require_same_tokenizer

        section = self._config.reference
        if section is None:
            return BaseReference(services.get("engine"))
        try:
            file = open_model(resolve_model(self._assembly, section.model), services.get("formats"))
            require_same_tokenizer(services.get("model_file"), file, what="reference")
        except ModelError as error:
            where = self._assembly.document.where("reference.model")
            raise ConfigError([Problem(where=where, key="reference.model", message=str(error))]) from error
        model = CausalLM(
            file,
            self._described(file),
            services.get("kernels"),
            services.get("backend"),
            token_capacity=self._config.training.micro_batch,
        )
        return TrainingEngine(model, None, self.engine_settings())

    def observer(self, services: Services) -> Any:
        """The recorder of `[observe]`."""
        from .observe import observer_of

        return observer_of(self._config, services.get("tokenizer"), services.get("reporter"))

    def tool_components(self, services: Services) -> Any:
        """The `ToolComponents`: toolsets and tool factories of plugins."""
        from .agent.tools import InstalledTools

        return InstalledTools(self._assembly)

    def rollouts_ready(self, services: Services) -> Any:
        """Call `retrograd_rollouts_ready` of every plugin with an update's groups."""

        def call(groups: Sequence[RolloutGroup]) -> None:
            self._session.call("retrograd_rollouts_ready", run=services.get("run"), groups=groups)

        return call


def resolve_model(assembly: Assembly, locator: str) -> Path:
    """A path as it is; `scheme:rest` through the model source of that scheme."""
    scheme, separator, _ = locator.partition(":")
    if separator and len(scheme) > 1 and assembly.session.has("model_sources", scheme):
        resolved: Path = assembly.build("model_sources", scheme).resolve(locator)
        return resolved
    return Path(locator).expanduser()


def first_match(formats: Iterable[Any], template: str, metadata: Mapping[str, Any]) -> Any:
    """The first of the chat formats that matches a model; None if none does."""
    vocabulary = {text: index for index, text in enumerate(metadata.get("tokenizer.ggml.tokens", ()))}
    return next((f for f in formats if f.matches(template, vocabulary)), None)
