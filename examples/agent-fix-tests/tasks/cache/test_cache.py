from cache import Cache


def filled():
    cache = Cache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    return cache


def test_the_oldest_makes_room():
    cache = filled()
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [None, 2, 3]


def test_what_was_read_stays():
    cache = filled()
    cache.get("a")
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]
