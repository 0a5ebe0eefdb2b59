"""RULER: one language model scores all members of a group relative to each other, from 0 to 1.

The model answers at an OpenAI-compatible endpoint (`POST {base_url}/chat/completions`). Minimal TOML::

    [agent.judge]
    type = "ruler"
    base_url = "https://api.openai.com/v1"
    model = "gpt-5-mini"
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import attrs

from retrograd import chat_endpoint
from retrograd.chat_endpoint import Endpoint, check_base_url, check_model, is_loopback
from retrograd_hookspecs import BuildContext, Component, Judge, Problem, hookimpl, key


@attrs.frozen(kw_only=True)
class RulerStrategy:
    """How the members of a group are laid before the model."""

    mode: Literal["auto", "listwise", "chunked", "pairwise"] = key(
        "auto",
        doc="`auto` (one request per group, split into chunks if too long), `listwise` (always one request),"
        " `chunked` (always split), `pairwise` (two answers per request, most reliable, most requests).",
    )
    anchor: bool = key(True, doc="Chunked: repeat one answer in every chunk to keep the scores on one scale.")
    max_pairs: int | None = key(
        None,
        minimum=1,
        doc="Pairwise: comparisons per group; at least its members less one.",
        default_text="all pairs",
    )
    both_orders: bool = key(
        True, doc="Pairwise: judge each pair in both orders to cancel position bias (doubles requests)."
    )
    aggregation: Literal["win_rate", "bradley_terry"] = key(
        "win_rate",
        doc="Pairwise: `win_rate` or `bradley_terry` (better when max_pairs limits comparisons).",
    )

    @anchor.validator
    def _anchor_applies(self, attribute: Any, value: bool) -> None:
        if not value and self.mode not in ("auto", "chunked"):
            raise ValueError(f"applies to the modes auto and chunked, not to {self.mode}; leave it out")

    @max_pairs.validator
    def _max_pairs_applies(self, attribute: Any, value: int | None) -> None:
        if value is not None:
            self._refuse_unless_pairwise()

    @both_orders.validator
    def _both_orders_applies(self, attribute: Any, value: bool) -> None:
        if not value:
            self._refuse_unless_pairwise()

    @aggregation.validator
    def _aggregation_applies(self, attribute: Any, value: str) -> None:
        if value != "win_rate":
            self._refuse_unless_pairwise()

    def _refuse_unless_pairwise(self) -> None:
        if self.mode != "pairwise":
            raise ValueError(f'applies to mode = "pairwise", not to {self.mode}; leave it out')


@attrs.frozen(kw_only=True)
class RulerContext:
    """How much of a group the model sees. A cut is in the middle and leaves a mark."""

    max_request_chars: int = key(60_000, minimum=1_000, doc="Longest request.", unit="characters")
    max_trajectory_chars: int = key(
        8_000, minimum=200, doc="Most of one member, its final state included.", unit="characters"
    )
    max_message_chars: int = key(2_000, minimum=100, doc="Most of one message.", unit="characters")
    head_ratio: float = key(
        0.4, minimum=0.0, maximum=1.0, doc="Share of an elided message kept from its start."
    )
    include_env_state: bool = key(True, doc="Show the environment's final state to the judge.")


@attrs.frozen(kw_only=True)
class RulerCompaction:
    """Summaries of the middle of long transcripts, by the judge's own model."""

    trigger_chars: int = key(minimum=1, doc="Transcripts longer than this are summarized.", unit="characters")
    target_chars: int = key(minimum=100, doc="Longest summary.", unit="characters")
    keep_last: int = key(minimum=0, doc="Messages at the end that are kept as they are.")

    @target_chars.validator
    def _shorter_than_the_trigger(self, attribute: Any, value: int) -> None:
        if value >= self.trigger_chars:
            raise ValueError(
                f"must be below trigger_chars ({self.trigger_chars}), got {value}: a summary has to shorten"
            )


