from pages import page, page_count


def test_first_page():
    assert page([1, 2, 3, 4, 5], 1, 2) == [1, 2]


def test_last_page():
    assert page([1, 2, 3, 4, 5], 3, 2) == [5]


def test_count():
    assert page_count([1, 2, 3, 4, 5], 2) == 3
    assert page_count([1, 2, 3, 4], 2) == 2
