"""Writes the data that `retrograd quickstart` trains on: support tickets, answered by one line of JSON.

    python examples/quickstart/make_data.py plugins/retrograd_plugins/quickstart_data

The wording of the held-out tickets does not occur in the training file.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

PRODUCTS = ("coffee grinder", "desk lamp", "rain jacket", "keyboard", "bike light", "water filter")
HURRY = (
    "Please help today!",
    "This is urgent.",
    "I need this solved right now.",
    "My customers are waiting.",
)
CALM = (
    "No hurry.",
    "Whenever you find the time.",
    "Next week is fine.",
    "Thanks in advance for a look.",
)
TICKETS = {
    "billing": (
        "I was charged twice for my {p}.",
        "The invoice for the {p} shows the wrong amount.",
        "My refund for the {p} has not arrived on my card.",
        "The discount code was not applied when I paid for the {p}.",
        "Can you send me a receipt for the {p}?",
        "My card was declined for the {p} but the money is gone.",
    ),
    "account": (
        "I cannot log in to see my order of the {p}.",
        "The password reset mail never comes, and I want to register my {p}.",
        "My account is locked since I bought the {p}.",
        "How do I change the email address on the account that holds my {p}?",
        "Two-factor codes do not work when I open my {p} order.",
        "Somebody else is signed in to my account and ordered a {p}.",
    ),
    "shipping": (
        "My {p} has been on its way for two weeks.",
        "The tracking number of the {p} does not exist.",
        "The parcel with the {p} went to the wrong address.",
        "The courier says he delivered the {p}, but nothing is here.",
        "Can I still change the delivery date of my {p}?",
        "The box arrived, but the {p} was not inside.",
    ),
    "repair": (
        "My {p} stopped working after one day.",
        "The {p} makes a strange noise.",
        "A part of the {p} is broken.",
        "The {p} does not turn on any more.",
        "There is a crack in my new {p}.",
        "The {p} gets very hot after a minute.",
    ),
}
HELD_OUT = {
    "billing": ("You took the money for the {p} two times.", "The price on my bill for the {p} is too high."),
    "account": (
        "I forgot my password and cannot order a {p}.",
        "Your site does not let me sign in to buy a {p}.",
    ),
    "shipping": ("Where is the parcel with my {p}?", "The {p} was delivered to my neighbour's old address."),
    "repair": ("The {p} is defective.", "My {p} broke while I was using it."),
}
SYSTEM = "Sort the support ticket. Answer with one line of JSON."


def record(team: str, ticket: str, urgent: bool, phrase: str) -> dict[str, object]:
    answer = json.dumps({"team": team, "urgent": urgent})
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{ticket} {phrase}"},
            {"role": "assistant", "content": answer},
        ]
    }


def records(table: dict[str, tuple[str, ...]], rng: random.Random, each: int) -> list[dict[str, object]]:
    rows = []
    for team, templates in table.items():
        for template in templates:
            for product in rng.sample(PRODUCTS, each):
                urgent = rng.random() < 0.5
                phrase = rng.choice(HURRY if urgent else CALM)
                rows.append(record(team, template.format(p=product), urgent, phrase))
    rng.shuffle(rows)
    return rows


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for name, table, each in (("train", TICKETS, 6), ("heldout", HELD_OUT, 4)):
        lines = [json.dumps(row, ensure_ascii=False) for row in records(table, rng, each)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
