"""The judge `ruler`: lays a group before a language model by one of its strategies."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeVar

import attrs

from retrograd.chat_api import ChatClient, Form
from retrograd.chat_replies import ChatError, ReplyError, fingerprint, read_reply, without_reasoning
from retrograd_hookspecs import JudgeGroup, JudgeMember, RolloutError, Score

from . import _prompts
from ._pairs import Game, bradley_terry, schedule, win_rates
from ._replies import (
    Comparison,
    Verdict,
    VerdictError,
    comparison_schema,
    read_comparison,
    read_scores,
    scores_schema,
)
from ._transcripts import content_of, elide, permutation, transcript, with_state
from ._verdict_cache import VerdictCache
from .ruler import RulerJudge

T = TypeVar("T")

MIN_MEMBER_CHARS = 200
"""A member is not shown with less; a request that cannot hold that much of each is not sent."""


@attrs.frozen(kw_only=True)
class _Shown:
    """A member as text."""

    text: str
    state: str | None

    def within(self, limit: int, head_ratio: float) -> str:
        return with_state(self.text, self.state, limit, head_ratio)


@attrs.frozen(kw_only=True)
class _Case:
    """The different members of a group as text, with what they share."""

    opening: str
    members: tuple[_Shown, ...]
    rubric: str
    seed: str

    @property
    def code(self) -> str:
        """Marks the borders of texts; see `_prompts`."""
        return self.seed[:12]


class Ruler:
    """Scores groups. `first_wait_secs` is the wait before the first retry; each further one doubles it."""

    def __init__(self, config: RulerJudge, api_key: str, *, first_wait_secs: float = 0.5) -> None:
        self._config = config
        self._cache = VerdictCache(config.cache_path) if config.cache_path is not None else None
        self._chat = ChatClient(config.endpoint(api_key), cache=self._cache, first_wait_secs=first_wait_secs)

    async def score(self, group: JudgeGroup) -> Sequence[Score]:
        """One score per member, or one error for all. See `retrograd_hookspecs.Judge`."""
        if not group.members:
            return []
        try:
            verdicts = await self._verdicts(group)
        except (ChatError, RolloutError) as error:
            self._chat.counts["failures"] += 1
            return [Score(kind="error", explanation=str(error)) for _ in group.members]
        return [Score(kind="value", value=v.score, explanation=v.explanation) for v in verdicts]

    def metrics(self) -> Mapping[str, float]:
        """What was spent since the last call.

        requests, retries, cache_hits, failures (groups without a verdict), seconds (of requests, in sum),
        rescaled_groups (chunked scores that were moved to fit 0 to 1), cache_corrupt_lines; prompt_tokens and
        completion_tokens if the server reports them.
        """
        names = ("requests", "retries", "cache_hits", "failures", "seconds", "rescaled_groups")
        taken = dict.fromkeys((*names, "cache_corrupt_lines"), 0.0) | dict(self._chat.counts)
        self._chat.counts.clear()
        if self._cache is not None:
            taken["cache_corrupt_lines"] = float(self._cache.corrupt_lines)
            self._cache.corrupt_lines = 0
        return taken

    async def close(self) -> None:
        """Close connections; may be called more than once."""
        await self._chat.close()

    async def _verdicts(self, group: JudgeGroup) -> list[Verdict]:
        """A verdict per member. Equal members are shown once and share one."""
        include_state = self._config.context.include_env_state
        contents = [content_of(member, include_state) for member in group.members]
        if self._config.strategy.mode == "pairwise" and len(set(contents)) == 1:
            return _without_pairs(len(contents))
        first = {content: i for i, content in reversed(list(enumerate(contents)))}
        different = list(dict.fromkeys(contents))
        case = await self._case(group, [first[content] for content in different], different)
        if self._config.strategy.mode == "pairwise":
            verdicts = await self._pairwise(case, [first[content] + 1 for content in different])
        else:
            verdicts = await self._listwise(case)
        by_content = dict(zip(different, verdicts, strict=True))
        return [by_content[content] for content in contents]

    async def _case(self, group: JudgeGroup, indices: Sequence[int], contents: Sequence[str]) -> _Case:
        config = self._config
        context = config.context
        shared = transcript(group.opening, context.max_message_chars, context.head_ratio)
        opening = elide(shared, context.max_trajectory_chars, context.head_ratio)
        rubric = group.rubric
        if config.strategy.mode == "pairwise":
            rubric = rubric or config.pairwise_rubric
        rubric = rubric or config.rubric
        whole = transcript(group.opening, sys.maxsize, 0.0)
        seed = fingerprint(group.id, rubric, config.strategy.mode, whole, *contents)
        members = [group.members[i] for i in indices]
        calls = [partial(self._shown, member, opening, seed) for member in members]
        return _Case(opening=opening, members=tuple(await together(calls)), rubric=rubric, seed=seed)

    async def _shown(self, member: JudgeMember, opening: str, seed: str) -> _Shown:
        """The member's text, its middle summarised where it is too long."""
        context, compaction = self._config.context, self._config.compaction
        state = member.final_state if context.include_env_state else None
        render = partial(
            transcript, max_message_chars=context.max_message_chars, head_ratio=context.head_ratio
        )
        if compaction is None:
            return _Shown(text=render(member.messages), state=state)
        kept = max(0, len(member.messages) - compaction.keep_last)
        middle = transcript(member.messages[:kept], sys.maxsize, 0.0)
        last = member.messages[kept:]
        if not kept or len(middle) + len(transcript(last, sys.maxsize, 0.0)) <= compaction.trigger_chars:
            return _Shown(text=render(member.messages), state=state)
        summary = await self._summary(middle, opening, seed)
        head = f"[summary of the first {kept} messages]\n{summary}"
        return _Shown(text="\n\n".join([head, render(last)] if last else [head]), state=state)

    async def _summary(self, text: str, opening: str, seed: str) -> str:
        compaction, context = self._config.compaction, self._config.context
        assert compaction is not None
        ask = partial(_prompts.summary, compaction.target_chars, seed[:12], opening)
        room = self._room(_prompts.size(ask("")), 1)
        shortened = elide(text, room, context.head_ratio)
        answer = await self._chat.ask(ask(shortened), Form(name="summary"), _prose)
        return elide(answer, compaction.target_chars, context.head_ratio)

    def _room(self, taken: int, members: int) -> int:
        """Characters for each member in a request. Raises `VerdictError` if they are too few."""
        most = self._config.context.max_request_chars
        room = (most - taken) // members
        if room < MIN_MEMBER_CHARS:
            raise VerdictError(
                f"context.max_request_chars = {most} leaves {max(room, 0)} characters for each of {members}"
                f" answers, fewer than {MIN_MEMBER_CHARS}; raise it, shorten the rubric or use another mode"
            )
        return room

    def _texts(self, members: Sequence[_Shown], taken: int) -> list[str]:
        context = self._config.context
        limit = min(context.max_trajectory_chars, self._room(taken, len(members)))
        return [member.within(limit, context.head_ratio) for member in members]

    # -- all at once, or in chunks

    async def _listwise(self, case: _Case) -> list[Verdict]:
        chunks = self._chunks(case)
        calls = [partial(self._chunk, case, chunk, number) for number, chunk in enumerate(chunks)]
        found = await together(calls)
        scores = [{member: verdict.score for member, verdict in chunk.items()} for chunk in found]
        if len(chunks) > 1 and self._config.strategy.anchor:
            scores, moved = on_one_scale(scores, anchor=0)
            self._chat.counts["rescaled_groups"] += moved
        verdicts: dict[int, Verdict] = {}
        for chunk, values in zip(found, scores, strict=True):
            for member, verdict in chunk.items():
                verdicts.setdefault(member, attrs.evolve(verdict, score=values[member]))
        return [verdicts[member] for member in range(len(case.members))]

    def _chunks(self, case: _Case) -> list[list[int]]:
        """Members of each request. With an anchor the first member is in all of them."""
        strategy = self._config.strategy
        everyone = permutation(case.seed, len(case.members))
        fits = self._fits(case, everyone)
        if strategy.mode == "listwise" or (strategy.mode == "auto" and fits):
            return [everyone]
        shared = [0] if strategy.anchor else []
        others = [member for member in everyone if member not in shared]
        # A request with a single member compares nothing, so chunks without an anchor have two.
        most = len(others) if strategy.anchor else len(others) // 2
        for count in range(2, most + 1):
            chunks = [shared + part for part in _split(others, count)]
            if count == most or all(self._fits(case, chunk) for chunk in chunks):
                return chunks
        return [everyone]

    def _fits(self, case: _Case, members: Sequence[int]) -> bool:
        context = self._config.context
        texts = [case.members[m].within(context.max_trajectory_chars, context.head_ratio) for m in members]
        request = _prompts.listwise(case.rubric, case.code, case.opening, texts)
        return _prompts.size(request) <= context.max_request_chars

    async def _chunk(self, case: _Case, members: Sequence[int], number: int) -> dict[int, Verdict]:
        """Verdict by member of one request, in which they stand in an order of its own."""
        places = permutation(fingerprint(case.seed, "chunk", str(number)), len(members))
        order = [members[place] for place in places]
        ask = partial(_prompts.listwise, case.rubric, case.code, case.opening)
        texts = self._texts([case.members[m] for m in order], _prompts.size(ask([""] * len(order))))
        ids = [str(place) for place in range(1, len(order) + 1)]
        form = Form(name="scores", schema=scores_schema(ids))
        found = await self._chat.ask(
            ask(texts), form, lambda text: read_reply(text, lambda value: read_scores(value, ids))
        )
        return {member: found[name] for member, name in zip(order, ids, strict=True)}

    # -- two at a time

    async def _pairwise(self, case: _Case, numbers: Sequence[int]) -> list[Verdict]:
        """`numbers` are the places in the group by which explanations name the members."""
        count, strategy = len(case.members), self._config.strategy
        order = permutation(case.seed, count)
        try:
            pairs = [(order[a], order[b]) for a, b in schedule(count, strategy.max_pairs)]
        except ValueError as error:
            raise VerdictError(f"strategy.{error}") from None
        played = await together([partial(self._game, case, *pair) for pair in pairs])
        games = [game for game, _ in played]
        rate = bradley_terry if strategy.aggregation == "bradley_terry" else win_rates
        values = rate(count, games)
        notes = _notes(played, numbers)
        return [Verdict(score=v, explanation=n) for v, n in zip(values, notes, strict=True)]

    async def _game(self, case: _Case, first: int, second: int) -> tuple[Game, str]:
        """A comparison of two members, in both orders or in one that depends on the pair."""
        seed = fingerprint(case.seed, "pair", str(first), str(second))
        if self._config.strategy.both_orders:
            there, back = await together(
                [partial(self._compare, case, first, second), partial(self._compare, case, second, first)]
            )
            swapped = Comparison(winner=(0, 2, 1)[back.winner], explanation=back.explanation)
            if there.winner != swapped.winner:
                note = f"the two orders disagree: {there.explanation} / {back.explanation}"
                return Game(first, second, 0.5), note
            found = there
        elif int(seed, 16) % 2:
            back = await self._compare(case, second, first)
            found = Comparison(winner=(0, 2, 1)[back.winner], explanation=back.explanation)
        else:
            found = await self._compare(case, first, second)
        return Game(first, second, (0.5, 1.0, 0.0)[found.winner]), found.explanation

    async def _compare(self, case: _Case, first: int, second: int) -> Comparison:
        ask = partial(_prompts.pairwise, case.rubric, case.code, case.opening)
        texts = self._texts([case.members[first], case.members[second]], _prompts.size(ask(["", ""])))
        form = Form(name="comparison", schema=comparison_schema())
        return await self._chat.ask(ask(texts), form, lambda text: read_reply(text, read_comparison))


