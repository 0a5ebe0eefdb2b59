import pytest
from roman import to_roman


@pytest.mark.parametrize(
    ("number", "text"), [(9, "IX"), (49, "XLIX"), (400, "CD"), (944, "CMXLIV"), (3999, "MMMCMXCIX")]
)
def test_roman(number, text):
    assert to_roman(number) == text
