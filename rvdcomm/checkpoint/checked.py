"""Checked reads: the bytes of a stored array, compared with their checksums as they are read.

A reader asks for ranges of an array's bytes, in ascending order. If the array has checksums of
blocks, every block that a range touches is read and compared as a whole, each once: the bytes
between two ranges of one block are read, too. Ranges that follow each other without gaps are read
straight into the caller's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rvdcomm.checkpoint.checksums import WholeSum, blocks_of
from rvdcomm.checkpoint.crc32c import crc32c

Fill = Callable[[int, memoryview], None]
"""Reads the bytes of the array from an offset on into the whole of a memory."""

PIECE_BYTES = 1 << 20
"""Bytes that are read and then summed at once: they are still in the processor's cache."""

AHEAD_BYTES = 128 << 10
"""Bytes that are read at once where a gap is read; so much memory takes each array with gaps."""


class Damage(Exception):  # noqa: N818
    """Bytes ``start`` to ``end`` of an array have another checksum than when they were written."""

    def __init__(self, start: int, end: int, found: str, expected: str) -> None:
        super().__init__(start, end)
        self.start, self.end = start, end
        self.found, self.expected = found, expected


class Checked(Protocol):
    """Reads of one array."""

    def read(self, offset: int, out: memoryview, fill: Fill) -> None:
        """Read the bytes from ``offset`` on into ``out``; may raise ``Damage``."""

    def finish(self, fill: Fill) -> None:
        """Compare what was read and not yet compared; may raise ``Damage``."""


def checked(checksum: str | None, num_bytes: int) -> Checked:
    """Reads of an array of ``num_bytes`` bytes with this checksum; None: nothing is compared."""
    if checksum is None:
        return _Unchecked()
    blocks = blocks_of(checksum)
    return _Whole(checksum, num_bytes) if blocks is None else _Blocks(num_bytes, *blocks)


class _Unchecked:
    def read(self, offset: int, out: memoryview, fill: Fill) -> None:
        fill(offset, out)

    def finish(self, fill: Fill) -> None:
        pass


class _Whole:
    """One checksum of all bytes, compared only if they are read from the first to the last."""

    def __init__(self, checksum: str, num_bytes: int) -> None:
        self.checksum, self.num_bytes = checksum, num_bytes
        self.sum, self.position = WholeSum(), 0

    def read(self, offset: int, out: memoryview, fill: Fill) -> None:
        fill(offset, out)
        if offset == self.position:
            self.sum.update(out)
            self.position += len(out)

    def finish(self, fill: Fill) -> None:
        if self.position == self.num_bytes and self.sum.text() != self.checksum:
            found = f"sha256 is {self.sum.text()[:12]}..."
            raise Damage(0, self.num_bytes, found, f"{self.checksum[:12]}...")


class _Blocks:
    """A CRC32C of every block.

    Invariant: the bytes from the start of the block of ``position`` up to ``position`` were read,
    and ``value`` is their CRC; all blocks of which a byte was asked before were compared.
    """

    def __init__(self, num_bytes: int, block_bytes: int, expected: tuple[int, ...]) -> None:
        self.num_bytes, self.block_bytes, self.expected = num_bytes, block_bytes, expected
        self.position = self.value = 0
        # The last bytes that were read for a gap: from ``ahead_start`` to ``position``.
        self.ahead, self.ahead_start = memoryview(b""), 0

    def read(self, offset: int, out: memoryview, fill: Fill) -> None:
        while out:
            if self.ahead_start <= offset < self.ahead_start + len(self.ahead):
                at = offset - self.ahead_start
                piece = self.ahead[at : at + len(out)]
                out[: len(piece)] = piece
            elif offset == self.position:
                piece = out[: min(PIECE_BYTES, self._block_end() - offset)]
                fill(offset, piece)
                self._sum(piece)
            else:
                self._go_to(offset, fill)
                continue
            offset, out = offset + len(piece), out[len(piece) :]

    def finish(self, fill: Fill) -> None:
        while self.position % self.block_bytes and self.position < self.num_bytes:
            self._read_ahead(fill)
        self.ahead = memoryview(b"")

    def _go_to(self, offset: int, fill: Fill) -> None:
        """Read on until ``offset`` is the position or is in the bytes read ahead."""
        block = offset // self.block_bytes
        if offset < self.position or block != self.position // self.block_bytes:
            self.finish(fill)
            self.position, self.value = block * self.block_bytes, 0
        while self.position < offset:
            self._read_ahead(fill)
            if offset < self.position:
                return

    def _read_ahead(self, fill: Fill) -> None:
        room = self.ahead.obj if isinstance(self.ahead.obj, bytearray) else bytearray(AHEAD_BYTES)
        piece = memoryview(room)[: min(AHEAD_BYTES, self._block_end() - self.position)]
        fill(self.position, piece)
        self.ahead, self.ahead_start = piece, self.position
        self._sum(piece)

    def _block_end(self) -> int:
        block = self.position // self.block_bytes
        return min((block + 1) * self.block_bytes, self.num_bytes)

    def _sum(self, data: memoryview) -> None:
        """Add the bytes at the position; at the end of a block, compare."""
        end = self._block_end()
        self.value = crc32c(data, self.value)
        block = self.position // self.block_bytes
        self.position += len(data)
        if self.position < end:
            return
        found, self.value = self.value, 0
        if found != self.expected[block]:
            raise Damage(
                block * self.block_bytes, end,
                f"crc32c is {found:08x}", f"{self.expected[block]:08x}",
            )  # fmt: skip
