"""Random calls for property tests: any JSON, any text."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from retrograd_hookspecs import ToolCall

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_\-]{0,12}", fullmatch=True).filter(
    lambda name: name not in ("print", "all", "function")
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
# Texts that would end a call if its JSON were not read as JSON.
_PUNCTUATION = ('"', "'", '"""', "}", "]}", "\\", "```", "\n```", "; {", ">>>", "f(x=1)", "\x00")
_TAGS = ("</tool_call>", "<tool_call>", "</function>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]{")
_TOKENS = ("<｜tool▁call▁end｜>", "<|tool_call|>", "</code>", "<end_function_call>", "<|python_end|>")
TRICKY = st.sampled_from((*_PUNCTUATION, *_TAGS, *_TOKENS))


def values(texts: st.SearchStrategy[str], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """JSON values with these texts and keys."""
    return st.recursive(
        SCALARS | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def calls(
    texts: st.SearchStrategy[str] = TEXT | TRICKY, keys: st.SearchStrategy[str] = TEXT | TRICKY
) -> st.SearchStrategy[list[ToolCall]]:
    """One to three calls."""
    arguments = st.dictionaries(keys, values(texts, keys), max_size=4)
    call = st.builds(lambda name, given: ToolCall(name=name, arguments=given), NAMES, arguments)
    return st.lists(call, min_size=1, max_size=3)
