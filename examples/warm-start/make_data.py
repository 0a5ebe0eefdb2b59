"""Writes scenarios.jsonl, heldout.jsonl, and demonstrations.jsonl: word problems of one calculation.

    python make_data.py

No name and no thing of the held-out problems occurs in one that is trained on. No problem occurs twice.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from calculator import OPERATIONS, TOOLS

from retrograd.tool_prompt import openai_tool

SYSTEM = "Work out each problem with the tools, then give the answer."
PROBLEMS = {
    "add": "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "subtract": "{name} has {a} {things} and gives away {b}. How many {things} are left?",
    "multiply": "{name} packs {a} boxes with {b} {things} each. How many {things} are packed?",
}
TRAINED = (
    ("Anna", "Tom", "Lucy", "Peter", "Maria", "David", "Sarah", "Paul"),
    ("apples", "books", "stamps", "chairs", "eggs", "cards", "plates", "coins"),
)
HELD_OUT = (("Emma", "Jack", "Laura", "Simon", "Nora", "Frank"), ("pears", "pens", "shells", "tiles", "cups"))

Words = tuple[tuple[str, ...], tuple[str, ...]]


def problem(draw: random.Random, operation: str, words: Words) -> tuple[str, int, int, int]:
    """Its text, both numbers as they are calculated with, and the answer."""
    a, b = draw.randint(11, 99), draw.randint(11, 99)
    if operation == "subtract":
        a, b = a + b, b
    elif operation == "multiply":
        a = draw.randint(3, 12)
    names, things = words
    text = PROBLEMS[operation].format(name=draw.choice(names), things=draw.choice(things), a=a, b=b)
    return text, a, b, OPERATIONS[operation](a, b)


def scenario(id: str, text: str, answer: int) -> dict[str, Any]:
    """A line of a scenario file."""
    return {"id": id, "system": SYSTEM, "user": text, "metadata": {"env": {"answer": answer}}}


def demonstration(text: str, operation: str, a: int, b: int, answer: int) -> dict[str, Any]:
    """A trace as it should be, written as `retrograd collect` writes those of a model."""
    calls = [("calculate", {"operation": operation, "a": a, "b": b}), ("answer", {"value": answer})]
    turns = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            ],
        }
        for n, (name, arguments) in enumerate(calls, 1)
    ]
    result = {"role": "tool", "tool_call_id": "call_1", "name": "calculate", "content": str(answer)}
    opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    tools = [openai_tool(tool.name, tool.description, tool.input_schema) for tool in TOOLS]
    return {"messages": [*opening, turns[0], result, turns[1]], "tools": tools}


def write(folder: Path) -> None:
    """Write the three files into `folder`."""
    seen: set[str] = set()
    for name, count, words, seed in (
        ("demonstrations", 12, TRAINED, 1),
        ("scenarios", 64, TRAINED, 2),
        ("heldout", 60, HELD_OUT, 3),
    ):
        draw = random.Random(seed)
        records: list[dict[str, Any]] = []
        while len(records) < count:
            operation = list(OPERATIONS)[len(records) % len(OPERATIONS)]
            text, a, b, answer = problem(draw, operation, words)
            if text in seen:
                continue
            seen.add(text)
            if name == "demonstrations":
                records.append(demonstration(text, operation, a, b, answer))
            else:
                records.append(scenario(f"{name}-{len(records) + 1}", text, answer))
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
