"""Parts of the judge `ruler`: cuts, the verdict cache, and its configuration."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.chat_replies import fingerprint
from retrograd.config import Document, read_table
from retrograd_plugins.judges._transcripts import elide, permutation, with_state
from retrograd_plugins.judges._verdict_cache import VerdictCache
from retrograd_plugins.judges.ruler import RulerJudge

from .conftest import MakeJudge, group_of, reason, values, worths
from .server import JudgeServer


@given(st.text(max_size=400), st.integers(0, 300), st.floats(0, 1))
def test_a_cut_keeps_both_ends_and_counts_the_rest(text: str, limit: int, ratio: float) -> None:
    found = elide(text, limit, ratio)
    if len(text) <= limit:
        assert found == text
        return
    head, missing, tail = re.fullmatch(  # type: ignore[union-attr]
        r"(.*)\n\[… (\d+) characters left out …\]\n(.*)", found, re.DOTALL
    ).groups()
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + int(missing) + len(tail) == len(text)
    assert len(found) <= max(limit, len(found) - len(head) - len(tail))


def test_head_ratio() -> None:
    """40 characters are kept: 30 from the start at 0.75."""
    mark = "\n[… 960 characters left out …]\n"
    found = elide("a" * 500 + "b" * 500, 40 + len("\n[… 1000 characters left out …]\n"), 0.75)
    assert found == "a" * 30 + mark + "b" * 10
    assert elide("a" * 500 + "b" * 500, 72, 1.0) == "a" * 40 + mark
    assert elide("a" * 500 + "b" * 500, 72, 0.0) == mark + "b" * 40


@pytest.mark.parametrize(("text", "state"), [(10, 5000), (5000, 10), (5000, 5000), (10, 10)])
def test_transcript_and_state_share_a_budget(text: int, state: int) -> None:
    found = with_state("t" * text, "s" * state, 1000, 0.5)
    assert len(found) <= 1000
    assert "[final state]" in found
    shown_text, shown_state = (found.partition("[final state]")[i].count(c) for i, c in ((0, "t"), (2, "s")))
    assert shown_text >= min(text, 400)
    assert shown_state >= min(state, 400)


def test_permutations_are_orders_of_their_seed() -> None:
    assert permutation("a", 5) == permutation("a", 5)
    assert sorted(permutation("a", 9)) == list(range(9))
    assert len({tuple(permutation(str(i), 3)) for i in range(100)}) == 6


def test_a_seed_knows_the_borders_of_its_parts() -> None:
    assert fingerprint("ab", "c") != fingerprint("a", "bc") != fingerprint("abc")


# -- cache


def test_a_cached_verdict_is_the_same_and_free(server: JudgeServer, make: MakeJudge, tmp_path: Path) -> None:
    path = tmp_path / "new" / "verdicts.jsonl"
    first, again = make(cache_path=path), make(cache_path=path)
    group = worths(0.2, 0.9, 0.4)
    assert values(first, group) == values(again, group) == [0.2, 0.9, 0.4]
    assert len(server.requests) == 1
    metrics = again.metrics()
    assert (metrics["requests"], metrics["cache_hits"]) == (0, 1)


@pytest.mark.parametrize(
    "change", [{"temperature": 0.5}, {"model": "other"}, {"rubric": "Another."}, {"group": "rubric"}]
)
def test_another_request_is_not_in_the_cache(
    server: JudgeServer, make: MakeJudge, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "verdicts.jsonl"
    own = change.pop("group", "")
    values(make(cache_path=path), group_of("worth 0.1", "worth 0.2"))
    values(make(cache_path=path, **change), group_of("worth 0.1", "worth 0.2", rubric=own))
    assert len(server.requests) == 2


def test_failures_are_not_cached(server: JudgeServer, make: MakeJudge, tmp_path: Path) -> None:
    from .server import status

    path = tmp_path / "verdicts.jsonl"
    server.script.append(status(404))
    group = worths(0.1, 0.2)
    assert reason(make(cache_path=path), group)
    assert values(make(cache_path=path), group) == [0.1, 0.2]


def test_damaged_lines_are_skipped_and_counted(server: JudgeServer, make: MakeJudge, tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    group = worths(0.1, 0.2)
    values(make(cache_path=path), group)
    good = path.read_bytes()
    bad = b'not json\n[]\n{"v": 1}\n{"v": 1, "key": 3, "reply": ""}\n\xff\xfe\n\n'
    path.write_bytes(bad + good + b'{"v": 1, "ke')
    judge = make(cache_path=path)
    assert values(judge, group) == [0.1, 0.2]
    assert len(server.requests) == 1
    assert judge.metrics()["cache_corrupt_lines"] == 5
    # The line that was cut short does not swallow the next one.
    assert values(make(cache_path=path), worths(0.3, 0.4)) == [0.3, 0.4]
    judge = make(cache_path=path)
    assert values(judge, worths(0.3, 0.4)) == [0.3, 0.4]
    assert len(server.requests) == 2
    assert judge.metrics()["cache_corrupt_lines"] == 6


def test_a_cached_reply_is_checked_again(server: JudgeServer, make: MakeJudge, tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    group = worths(0.1, 0.2)
    values(make(cache_path=path), group)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"reply": '{"scores": []}'}) + "\n")
    assert values(make(cache_path=path), group) == [0.1, 0.2]
    assert len(server.requests) == 2


def test_a_record_of_another_version_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    path.write_text('{"v": 2, "key": "k", "reply": "x"}\n')
    cache = VerdictCache(path)
    assert cache.get("k") is None
    assert cache.corrupt_lines == 0


def test_one_process_sees_what_another_stored(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    reader, writer = VerdictCache(path), VerdictCache(path)
    assert reader.get("k") is None
    writer.put("k", "caf\u00e9 \ud800")
    assert reader.get("k") == "caf\u00e9 \ud800"
    path.unlink()
    writer.put("l", "again")
    assert reader.get("l") == "again"


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from retrograd_plugins.judges._verdict_cache import VerdictCache\n"
        f"cache = VerdictCache(Path({str(path)!r}))\n"
        "for i in range(150): cache.put(f'{sys.argv[1]}-{i}', 'x' * 3000)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    cache = VerdictCache(path)
    assert all(cache.get(f"{n}-{i}") == "x" * 3000 for n in range(3) for i in range(150))
    assert cache.corrupt_lines == 0


def test_a_writer_waits_for_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    path.touch()
    with path.open("rb") as other, ThreadPoolExecutor(1) as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        writing = pool.submit(VerdictCache(path).put, "k", "x")
        with pytest.raises(TimeoutError):
            writing.result(0.3)
        assert path.read_bytes() == b""
        fcntl.flock(other, fcntl.LOCK_UN)
        writing.result(30)
    assert VerdictCache(path).get("k") == "x"


def test_a_cache_that_cannot_be_written_is_a_reason(make: MakeJudge, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    judge = make(cache_path=tmp_path / "file" / "verdicts.jsonl")
    assert "the verdict cache" in reason(judge, worths(0.1, 0.2))


# -- configuration


@pytest.fixture
def refused() -> Callable[..., str]:
    """`refused(model="", …)`: what is wrong with a judge table."""

    def read(**keys: Any) -> str:
        values = {"base_url": "http://localhost:1/v1", "model": "m"} | keys
        document = Document.from_values({"agent": {"judge": values}})
        return "\n".join(map(str, read_table(RulerJudge, document.table("agent.judge")).problems))

    return read


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"base_url": "api.openai.com/v1"}, "agent.judge.base_url: must be an http:// or https:// address"),
        ({"base_url": "ftp://x/v1"}, "base_url"),
        ({"base_url": "http://x:port/v1"}, "base_url: is not an address"),
        ({"base_url": "http://user:secret@x/v1"}, "holds a credential"),
        ({"base_url": "http://x/v1?key=1"}, "no query"),
        ({"base_url": "http://x/v1/chat/completions/"}, "must end before /chat/completions"),
        ({"model": " "}, "agent.judge.model: must name a model"),
        ({"temperature": -1}, "agent.judge.temperature: must be"),
        ({"max_concurrency": 0}, "agent.judge.max_concurrency: must be"),
        ({"timeout_secs": 0}, "agent.judge.timeout_secs: must be"),
        ({"max_retries": -1}, "agent.judge.max_retries: must be"),
        ({"apikey": "x"}, "agent.judge.apikey: unknown key"),
        ({"strategy": {"mode": "pairs"}}, "agent.judge.strategy.mode: must be"),
        ({"strategy": {"max_pairs": 3}}, 'agent.judge.strategy.max_pairs: applies to mode = "pairwise"'),
        ({"strategy": {"both_orders": False}}, "agent.judge.strategy.both_orders: applies to"),
        ({"strategy": {"aggregation": "bradley_terry"}}, "agent.judge.strategy.aggregation: applies to"),
        ({"strategy": {"mode": "pairwise", "anchor": False}}, "agent.judge.strategy.anchor: applies to"),
        ({"context": {"head_ratio": 1.5}}, "agent.judge.context.head_ratio: must be"),
        ({"compaction": {"trigger_chars": 9000}}, "agent.judge.compaction.target_chars: required key"),
        (
            {"compaction": {"trigger_chars": 500, "target_chars": 500, "keep_last": 1}},
            "agent.judge.compaction.target_chars: must be below trigger_chars (500), got 500",
        ),
    ],
)
def test_mistakes_name_the_key(refused: Callable[..., str], keys: dict[str, Any], problem: str) -> None:
    message = refused(**keys)
    assert problem in message
    assert "secret" not in message


def test_the_defaults_of_the_reference(refused: Callable[..., str]) -> None:
    assert refused() == ""
    config = RulerJudge(base_url="https://x/v1", model="m")
    assert (config.api_key_env, config.max_concurrency, config.timeout_secs) == ("OPENAI_API_KEY", 4, 120)
    assert (config.max_retries, config.temperature, config.cache_path) == (2, None, None)
    assert (config.strategy.mode, config.strategy.anchor, config.strategy.max_pairs) == ("auto", True, None)
    assert (config.strategy.both_orders, config.strategy.aggregation) == (True, "win_rate")
    context = config.context
    assert (context.max_request_chars, context.max_trajectory_chars) == (60000, 8000)
    assert (context.max_message_chars, context.head_ratio, context.include_env_state) == (2000, 0.4, True)
    assert config.compaction is None


def test_a_relative_cache_lies_beside_the_toml(tmp_path: Path) -> None:
    table = {"base_url": "http://x/v1", "model": "m", "cache_path": "verdicts.jsonl"}
    document = Document.from_values({"agent": {"judge": table}}, base_dir=tmp_path)
    config = read_table(RulerJudge, document.table("agent.judge")).value
    assert config is not None
    assert config.cache_path == tmp_path / "verdicts.jsonl"


def test_a_proxy_of_the_environment_is_not_used_for_loopback(
    server: JudgeServer, make: MakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert values(make(), worths(0.1, 0.2)) == [0.1, 0.2]
    assert os.environ["http_proxy"]
