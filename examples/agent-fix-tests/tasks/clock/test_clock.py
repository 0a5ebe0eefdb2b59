from clock import parse, show


def test_parse():
    assert parse("9:05") == 545
    assert parse("9:30 pm") == 1290


def test_noon_and_midnight():
    assert parse("12:00 pm") == 720
    assert parse("12:00 am") == 0


def test_show():
    assert show(545) == "09:05"
    assert show(1445) == "00:05"
