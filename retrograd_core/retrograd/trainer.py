"""Training from Python: the same configuration, plugins and driver as `retrograd train`.

::

    from retrograd import LoraConfig, Trainer, TrainingConfig

    with Trainer("model.gguf", lora=LoraConfig(rank=16), training=TrainingConfig(ctx=512)) as trainer:
        trainer.fit("train.jsonl", evaluation="heldout.jsonl", callback=print)
        trainer.save_adapter("adapter.gguf")
        print(trainer.chat("How do I reset it?"))
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import attrs
import numpy as np

from retrograd_hookspecs import (
    Component,
    ComponentTable,
    ConfigError,
    DataError,
    PolicyObjective,
    Problem,
    RetrogradError,
    SamplingParams,
    Scenario,
    StepReport,
    hookimpl,
)

from .agent.scenarios import scenario_record
from .assembly import Assembly, assemble, trainable_of
from .config import Document, TrainingConfig, keys_of, table_name
from .config.keys import optional_arms
from .config.resolved import to_table
from .progress import Reporter, SilentReporter
from .run import RunResult
from .session import make_run

if TYPE_CHECKING:
    from .batch_training import AnswerGroup, BatchTraining

AGENT_CTX = 4096
"""Most tokens of an agentic run that names no context."""
Records = str | Path | Iterable[Mapping[str, Any] | Scenario]
"""A file, or records as a JSONL file would hold them."""


class Trainer:
    """A model with a trainable adapter, loaded once.

    Args:
        model: path or locator of the GGUF.
        lora: `retrograd.LoraConfig`; its defaults if left out. The configuration of another trainable where
            `training.trainable` names one.
        training: `retrograd.TrainingConfig`.
        device: "auto", "cpu", "gpu" or the name of a backend.
        tables: further tables and keys, as the TOML has them: `{"optimizer": {"lion": {"beta1": 0.95}}}`.
        reporter: where messages and progress go; by default nowhere.

    Raises: `ConfigError`, `ModelError`, `PluginError` as `retrograd train` does.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        lora: Any = None,
        training: TrainingConfig | None = None,
        device: str = "auto",
        tables: Mapping[str, Any] | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self._values: dict[str, Any] = _joined(
            {
                "model": {"path": str(model), "device": device},
                "training": to_table(training, defaults=False) if training is not None else {},
            },
            tables or {},
        )
        self._values = _joined(self._values, _trainable_table(self._values, lora))
        self._reporter = reporter or SilentReporter()
        self._directory = tempfile.TemporaryDirectory(prefix="retrograd-")
        self._closed = False
        self._modules: list[str] = []
        self._batches: BatchTraining | None = None
        # `fit` completes [evaluation] with the data.
        values = {table: keys for table, keys in self._values.items() if table != "evaluation"}
        self._assembly = assemble(Document.from_values(values), algorithm=False)
        self._assembly.services.get("engine")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the model and temporary files; may be called more than once."""
        self._closed = True
        for name in self._modules:
            sys.modules.pop(name, None)
        self._directory.cleanup()

    def fit(
        self,
        data: Records,
        *,
        evaluation: Records | None = None,
        callback: Callable[[StepReport], None] | None = None,
        **keys: Any,
    ) -> RunResult:
        """Supervised fine-tuning from the adapter's present state.

        Args:
            data: training file, or records.
            evaluation: held-out file, or records.
            callback: called after every optimizer step, in this thread.
            keys: further keys of `[sft]`.
        """
        self._require_open()
        tables: dict[str, Any] = {"sft": {"data": self._file(data, "train"), **keys}}
        if evaluation is not None:
            tables["evaluation"] = {"data": self._file(evaluation, "held-out")}
        return self._run("sft", tables, callback)

    def fit_grpo(
        self,
        config: Any,
        *,
        evaluation: Records | None = None,
        callback: Callable[[StepReport], None] | None = None,
    ) -> RunResult:
        """Learn from rewards by comparing answers to a prompt, from the adapter's present state.

        Args:
            config: `retrograd.GRPOConfig`. `prompts` may be records, `reward` a function (see the reward
                `python`), `judge` an object such as `retrograd.RulerJudge(...)`.
            evaluation: held-out prompts.
            callback: called after every optimizer step, in this thread.
        """
        return self._fit("grpo", config, evaluation, callback)

    def fit_ppo(
        self,
        config: Any,
        *,
        evaluation: Records | None = None,
        callback: Callable[[StepReport], None] | None = None,
    ) -> RunResult:
        """Learn from rewards with a value head. `config`: `retrograd.PPOConfig`; else as `fit_grpo`."""
        return self._fit("ppo", config, evaluation, callback)

    def fit_agentic_grpo(
        self,
        config: Any,
        *,
        evaluation: Records | None = None,
        callback: Callable[[StepReport], None] | None = None,
    ) -> RunResult:
        """Learn multi-turn tasks with tools, from the adapter's present state.

        Without a `training.ctx`, trajectories have the model's context, at most 4096 tokens: the default
        would not hold a catalogue of tools.

        Args:
            config: `retrograd.AgenticGRPOConfig`. `scenarios` may be `retrograd.Scenario`s; `environment` and
                `judge` are objects such as `retrograd.ContainerEnvironment(...)`.
            evaluation: held-out scenarios, a file or objects.
            callback: called after every optimizer step, in this thread.
        """
        return self._fit("agent_grpo", config, evaluation, callback, ctx=AGENT_CTX)

    def fit_algorithm(
        self,
        algorithm: str,
        config: Any,
        *,
        evaluation: Records | None = None,
        callback: Callable[[StepReport], None] | None = None,
    ) -> RunResult:
        """Train with any installed algorithm, from the adapter's present state.

        Args:
            algorithm: its name, as `run.algorithm`.
            config: an object of its configuration class; else as `fit_grpo`.
        """
        return self._fit(algorithm, config, evaluation, callback)

    def train_grpo_batch(
        self,
        groups: Sequence[AnswerGroup],
        *,
        max_new_tokens: int,
        clip_range_low: float = 0.2,
        clip_range_high: float = 0.28,
        epochs: int = 1,
        baseline: Literal["mean", "leave_one_out"] = "mean",
        importance_sampling_level: Literal["token", "sequence"] = "token",
    ) -> dict[str, float]:
        """One update on answers that were written and scored elsewhere; its metrics.

        The optimizer goes on from batch to batch. Groups whose rewards are all equal teach nothing and are
        left out; if none is left, nothing changes, and `batch/groups_trained` is 0.

        Args:
            max_new_tokens: what the loss is divided by, apart from the number of answers.
            epochs: optimizer steps.

        Raises: `DataError` for a group that cannot be used.
        """
        self._require_open()
        if self._batches is None:
            from .batch_training import BatchTraining

            self._batches = BatchTraining(self._batch_assembly())
        return self._batches.train(
            groups,
            max_new_tokens=max_new_tokens,
            objective=PolicyObjective(
                clip_low=clip_range_low, clip_high=clip_range_high, level=importance_sampling_level
            ),
            epochs=epochs,
            baseline=baseline,
        )

    def save_adapter(self, path: str | Path) -> None:
        """Write the LoRA GGUF, atomically."""
        self._service("trainable").save(Path(path))

    def load_adapter(self, path: str | Path) -> None:
        """Read a LoRA GGUF into the adapter. Raises `ModelError` if it does not fit."""
        self._service("trainable").load(Path(path))

    def tokenize(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Token ids of a text; see `retrograd_hookspecs.Tokenizer.encode`."""
        ids: list[int] = self._service("tokenizer").encode(text, special=special, bos=bos)
        return ids

    def score(self, prompt: str, completion: str) -> float:
        """Sum of log p of the completion's tokens after the prompt, in nats."""
        from .engine import TrainingSequence
        from .token_pieces import PieceEncoder

        tokenizer = self._service("tokenizer")
        before = tokenizer.encode(prompt, special=True, bos=True)
        after = PieceEncoder(tokenizer).turn(completion, before)
        if not before or not after:
            raise ValueError("prompt and completion must each have at least one token")
        tokens = np.array([*before, *after], np.int32)
        trained = np.arange(tokens.size) >= len(before)
        [logp] = self._service("engine").log_probabilities([TrainingSequence(tokens=tokens, trained=trained)])
        return float(np.sum(logp, dtype=np.float64))

    def generate(self, prompt: str, **sampling: Any) -> str:
        """Continue a text. `sampling`: fields of `retrograd_hookspecs.SamplingParams`."""
        tokenizer = self._service("tokenizer")
        return self._continue(tokenizer.encode(prompt, special=True, bos=True), sampling)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        template_variables: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> str:
        """The model's next turn. `messages`: fields of `retrograd_hookspecs.Message` (`role`, `content`), or
        one user message as text. `sampling`: fields of `retrograd_hookspecs.SamplingParams`.

        Raises: `DataError` for messages that cannot be read or that do not wait for an answer.
        """
        from .conversation import Conversation, ConversationEncoder
        from .given_messages import given_messages

        encoder = ConversationEncoder(
            self._service("tokenizer"),
            self._service("template"),
            self._service("chat_format"),
            template_variables,
        )
        conversation = Conversation(messages=given_messages(messages, "messages"))
        return self._continue(encoder.prompt(conversation), sampling)

    def _continue(self, prompt: list[int], sampling: Mapping[str, Any]) -> str:
        from .answers import answer

        return answer(self._assembly, prompt, SamplingParams(**sampling))

    def _fit(
        self,
        algorithm: str,
        config: Any,
        evaluation: Records | None,
        callback: Callable[[StepReport], None] | None,
        ctx: int | None = None,
    ) -> RunResult:
        self._require_open()
        component = self._assembly.session.component("algorithms", algorithm).component
        _require_config_of(component, config)
        table = table_name("algorithms", component)
        tables: dict[str, Any] = {table: self._table(config)} if table is not None else {}
        if ctx is not None and "ctx" not in self._values["training"]:
            step = self._assembly.config.training.micro_batch
            most = min(ctx, self._service("architecture").context_length)
            tables["training"] = {"ctx": max(most // step, 1) * step}
        if evaluation is not None:
            tables["evaluation"] = {"data": self._file(evaluation, "held-out")}
        return self._run(algorithm, tables, callback)

    def _table(self, config: Any) -> dict[str, Any]:
        """A configuration object as its table; what only Python can give becomes a file, a name or a
        table."""
        given: dict[str, Any] = {}
        for key in keys_of(type(config)):
            value = getattr(config, key.name)
            if callable(value):
                given[key.name] = f"python:{self._module(value)}:function"
            elif Path in optional_arms(key.type) and value is not None and not isinstance(value, str | Path):
                given[key.name] = self._file(value, key.name)
            elif ComponentTable in optional_arms(key.type) and attrs.has(type(value)):
                given[key.name] = {"type": self._component_name(value), **to_table(value, defaults=False)}
        plain = attrs.evolve(config, **dict.fromkeys(given)) if given else config
        return {**to_table(plain, defaults=False), **given}

    def _component_name(self, config: Any) -> str:
        for kind in ("judges", "environments"):
            for registered in self._assembly.session.components(kind):
                if registered.component.config is type(config):
                    return registered.component.name
        raise ConfigError(
            [Problem(where="Trainer", message=f"{type(config).__name__} configures no judge or environment")]
        )

    def _module(self, function: Callable[..., Any]) -> str:
        """Name of a module that holds a function, so that a configuration can name it."""
        name = f"retrograd_trainer_{id(self)}_{len(self._modules)}"
        module = ModuleType(name)
        module.function = function  # type: ignore[attr-defined]
        sys.modules[name] = module
        self._modules.append(name)
        return name

    def _batch_assembly(self) -> Assembly:
        """A run of grpo whose prompts and reward are never used: its loss and its optimizer are."""
        from retrograd_hookspecs import Score

        prompts = self._file([{"messages": [{"role": "user", "content": "unused"}]}], "unused")
        sampling = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 1, "seed": 0}
        unused = f"python:{self._module(lambda prompt, completion: Score(kind='missing'))}:function"
        table = {
            "prompts": prompts,
            "reward": unused,
            "updates": 1,
            "prompts_per_update": 1,
            "group_size": 2,
            "grpo_epochs": 1,
            "clip_range_low": 0.2,
            "clip_range_high": 0.2,
            "kl_coefficient": 0.0,
            "sampling": sampling,
        }
        return self._assembled("grpo", {"grpo": table})

    def _assembled(self, algorithm: str, tables: Mapping[str, Any]) -> Assembly:
        output = Path(self._directory.name) / "adapter.gguf"
        values = _joined(
            self._values, {"run": {"algorithm": algorithm}, "output": {"path": str(output)}, **tables}
        )
        assembly = assemble(Document.from_values(values))
        for name, part in self._assembly.services.built():
            assembly.services.provide(name, part)
        return assembly

    def _run(
        self, algorithm: str, tables: Mapping[str, Any], callback: Callable[[StepReport], None] | None
    ) -> RunResult:
        assembly = self._assembled(algorithm, tables)
        if callback is not None:
            assembly.session.register(_Callback(callback), "callback")
        return make_run(assembly, self._reporter).execute()

    def _service(self, name: str) -> Any:
        self._require_open()
        return self._assembly.services.get(name)

    def _require_open(self) -> None:
        if self._closed:
            raise RetrogradError("the trainer is closed; create a new one")

    def _file(self, data: Records, name: str) -> str:
        if isinstance(data, str | Path):
            return str(data)
        path = Path(self._directory.name) / f"{name}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for number, record in enumerate(data):
                plain = scenario_record(record) if isinstance(record, Scenario) else record
                try:
                    file.write(json.dumps(plain, ensure_ascii=False) + "\n")
                except (TypeError, ValueError) as error:
                    where = f"{name}[{number}]"
                    raise DataError([Problem(where=where, message=f"is not JSON: {error}")]) from error
        return str(path)


def _require_config_of(component: Component[Any, Any], config: Any) -> None:
    expected = component.config
    if not isinstance(config, expected):
        got = config.__name__ if isinstance(config, type) else type(config).__name__
        message = f"expected a {expected.__name__}(…), got {got}"
        raise ConfigError([Problem(where="Trainer", key=component.name, message=message)])


def _trainable_table(values: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The table of what is trained, with the keys of its configuration object."""
    table, component = trainable_of(Document.from_values(values))
    if config is not None:
        _require_config_of(component, config)
    if table is None:
        return {}
    return {table: to_table(config, defaults=False) if config is not None else {}}


def _joined(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with the keys of both. Raises `ConfigError` for a key that is in both."""
    joined = dict(values)
    for table, keys in more.items():
        given = joined.get(table, {})
        if not isinstance(keys, Mapping) or not isinstance(given, Mapping):
            joined[table] = keys
            continue
        twice = [
            Problem(where="Trainer(...)", key=f"{table}.{key}", message="is given twice")
            for key in given
            if key in keys
        ]
        if twice:
            raise ConfigError(twice)
        joined[table] = {**given, **keys}
    return joined


@attrs.frozen
class _Callback:
    function: Callable[[StepReport], None]

    @hookimpl
    def retrograd_step_finished(self, run: Any, report: StepReport) -> None:
        self.function(report)
