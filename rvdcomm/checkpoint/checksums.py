"""Checksums of stored bytes: one for each block of 1 MiB, so that a part can be checked.

A checksum is a text that says how it was computed, so that readers of later versions know:

- ``crc32c/1048576:`` and 8 hexadecimal digits for every block of 1,048,576 bytes; the last block
  may be shorter. It is what this version writes.
- 64 hexadecimal digits: the sha256 of all bytes, in checkpoints of version 2.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Protocol

from rvdcomm.checkpoint.crc32c import crc32c
from rvdcomm.errors import CheckpointError
from rvdcomm.text import quoted

BLOCK_BYTES = 1 << 20
"""A reader that needs any byte of a block reads all of it. 1 MiB takes 8 digits, so the checksums
of 1 TB take 8 MB; a disk or a network delivers 1 MiB hardly later than a page."""

_MAX_BLOCK_BYTES = 1 << 40
_SHA256 = re.compile("[0-9a-f]{64}")
_CRC32C = re.compile("crc32c/([1-9][0-9]{0,12}):((?:[0-9a-f]{8})*)")


class Sum(Protocol):
    """Computes a checksum of bytes that are given piece by piece."""

    def update(self, data: Any, /) -> None:
        """Add the next bytes."""

    def text(self) -> str:
        """The checksum of all bytes so far."""


class BlockSum:
    """The CRC32C of every block.

    >>> found = BlockSum()
    >>> found.update(b"123456789")
    >>> found.text()
    'crc32c/1048576:e3069283'
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes, self.num_bytes = block_bytes, 0
        self._values: list[int] = []

    def update(self, data: Any) -> None:
        left = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while left:
            filled = self.num_bytes % self.block_bytes
            if not filled:
                self._values.append(0)
            piece = left[: self.block_bytes - filled]
            self._values[-1] = crc32c(piece, self._values[-1])
            self.num_bytes += len(piece)
            left = left[len(piece) :]

    def text(self) -> str:
        return f"crc32c/{self.block_bytes}:{''.join(f'{value:08x}' for value in self._values)}"


class WholeSum:
    """The sha256 of all bytes, as in checkpoints of version 2."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, data: Any) -> None:
        self._hash.update(data)

    def text(self) -> str:
        return self._hash.hexdigest()


def checksum_of(data: Any) -> str:
    """The checksum of these bytes."""
    found = BlockSum()
    found.update(data)
    return found.text()


def sum_like(checksum: str) -> Sum:
    """A sum that computes its checksum as ``checksum`` was computed."""
    crc = _CRC32C.fullmatch(checksum)
    return BlockSum(int(crc[1])) if crc else WholeSum()


def blocks_of(checksum: str) -> tuple[int, tuple[int, ...]] | None:
    """Bytes of a block, and the CRC32C of every block; None if the checksum has no blocks."""
    crc = _CRC32C.fullmatch(checksum)
    if crc is None:
        return None
    words = memoryview(bytes.fromhex(crc[2]))
    return int(crc[1]), tuple(
        int.from_bytes(words[i : i + 4], "big") for i in range(0, len(words), 4)
    )


def check_checksum(checksum: object, num_bytes: int | None = None) -> str:
    """``checksum`` if it is one, of ``num_bytes`` bytes if given; else a CheckpointError."""
    if isinstance(checksum, str) and _SHA256.fullmatch(checksum):
        return checksum
    crc = _CRC32C.fullmatch(checksum) if isinstance(checksum, str) else None
    if crc is None or not isinstance(checksum, str) or int(crc[1]) > _MAX_BLOCK_BYTES:
        raise CheckpointError(
            f"it has the checksum {quoted(checksum)}; known are a sha256 and crc32c/{BLOCK_BYTES}:"
        )
    block_bytes, num_blocks = int(crc[1]), len(crc[2]) // 8
    if num_bytes is not None and num_blocks != -(-num_bytes // block_bytes):
        raise CheckpointError(
            f"{num_blocks} checksums of blocks of {block_bytes} bytes are no checksums of "
            f"{num_bytes} bytes"
        )
    return checksum


def placeholder(num_bytes: int) -> str:
    """A text of the length of the checksum of so many bytes, for a header that is written first."""
    return f"crc32c/{BLOCK_BYTES}:{'0' * 8 * -(-num_bytes // BLOCK_BYTES)}"
