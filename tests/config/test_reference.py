"""The reference is generated from the classes, and the committed file is up to date."""

from __future__ import annotations

from pathlib import Path

from retrograd.config import SHARED_SECTIONS, render_table, sections_in, update_reference

from .components import GrpoConfig, LoraConfig

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_reference_is_up_to_date() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert set(SHARED_SECTIONS) <= set(sections_in(text))
    assert update_reference(text, SHARED_SECTIONS) == text


def test_a_table_of_keys() -> None:
    assert render_table("lora", LoraConfig).split("\n")[:5] == [
        "| key | type | default | description |",
        "|---|---|---|---|",
        "| `rank` | integer | `8` | Rank. At least 1. Not together with `init_adapter`. |",
        "| `alpha` | number | `16.0` | The scale is alpha / rank. Above 0."
        " Not together with `init_adapter`. |",
        "| `seed` | integer | `42` | Seed. At least 0. Not together with `init_adapter`. |",
    ]


def test_sub_tables_follow() -> None:
    text = render_table("grpo", GrpoConfig)
    assert "| `sampling` | table | required | Sampling. |\n\n`[grpo.sampling]`:\n\n| key |" in text
    assert "| `max_new_tokens` | integer | required | Longest answer. In tokens, at least 1. |" in text


def test_blocks_of_other_sections_stay_as_they_are() -> None:
    block = "<!-- keys: x -->\nold\n<!-- end of keys -->"
    assert update_reference(block, SHARED_SECTIONS) == block
    renewed = update_reference(block, {"x": LoraConfig})
    assert "old" not in renewed
    assert renewed == update_reference(renewed, {"x": LoraConfig})
    assert sections_in(renewed) == ["x"]
