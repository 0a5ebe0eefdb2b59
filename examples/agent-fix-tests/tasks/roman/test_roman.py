import pytest
from roman import to_roman


@pytest.mark.parametrize(
    ("number", "text"), [(3, "III"), (8, "VIII"), (4, "IV"), (90, "XC"), (2024, "MMXXIV")]
)
def test_roman(number, text):
    assert to_roman(number) == text
