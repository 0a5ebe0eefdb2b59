"""Roman numerals."""

LETTERS = [(1000, "M"), (500, "D"), (100, "C"), (50, "L"), (10, "X"), (5, "V"), (1, "I")]


def to_roman(number):
    """A number from 1 to 3999."""
    text = ""
    for value, letter in LETTERS:
        while number >= value:
            text += letter
            number -= value
    return text
