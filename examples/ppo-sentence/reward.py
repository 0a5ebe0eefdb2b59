"""A reward program: what a sentence is worth. It reads the word that it needs from the prompt.

echo '{"prompt": "... the word \\"river\\".", "completion": "The river is cold."}' | python reward.py
"""

from __future__ import annotations

import re

from retrograd.reward_program import serve

SHORTEST, LONGEST = 5, 10
"""Words of a short sentence."""


def score(prompt: str, completion: str) -> float:
    """From 0 to 1.

    | points | for |
    |---|---|
    | 0.4 | the word that the prompt asks for, as a whole word |
    | 0.3 | one sentence: it begins with a capital, ends with a full stop, and has no other end in it |
    | 0.3 | 5 to 10 words; a tenth of that less for each word too many, a fifth for each that is missing |
    """
    wanted = re.search(r'the word "(\w+)"', prompt)
    if wanted is None:
        raise ValueError(f"the prompt names no word: {prompt!r}")
    answer = completion.strip()
    words = re.findall(r"[\w'-]+", answer)
    if not words:
        return 0.0
    has_word = wanted[1].lower() in (word.lower() for word in words)
    one_sentence = re.fullmatch(r"[A-Z][^.!?:\n]*\.", answer) is not None
    missing, extra = max(SHORTEST - len(words), 0), max(len(words) - LONGEST, 0)
    length = max(1.0 - missing / 5 - extra / 10, 0.0)
    return round(0.4 * has_word + 0.3 * one_sentence + 0.3 * length, 6)


if __name__ == "__main__":
    serve(score)
