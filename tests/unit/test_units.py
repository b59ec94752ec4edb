from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpilot_cli import units
from specpilot_cli.errors import InputError


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (12_288, "12.3 kB"), (54e9, "54.0 GB"), (1.41e11, "141 GB")],
)
def test_bytes_are_decimal(value: float, text: str) -> None:
    assert units.format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0156, "15.6 ms"),
        (1.0, "1.00 s"),
        (59e-6, "59.0 µs"),
        (0.0, "0 ns"),
        (250.0, "4 min 10 s"),
    ],
)
def test_seconds_use_the_largest_fitting_unit(value: float, text: str) -> None:
    assert units.format_seconds(value) == text


def test_rates_and_shares() -> None:
    assert units.format_bandwidth(4.57e12) == "4.57 TB/s"
    assert units.format_flops(989e12) == "989 TFLOP/s"
    assert units.format_percent(0.125) == "12.5 %"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1.5 GB", 1_500_000_000), ("2GiB", 2**31), ("17", 17), ("1e3 kb", 10**6)],
)
def test_bytes_parse_with_decimal_and_binary_suffixes(text: str, value: int) -> None:
    assert units.parse_bytes(text) == value


@pytest.mark.parametrize(
    "text", ["", "GB", "-1 GB", "1 parsec", "1 2 GB", "nan", "1e400", "1e300TB"]
)
def test_nonsense_quantities_are_input_errors(text: str) -> None:
    with pytest.raises(InputError) as caught:
        units.parse_bytes(text, where="--size")
    assert caught.value.where == "--size"
    assert caught.value.hint


@given(st.integers(min_value=1000, max_value=10**15))
def test_formatted_bytes_parse_back_within_half_a_percent(value: int) -> None:
    assert units.parse_bytes(units.format_bytes(value)) == pytest.approx(value, rel=0.006)


def test_quantities_beyond_any_unit_are_still_text() -> None:
    assert units.format_seconds(math.inf) == "inf s"
    for form in (units.format_bytes, units.format_seconds, units.format_bandwidth):
        assert "nan" in form(math.nan)
        assert form(5e-324)
