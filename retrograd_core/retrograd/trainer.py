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
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
import numpy as np

from retrograd_hookspecs import (
    ConfigError,
    Message,
    Problem,
    RetrogradError,
    SamplingParams,
    StepReport,
    hookimpl,
)

from .assembly import assemble
from .config import Document, TrainingConfig
from .config.resolved import to_table
from .progress import Reporter, SilentReporter
from .run import RunResult
from .session import make_run

Records = str | Path | Iterable[Mapping[str, Any]]
"""A file, or records as a chat JSONL would hold them."""


class Trainer:
    """A model with a trainable adapter, loaded once.

    Args:
        model: path or locator of the GGUF.
        lora: `retrograd.LoraConfig`; its defaults if left out.
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
                "lora": to_table(lora, defaults=False) if lora is not None else {},
            },
            tables or {},
        )
        self._reporter = reporter or SilentReporter()
        self._directory = tempfile.TemporaryDirectory(prefix="retrograd-")
        self._closed = False
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
        one user message as text. `sampling`: fields of `retrograd_hookspecs.SamplingParams`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        from .conversation import Conversation, ConversationEncoder

        encoder = ConversationEncoder(
            self._service("tokenizer"),
            self._service("template"),
            self._service("chat_format"),
            template_variables,
        )
        conversation = Conversation(messages=tuple(Message(**message) for message in messages))
        return self._continue(encoder.prompt(conversation), sampling)

    def _continue(self, prompt: list[int], sampling: Mapping[str, Any]) -> str:
        from .answers import answer

        return answer(self._assembly, prompt, SamplingParams(**sampling))

    def _run(
        self, algorithm: str, tables: Mapping[str, Any], callback: Callable[[StepReport], None] | None
    ) -> RunResult:
        output = Path(self._directory.name) / "adapter.gguf"
        values = _joined(
            self._values, {"run": {"algorithm": algorithm}, "output": {"path": str(output)}, **tables}
        )
        assembly = assemble(Document.from_values(values))
        for name, part in self._assembly.services.built():
            assembly.services.provide(name, part)
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
            for record in data:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        return str(path)


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
