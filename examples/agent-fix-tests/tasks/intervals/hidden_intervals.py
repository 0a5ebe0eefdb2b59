from intervals import merge


def test_many():
    assert merge([(8, 9), (1, 2), (2, 5), (10, 11), (20, 30), (22, 24)]) == [(1, 5), (8, 11), (20, 30)]


def test_none():
    assert merge([]) == []
