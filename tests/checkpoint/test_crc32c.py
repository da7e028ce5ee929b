from __future__ import annotations

import random

import pytest

from rvdcomm.checkpoint.crc32c import crc32c, portable_crc32c

# RFC 3720, appendix B.4.
KNOWN = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (b"\0" * 32, 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
]


@pytest.mark.parametrize("data, expected", KNOWN, ids=lambda value: str(value)[:12])
def test_crc32c_is_that_of_the_standard(data: bytes, expected: int) -> None:
    assert crc32c(data) == portable_crc32c(data) == expected


@pytest.mark.parametrize("size", [1, 255, 256, 257, 3 * 8192 + 5, (1 << 20) + 3])
def test_sum_of_two_pieces_is_the_sum_of_both(size: int) -> None:
    data = random.Random(size).randbytes(size)
    for cut in (0, 1, size // 3, size):
        first = portable_crc32c(data[:cut])
        assert first == crc32c(data[:cut])
        assert portable_crc32c(data[cut:], first) == crc32c(data[cut:], first) == crc32c(data)
