"""Words of a text."""

from collections import Counter


def most_frequent(text, count):
    """The `count` most frequent words with their numbers. Case and punctuation do not count. Words that are
    equally frequent stand in the order of the alphabet."""
    return Counter(text.split()).most_common(count)
