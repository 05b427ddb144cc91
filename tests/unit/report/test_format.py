import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.report import format as written

FINITE = st.floats(min_value=1e-9, max_value=1e18, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (9.996, "10.0"), (12.34, "12.3"), (999.6, "1,000"), (1234, "1,230"), (-1.5, "-1.50")],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert written.significant(value) == text


@given(FINITE)
def test_significant_is_within_half_a_percent_and_never_exponential(value: float) -> None:
    text = written.significant(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.00501)


@pytest.mark.parametrize("show", [written.significant, written.gib, written.gib_with_unit, written.seconds, written.percent, written.count,
                                  written.per_second, written.change])  # fmt: skip
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_not_a_number_is_a_dash(show, value) -> None:
    assert show(value) == "-"


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0.0, "0 s"), (1e-9, "<0.001 ms"), (12e-6, "0.0120 ms"), (0.0456, "45.6 ms"), (0.9996, "1.00 s"), (73.25, "73.2 s")],
)
def test_seconds_below_one_are_milliseconds(value_s: float, text: str) -> None:
    assert written.seconds(value_s) == text


def test_gib_are_binary_and_tiny_ones_are_not_spelled_out() -> None:
    assert written.gib_with_unit(80 * 2**30) == "80.0 GiB"
    assert written.gib_with_unit(1000) == "<0.001 GiB"
    assert written.gib(0) == "0"


def test_an_interval_says_a_common_unit_once() -> None:
    assert written.interval(1.0, 2.0) == ("1.00", "2.00 s")
    assert written.interval(0.9, 1.1) == ("900 ms", "1.10 s")


@pytest.mark.parametrize(("share", "text"), [(0.5, "50.0%"), (1, "100%"), (0.0004, "<0.1%"), (0, "0%")])
def test_percent(share: float, text: str) -> None:
    assert written.percent(share) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12"), (999, "999"), (124_439_808, "124 M"), (8_030_261_248, "8.03 B"), (1e12, "1.00 T")])
def test_count(value: float, text: str) -> None:
    assert written.count(value) == text


def test_rates_carry_decimal_prefixes() -> None:
    assert written.with_prefix(312e12, "FLOP/s") == "312 TFLOP/s"
    assert written.with_prefix(2.039e12, "B/s") == "2.04 TB/s"
    assert written.with_prefix(12.0, "B/s") == "12.0 B/s"
