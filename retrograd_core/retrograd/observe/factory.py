"""The observer of a run, from its configuration."""

from __future__ import annotations

from pathlib import Path

from retrograd_hookspecs import Tokenizer

from ..config import RunConfig
from ..progress import Reporter
from .pieces import piece_decoder
from .writer import NullObserver, Observer, Recorder, RunFacts


def observer_of(config: RunConfig, tokenizer: Tokenizer, reporter: Reporter) -> Recorder:
    """An observer as `[observe]` asks for; one that records nothing without it."""
    settings = config.observe
    if settings is None or not settings.enabled:
        return NullObserver()
    facts = RunFacts(
        algorithm=config.run.algorithm, model=str(config.model.path), output=str(config.output.path)
    )
    return Observer(
        Path(settings.directory),
        facts,
        decode=piece_decoder(tokenizer),
        message=reporter.message,
        every=settings.every,
        max_text_chars=settings.max_text_chars,
    )
