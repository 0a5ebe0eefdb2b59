"""Writes demonstrations.jsonl, scenarios.jsonl, and heldout.jsonl: sums and products for a calculator.

    python make_data.py

No question occurs twice.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import anyio
from calculator_server import server

from retrograd.tool_prompt import openai_tool

SYSTEM = "Use the tools to calculate."
QUESTIONS = {
    "add": ("What is {a} + {b}?", "Add {a} and {b}.", "How much is {a} plus {b}?"),
    "multiply": ("What is {a} * {b}?", "Multiply {a} by {b}.", "How much is {a} times {b}?"),
}


def catalogue() -> list[dict[str, Any]]:
    """The tools as the server offers them."""
    tools = anyio.run(server.list_tools)
    return [openai_tool(tool.name, tool.description or "", tool.input_schema) for tool in tools]


def scenario(id: str, question: str, answer: int) -> dict[str, Any]:
    """A line of a scenario file. The rubric is for the judge; the model does not see it."""
    rubric = (
        f"The right answer is {answer}. A tool must have calculated it, and the last message must say it."
    )
    return {"id": id, "system": SYSTEM, "user": question, "metadata": {"rubric": rubric}}


def demonstration(question: str, name: str, a: int, b: int, answer: int, tools: list[Any]) -> dict[str, Any]:
    """A trace as it should be."""
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": {"a": a, "b": b}}}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": name, "content": str(answer)},
        {"role": "assistant", "content": f"The answer is {answer}."},
    ]
    return {"messages": messages, "tools": tools}


def write(folder: Path) -> None:
    """Write the three files into `folder`."""
    draw = random.Random(1)
    tools = catalogue()
    seen: set[str] = set()
    for name, count in (("demonstrations", 8), ("scenarios", 48), ("heldout", 24)):
        records: list[dict[str, Any]] = []
        while len(records) < count:
            tool = list(QUESTIONS)[len(records) % len(QUESTIONS)]
            a = draw.randint(11, 99)
            b = draw.randint(11, 99) if tool == "add" else draw.randint(3, 12)
            question = draw.choice(QUESTIONS[tool]).format(a=a, b=b)
            if question in seen:
                continue
            seen.add(question)
            answer = a + b if tool == "add" else a * b
            if name == "demonstrations":
                records.append(demonstration(question, tool, a, b, answer, tools))
            else:
                records.append(scenario(f"{name}-{len(records) + 1}", question, answer))
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
