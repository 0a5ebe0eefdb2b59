from intervals import merge


def test_apart():
    assert merge([(5, 6), (1, 3)]) == [(1, 3), (5, 6)]


def test_overlapping():
    assert merge([(1, 4), (3, 6)]) == [(1, 6)]


def test_inside():
    assert merge([(1, 9), (2, 3)]) == [(1, 9)]


def test_neighbours():
    assert merge([(1, 2), (3, 4)]) == [(1, 4)]
