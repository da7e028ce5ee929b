"""Laws of bytes and seconds as text."""

from __future__ import annotations

import pytest

from rvdcomm.units import bytes_text, secs_text


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
