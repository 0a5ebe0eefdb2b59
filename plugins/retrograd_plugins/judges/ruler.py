"""RULER: one language model scores all members of a group relative to each other, from 0 to 1.

The model answers at an OpenAI-compatible endpoint (`POST {base_url}/chat/completions`). Minimal TOML::

    [agent.judge]
    type = "ruler"
    base_url = "https://api.openai.com/v1"
    model = "gpt-5-mini"
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import attrs

from retrograd_hookspecs import BuildContext, Component, ConfigError, Judge, Problem, hookimpl, key


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
        parts = _split(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"must be an http:// or https:// address such as https://api.openai.com/v1, got {value!r}"
            )
        if parts.username or parts.password:
            raise ValueError("holds a credential; give the name of its environment variable in api_key_env")
        if parts.query or parts.fragment:
            raise ValueError(f"must have no query and no fragment, got {value!r}")
        if parts.path.rstrip("/").endswith("/chat/completions"):
            raise ValueError(f"must end before /chat/completions, which is added to it, got {value!r}")

    @model.validator
    def _has_a_name(self, attribute: Any, value: str) -> None:
        if not value.strip():
            raise ValueError("must name a model, is empty")

    @property
    def is_local(self) -> bool:
        """True if the endpoint is on this machine's loopback."""
        host = _split(self.base_url).hostname or ""
        if host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # is parsed when it is read
    except ValueError as error:
        raise ValueError(f"is not an address: {error}") from None
    return parts


def api_key(config: RulerJudge) -> str:
    """The key from the environment; "" for a server on this machine that was given none.

    Raises: `ConfigError` that names the variable if it is not set, empty, or cannot be sent as a header.
    """
    value = os.environ.get(config.api_key_env, "").strip()
    if value and not (value.isascii() and value.isprintable()):
        message = f"the key in {config.api_key_env} holds characters that no HTTP header can"
        raise ConfigError([Problem(where="judge", key="api_key_env", message=message, hint="set it anew")])
    if value or config.is_local:
        return value
    state = "is empty" if config.api_key_env in os.environ else "is not set"
    raise ConfigError(
        [
            Problem(
                where="judge",
                key="api_key_env",
                message=f"the environment variable {config.api_key_env} {state};"
                f" {config.base_url} needs a key",
                hint=f"export {config.api_key_env}=…, or name another variable in api_key_env",
            )
        ]
    )


def _build(config: RulerJudge, context: BuildContext) -> Judge:
    from ._ruler import Ruler

    return Ruler(config, api_key(config))


def _check(config: RulerJudge, table: Any, run: Any) -> Iterable[Problem]:
    """The cache is a file in a directory that can be written to."""
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
