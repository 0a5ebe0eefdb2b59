"""Long lists, a page at a time."""


def page_count(items, size):
    """How many pages the items fill."""
    return len(items) // size


def page(items, number, size):
    """The items of a page; the first page is number 1."""
    start = number * size
    return items[start : start + size]
