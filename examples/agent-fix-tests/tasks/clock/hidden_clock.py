from clock import parse, show


def test_every_minute():
    for minute in range(24 * 60):
        assert parse(show(minute)) == minute


def test_halves():
    assert parse("12:30 am") == 30
    assert parse("12:30 pm") == 750
    assert parse("1:15 PM".lower()) == 795
