from words import most_frequent


def test_case():
    assert most_frequent("The cat saw the other cat and the dog", 2) == [("the", 3), ("cat", 2)]


def test_punctuation():
    assert most_frequent("Yes, no. Yes! Yes?", 1) == [("yes", 3)]


def test_alphabet():
    assert most_frequent("pear fig apple", 2) == [("apple", 1), ("fig", 1)]
