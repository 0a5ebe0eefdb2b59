from words import most_frequent


def test_all():
    text = "One two, two; three three THREE (four) four. Four four"
    assert most_frequent(text, 9) == [("four", 4), ("three", 3), ("two", 2), ("one", 1)]


def test_nothing():
    assert most_frequent("", 3) == []
