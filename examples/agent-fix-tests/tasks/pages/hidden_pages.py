from pages import page, page_count


def test_no_items():
    assert page_count([], 3) == 0
    assert page([], 1, 3) == []


def test_every_item_is_on_a_page():
    items = list(range(17))
    found = [item for number in range(1, page_count(items, 4) + 1) for item in page(items, number, 4)]
    assert found == items
