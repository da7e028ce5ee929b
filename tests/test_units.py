"""Laws of bytes and seconds as text."""

from __future__ import annotations

import pytest

from rvdcomm.units import bytes_text, parse_bytes, secs_text


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3 MiB"),
        (5 * 2**30, "5 GiB"),
        (2048 * 2**30, "2 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes_text_uses_the_largest_unit_not_above_the_number(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    "secs, text",
    [
        (0, "0 s"),
        (12.5, "12.5 s"),
        (1.0, "1 s"),
        (0.00125, "1.25 ms"),
        (3e-6, "3 us"),
        (4.2e-8, "42 ns"),
    ],
)
def test_secs_text_uses_the_largest_unit_not_above_the_number(secs: float, text: str) -> None:
    assert secs_text(secs) == text


@pytest.mark.parametrize(
    "text, num_bytes",
    [
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("1.5KiB", 1536),
        ("2GB", 2 * 10**9),
        ("1e6", 10**6),
        ("7B", 7),
        ("0", 0),
    ],
)
def test_bytes_are_parsed_with_binary_and_decimal_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "12 XB", "1,5 MiB", "nan", "-5", "inf MiB"])
def test_invalid_text_of_bytes_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="cannot parse bytes"):
        parse_bytes(text)
