from cache import Cache


def test_what_was_replaced_stays():
    cache = Cache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.put("a", 3)
    cache.put("c", 4)
    assert [cache.get(key) for key in "abc"] == [3, None, 4]


def test_a_missing_key():
    cache = Cache(1)
    assert cache.get("a") is None
    cache.put("b", 1)
    assert cache.get("b") == 1