@attrs.frozen(kw_only=True)
class RulerJudge:
    """Keys of a `judge` table with `type = "ruler"`; in Python, `judge=RulerJudge(base_url=…, model=…)`."""

    base_url: str = key(doc="Endpoint, e.g. `https://api.openai.com/v1`.")
    model: str = key(doc="Model name sent with each request.")
    api_key_env: str = key(
        "OPENAI_API_KEY",
        doc="Environment variable holding the API key; the key itself never goes in the file. A server on"
        " this machine needs none.",
    )
    rubric: str = key(
        "", doc="Grading criteria. A prompt or scenario can set its own.", default_text="built-in"
    )
    pairwise_rubric: str = key(
        "",
        doc="Criteria for pairwise comparisons.",
        default_text="`rubric` if given, else built-in",
    )
    temperature: float | None = key(
        None,
        minimum=0.0,
        maximum=2.0,
        doc="0.0 for the most repeatable verdicts.",
        default_text="endpoint default",
    )
    max_concurrency: int = key(4, minimum=1, maximum=1024, doc="Parallel requests.")
    timeout_secs: float = key(120.0, above=0.0, doc="Deadline of a request.", unit="seconds")
    max_retries: int = key(
        2, minimum=0, maximum=100, doc="Retries of a request on transient errors and unusable replies."
    )
    cache_path: Path | None = key(None, doc="Verdict cache file.")
    strategy: RulerStrategy = key(factory=RulerStrategy, doc="How members are compared.")
    context: RulerContext = key(factory=RulerContext, doc="Budgets in characters.")
    compaction: RulerCompaction | None = key(
        None, doc="Summarize the middle of long transcripts with the judge model."
    )

    @base_url.validator
    def _is_an_endpoint(self, attribute: Any, value: str) -> None:
        check_base_url(value)

    @model.validator
    def _has_a_name(self, attribute: Any, value: str) -> None:
        check_model(value)

    @property
    def is_local(self) -> bool:
        """True if the endpoint is on this machine's loopback."""
        return is_loopback(self.base_url)

    def endpoint(self, key: str) -> Endpoint:
        """The endpoint with its key."""
        return Endpoint(
            base_url=self.base_url,
            model=self.model,
            api_key=key,
            api_key_env=self.api_key_env,
            temperature=self.temperature,
            timeout_secs=self.timeout_secs,
            max_retries=self.max_retries,
            max_concurrency=self.max_concurrency,
        )


def api_key(config: RulerJudge) -> str:
    """The key from the environment. Raises as `retrograd.chat_endpoint.api_key`."""
    return chat_endpoint.api_key(config.base_url, config.api_key_env, where="judge")


def _build(config: RulerJudge, context: BuildContext) -> Judge:
    from ._ruler import Ruler

    return Ruler(config, api_key(config))


def _check(config: RulerJudge, table: Any, run: Any) -> Iterable[Problem]:
    """The cache is a file; criteria for pairs need pairs."""
    mode = config.strategy.mode
    if config.pairwise_rubric and mode != "pairwise":
        yield Problem(
            where=table.where("pairwise_rubric"),
            key=f"{table.name}.pairwise_rubric",
            message=f'has no effect with strategy.mode = "{mode}"',
            hint='leave it out, or set mode = "pairwise"',
        )
    path = config.cache_path
    if path is not None and path.is_dir():
        yield Problem(
            where=table.where("cache_path"),
            key=f"{table.name}.cache_path",
            message=f"{path} is a directory",
            hint="give the name of a file in it",
        )


@hookimpl
def retrograd_judges() -> list[Component[RulerJudge, Judge]]:
    """`ruler`."""
    return [
        Component(
            name="ruler",
            config=RulerJudge,
            build=_build,
            check=_check,
            summary="An OpenAI-compatible model scores the members of a group relative to each other.",
            source="RULER: https://art.openpipe.ai/fundamentals/ruler",
            requires=("httpx", "anyio", "tenacity"),
        )
    ]
