"""Answers of a model, with its adapter or without: for `chat`, `quickstart` and `Trainer`."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs

from retrograd_hookspecs import ConfigError, Message, Problem, SamplingParams

from .assembly import Assembly, assemble, component_of, trainable_of
from .config import Document
from .conversation import Conversation, ConversationEncoder
from .engine.generation import GenerationRequest, Generator
from .token_pieces import bytes_behind

OnText = Callable[[str], None]


def adapter_document(document: Document, adapter: Path | None) -> tuple[Document, Path | None]:
    """The document with an adapter to load, and its path.

    Without `adapter`, `[output].path` if that file exists; without either, the document as it is.
    Raises: `ConfigError` if `adapter` does not exist.
    """
    if adapter is None:
        output = document.get("output.path")
        if not isinstance(output, str):
            return document, None
        adapter = document.origin(("output", "path")).base_dir / Path(output).expanduser()
        if not adapter.is_file():
            return document, None
    path = adapter.absolute()
    return with_adapter(document, path), path


def with_adapter(document: Document, adapter: Path) -> Document:
    """The document with an adapter to start from, whatever the trainable's section says.

    Raises: `ConfigError` if there is no such file, or the trainable starts from none.
    """
    if not adapter.is_file():
        message = f"there is no file {adapter}"
        raise ConfigError([Problem(where="--adapter", message=message, hint="check the path")])
    table, trainable = trainable_of(document)
    if table is None or not trainable.starts_from:
        message = f"the trainable {trainable.name!r} cannot start from a file"
        where = document.where("training.trainable")
        raise ConfigError([Problem(where=where, key="training.trainable", message=message)])
    return document.with_value(table, {trainable.starts_from: str(adapter.absolute())}, where="--adapter")


def answer(
    assembly: Assembly, prompt: Sequence[int], params: SamplingParams, on_text: OnText | None = None
) -> str:
    """Continue `prompt` to a stop token or `params.max_new_tokens`; the text without the stop token.

    `on_text` gets the text piece by piece, in whole characters.

    Raises: `RolloutError` if prompt and answer do not fit the model's context.
    """
    services = assembly.services
    tokenizer = services.get("tokenizer")
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pieces: list[str] = []

    def emit(text: str) -> None:
        pieces.append(text)
        if on_text is not None and text:
            on_text(text)

    previous = int(prompt[-1]) if len(prompt) else None

    def on_token(number: int, token: int, logp: float) -> None:
        nonlocal previous
        if token not in tokenizer.stop_ids:
            emit(decoder.decode(bytes_behind(tokenizer, previous, [token])))
        previous = token

    model, fast = services.get("model"), assembly.config.training.fast_sampling_context
    generator = Generator(
        model=model,
        sampler=services.get("sampler"),
        ctx=services.get("architecture").context_length,
        kv_dtype=model.sampling_cache_dtype if fast else None,
        fast=fast,
    )
    request = GenerationRequest(prompt=prompt, params=params, stop_ids=tokenizer.stop_ids)
    generator.generate([request], on_token)
    emit(decoder.decode(b"", final=True))
    return "".join(pieces)


def encoder_of(assembly: Assembly, variables: Mapping[str, Any] | None = None) -> ConversationEncoder:
    """The encoder of conversations for the assembly's model."""
    services = assembly.services
    return ConversationEncoder(
        services.get("tokenizer"), services.get("template"), services.get("chat_format"), variables
    )


def template_variables(document: Document) -> Mapping[str, Any] | None:
    """What the run's algorithm gives the chat template (`template_variables`), so that a prompt looks as it
    did in training; None if a document names no algorithm, or its algorithm has no such key."""
    if document.get("run.algorithm") is None:
        return None
    table, _ = component_of(document, "algorithms", "run.algorithm")
    variables = document.get(f"{table}.template_variables")
    return variables if isinstance(variables, Mapping) else None


@attrs.define
class Chat:
    """Conversations with one or two sides of a model (base, adapter), each with its own history."""

    assembly: Assembly
    params: SamplingParams
    system: str | None
    sides: Mapping[str, bool]
    """Name of each side, and whether its adapter is on."""
    encoder: ConversationEncoder
    histories: dict[str, list[Message]] = attrs.field(factory=dict)

    @classmethod
    def open(
        cls,
        document: Document,
        adapter: Path | None,
        params: SamplingParams,
        *,
        system: str | None,
        sides: Mapping[str, bool],
    ) -> Chat:
        """Load the model. Raises: `ConfigError` if a side needs an adapter and there is none."""
        if any(sides.values()):
            document, path = adapter_document(document, adapter)
            if path is None:
                message = f"there is no adapter yet: {document.get('output.path')!r} does not exist"
                hint = "train first, name one with --adapter, or use --base-only"
                where = document.where("output.path")
                raise ConfigError([Problem(where=where, key="output.path", message=message, hint=hint)])
        assembly = assemble(document, algorithm=False)
        assembly.services.get("engine")  # attaches the adapter
        encoder = encoder_of(assembly, template_variables(document))
        chat = cls(assembly=assembly, params=params, system=system, sides=sides, encoder=encoder)
        chat.reset()
        return chat

    def reset(self) -> None:
        """Forget everything but the system message."""
        start = [Message(role="system", content=self.system)] if self.system else []
        self.histories = {name: list(start) for name in self.sides}

    def say(self, side: str, text: str, on_text: OnText) -> str:
        """Add a user message and the side's answer to its history."""
        history = self.histories[side]
        turn = [*history, Message(role="user", content=text)]
        prompt = self.encoder.prompt(Conversation(messages=tuple(turn)))
        with _adapter(self.assembly, self.sides[side]):
            said = answer(self.assembly, prompt, self.params, on_text)
        self.histories[side] = [*turn, Message(role="assistant", content=said)]
        return said


def first_turns(path: Path, count: int) -> list[tuple[Message, ...]]:
    """The messages before the first assistant turn of the first `count` records of a chat JSONL."""
    prompts: list[tuple[Message, ...]] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if len(prompts) == count:
                break
            if not line.strip():
                continue
            messages = json.loads(line)["messages"]
            first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
            prompts.append(tuple(Message(role=m["role"], content=m["content"]) for m in messages[:first]))
    return prompts


def greedy_answers(
    assembly: Assembly, prompts: Sequence[tuple[Message, ...]], *, max_new_tokens: int = 48
) -> list[str]:
    """The most likely answer to each prompt, with the adapter as it is."""
    encoder = encoder_of(assembly)
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
    return [answer(assembly, encoder.prompt(Conversation(messages=p)), params) for p in prompts]


def _adapter(assembly: Assembly, on: bool) -> Any:
    return nullcontext() if on else assembly.services.get("model").without_adapter()
