"""CRC32C, the checksum of iSCSI and ext4, which processors compute in hardware.

The native core computes it at the speed of memory. Without the core, numpy computes the same values
at some hundred MB/s: the CRC is linear, so many pieces of the data are summed side by side, and
then joined.

Source: RFC 3720, appendix B.4 (test values); zlib's crc32_combine (joining two sums by
powers of the operator that appends a zero byte).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvdcomm.native import core

_POLYNOMIAL = 0x82F63B78
_LOG2_LANE_BYTES = 8
_MAX_BYTES = 1 << 20

_Words = NDArray[np.uint32]


def crc32c(data: Any, value: int = 0) -> int:
    """The CRC32C of bytes that follow those whose CRC32C is ``value``.

    Law (tests/checkpoint/test_crc32c.py): ``crc32c(b, crc32c(a)) == crc32c(a + b)``, with and
    without the native core.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    if core is not None:
        summed: int = core.crc32c(data, value)
        return summed
    return portable_crc32c(data, value)


def portable_crc32c(data: Any, value: int = 0) -> int:
    """``crc32c`` without the native core."""
    values = np.frombuffer(data, np.uint8)
    register = value ^ 0xFFFFFFFF
    for start in range(0, len(values), _MAX_BYTES):
        piece = values[start : start + _MAX_BYTES]
        register = _appended(register, len(piece)) ^ _linear(piece)
    return register ^ 0xFFFFFFFF


def _linear(values: NDArray[np.uint8]) -> int:
    """The CRC of up to ``_MAX_BYTES`` bytes if the register begins with 0."""
    lane_bytes = 1 << _LOG2_LANE_BYTES
    num_lanes = 1 << max(0, (len(values) - 1 >> _LOG2_LANE_BYTES).bit_length())
    # Zero bytes do not change a register of 0, so the data may be padded at its beginning.
    padded = np.zeros(num_lanes * lane_bytes, np.uint8)
    padded[len(padded) - len(values) :] = values
    table, sums = _table(), np.zeros(num_lanes, np.uint32)
    for column in np.ascontiguousarray(padded.reshape(num_lanes, lane_bytes).T):
        sums = table[sums.astype(np.uint8) ^ column] ^ (sums >> 8)
    log2_bytes = _LOG2_LANE_BYTES
    while len(sums) > 1:
        sums = _applied(_operator(log2_bytes), sums[::2]) ^ sums[1::2]
        log2_bytes += 1
    return int(sums[0])


def _appended(register: int, num_bytes: int) -> int:
    """The register after ``num_bytes`` zero bytes."""
    word = np.array([register], np.uint32)
    for log2_bytes in range(num_bytes.bit_length()):
        if num_bytes >> log2_bytes & 1:
            word = _applied(_operator(log2_bytes), word)
    return int(word[0])


@lru_cache(maxsize=1)
def _table() -> _Words:
    """The register after one byte, by byte."""
    table: _Words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        odd = table & np.uint32(1)
        table = (table >> np.uint32(1)) ^ odd * np.uint32(_POLYNOMIAL)
    return table


@lru_cache(maxsize=64)
def _operator(log2_bytes: int) -> _Words:
    """What ``1 << log2_bytes`` zero bytes make of each byte of a register, ``[4, 256]``."""
    if log2_bytes:
        half = _operator(log2_bytes - 1)
        return _applied(half, half)
    words: _Words = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    shifted: _Words = _table()[words & 255] ^ (words >> 8)
    return shifted


def _applied(operator: _Words, words: _Words) -> _Words:
    low: _Words = operator[0][words & 255] ^ operator[1][words >> 8 & 255]
    high: _Words = operator[2][words >> 16 & 255] ^ operator[3][words >> 24]
    return low ^ high