def _without_pairs(count: int) -> list[Verdict]:
    """Verdicts on `count` members that are all equal: each ties with each other."""
    if count == 1:
        raise VerdictError("a pairwise verdict needs two answers; this group has one")
    return [Verdict(score=0.5, explanation="all answers are identical")] * count


def _prose(text: str) -> str:
    answer = without_reasoning(text)
    if not answer:
        raise ReplyError("the summary is empty")
    return answer


def _split(members: Sequence[int], count: int) -> list[list[int]]:
    """`count` parts in order, whose lengths differ by at most one."""
    borders = [len(members) * i // count for i in range(count + 1)]
    return [list(members[a:b]) for a, b in pairwise(borders)]


def _notes(played: Sequence[tuple[Game, str]], numbers: Sequence[int]) -> list[str]:
    """What was said about each member in its games."""
    notes: list[list[str]] = [[] for _ in numbers]
    words = {1.0: ("beats", "loses to"), 0.5: ("ties with", "ties with"), 0.0: ("loses to", "beats")}
    for game, why in played:
        for me, other, word in zip(
            (game.first, game.second), (game.second, game.first), words[game.score], strict=True
        ):
            notes[me].append(f"{word} {numbers[other]}" + (f": {why}" if why else ""))
    return ["; ".join(lines) for lines in notes]


def on_one_scale(chunks: Sequence[Mapping[int, float]], anchor: int) -> tuple[list[dict[int, float]], bool]:
    """Scores of chunks by member, each shifted so that the anchor has the score of the first chunk.

    Where that leaves 0 to 1, all of them are moved back by the least that fits, and pressed together if they
    span more than 1: neither changes which of two is higher. The second value says whether that happened.
    """
    shifted = [{m: s + chunks[0][anchor] - chunk[anchor] for m, s in chunk.items()} for chunk in chunks]
    values = [score for chunk in shifted for score in chunk.values()]
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        return shifted, False
    span = max(high - low, 1.0)
    base = low if low < 0 else high - span
    fit = [{m: min(max((s - base) / span, 0.0), 1.0) for m, s in chunk.items()} for chunk in shifted]
    return fit, True


async def together(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Results in order. The first `ChatError` cancels the other calls and is raised."""
    import anyio

    results: dict[int, T] = {}
    failures: list[ChatError | RolloutError] = []

    async def run(index: int, call: Callable[[], Awaitable[T]]) -> None:
        try:
            results[index] = await call()
        except (ChatError, RolloutError) as error:
            failures.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for index, call in enumerate(calls):
            group.start_soon(run, index, call)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(calls))]
