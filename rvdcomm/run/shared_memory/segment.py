"""Segments: anonymous shared memory of one rank, mapped by all ranks of its domain.

A segment is a page with the rank's signals (csrc/include/rvdcomm/signal.h) and, behind it, an arena
that only grows. It has no name in any file system, so the kernel frees it when the last process
that maps it ends, however that process ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress

from rvdcomm import _C
from rvdcomm.errors import CommError

HEADER_BYTES = mmap.PAGESIZE
assert HEADER_BYTES >= _C.HEADER_BYTES

_REMEDIES = {
    errno.EFBIG: "raise its limit on file size (ulimit -f)",
    errno.EMFILE: "raise its limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files",
    errno.ENOMEM: "free memory, or raise the limit of its container or address space (ulimit -v)",
    errno.ENOSPC: "free memory, or raise the limit of its container",
}


class SharedMemoryError(CommError):
    """A rank cannot share memory with the others; all ranks of its domain raise the same one."""


class MemorySegment:
    """One rank's segment, as mapped in this process.

    Invariant: the mapped arena is never longer than the owner's allocation, so no access to it can
    fail. A mapping lives until its last view is gone.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.header = mmap.mmap(fd, HEADER_BYTES)
        self._arena: mmap.mmap | None = None

    @classmethod
    def create(cls) -> MemorySegment:
        """A segment that this rank owns, with an arena of no bytes.

        Raises:
            OSError: the system gives no memory or no file descriptor.
        """
        fd = os.memfd_create("rvdcomm", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, HEADER_BYTES)
            segment = cls(fd)
        except OSError:
            os.close(fd)
            raise
        _C.format_header(segment.header)
        return segment

    @property
    def fd(self) -> int:
        """The descriptor by which other processes map the segment."""
        return self._fd

    @property
    def num_bytes(self) -> int:
        """Length of the mapped arena."""
        return 0 if self._arena is None else len(self._arena)

    @property
    def address(self) -> int:
        """The address of the arena in this process; 0 while it has no bytes."""
        if self._arena is None:
            return 0
        return ctypes.addressof(ctypes.c_char.from_buffer(self._arena))

    def arena(self, num_bytes: int) -> memoryview:
        """The first bytes of the arena."""
        if num_bytes > self.num_bytes:
            raise ValueError(
                f"{num_bytes} bytes of an arena of {self.num_bytes} bytes were asked for; "
                "reserve them first."
            )
        return memoryview(self._arena or bytearray())[:num_bytes]

    def allocate(self, num_bytes: int) -> None:
        """Allocate all pages of the owner's arena now: access to a missing page is a SIGBUS.

        Raises:
            OSError: the system has not enough memory.
        """
        os.posix_fallocate(self._fd, HEADER_BYTES, num_bytes)

    def release(self) -> None:
        """Give back memory that was allocated but is not part of the mapped arena."""
        os.ftruncate(self._fd, HEADER_BYTES + self.num_bytes)

    def mapping(self, num_bytes: int) -> mmap.mmap:
        """A mapping of the first ``num_bytes`` of the arena, which the owner has allocated."""
        mapping = mmap.mmap(self._fd, num_bytes, offset=HEADER_BYTES)
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def use(self, mapping: mmap.mmap) -> None:
        """Make a mapping (see ``mapping``) the arena."""
        self._arena = mapping

    def close(self) -> None:
        """Close the descriptor; mappings are released with their last view."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def reason_of(error: OSError) -> str:
    """The system's error text, and what to do about the error."""
    remedy = _REMEDIES.get(error.errno or 0)
    text = os.strerror(error.errno) if error.errno else str(error)
    return f"{text}; {remedy}." if remedy else f"{text}."


def whole_pages(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
