"""Pool: memory for the results of calls, kept for later results when a result is dropped.

Memory that comes fresh from the system is cleared page by page when it is first touched, which
takes several times as long as the copy into it. So freed blocks are used again.

The pool of a process is one sparse range of shared memory. Ranks of one machine map each other's
ranges when they meet, and then read the tensors in them in place. If the system refuses shared
memory, the range is private memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import select
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod

import numpy as np
import torch
from torch import Tensor

MIN_BYTES = 1 << 20
"""Smaller results come from torch, whose allocator keeps small blocks itself."""

MAX_KEPT_BYTES = 1 << 30
"""Bytes of unused blocks that are kept, at most; the block freed longest ago is dropped first."""

MAX_CAPACITY = 1 << 38
"""Largest size of a pool in bytes. A process maps the pools of all ranks of its machine, and its
address space is limited."""

_MAP_NORESERVE = 0x4000
_FORK_SECS = 60.0
"""Seconds that a forking process waits for its child to copy the tensors in the pool, at most."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.empty``, but large tensors on the CPU come from the pool."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < MIN_BYTES or device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    pool = pool_here()
    view = None if pool is None else pool.take(num_bytes)
    if view is None:
        return torch.empty(shape, dtype=dtype, device=device)
    # The storage of the tensor holds the view, so the block is freed when the storage is.
    return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes).view(dtype).view(tuple(shape))


def pool_here() -> Pool | None:
    """The pool of this process, made when it is first asked for; None if the system gives none."""
    global _pool, _is_made
    if not _is_made:
        with _lock:
            if not _is_made:
                _pool, _is_made = _made(), True
    return _pool


class Pool:
    """One range of memory, divided into blocks; other processes map it by ``fd`` (-1: private).

    Invariant: blocks in use, kept blocks and holes tile the range, and no two holes touch. Pages of
    a hole belong to the system. A freed block counts as in use until it has left ``_freed``.

    Raises:
        OSError: the system refuses such a range.
    """

    def __init__(self, capacity: int, *, is_shared: bool) -> None:
        self.capacity, self.fd = capacity, -1
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if is_shared:
            self.fd = os.memfd_create("rvdcomm-pool", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.fd)
            os.ftruncate(self.fd, capacity)
            flags = mmap.MAP_SHARED
        self._memory = mmap.mmap(self.fd, capacity, flags=flags | _MAP_NORESERVE)
        with suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = address_of(self._memory)
        self._holes = [(0, capacity)]
        # Sizes of blocks by offset. Kept blocks are in the order in which they were freed.
        self._used: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        # The garbage collector may free a block inside any statement, also of this class. So the
        # finalizer of a block only adds it here, which no thread can see half done.
        self._freed: deque[int] = deque()

    @property
    def kept_bytes(self) -> int:
        """Bytes of unused blocks."""
        with self._locked():
            return sum(self._kept.values())

    @property
    def has_shared(self) -> bool:
        """Whether the pool holds tensors that a forked process would share."""
        return self.fd >= 0 and bool(self._used)

    def take(self, num_bytes: int) -> memoryview | None:
        """A block of at least ``num_bytes``, in whole pages; None if there is no room.

        The block is freed when the last object that holds the view is gone.
        """
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._locked():
            offset = self._found(size)
            if offset is None:
                return None
            self._used[offset] = size
        view = memoryview(self._memory)[offset : offset + size]
        weakref.finalize(view, self._give_back, offset).atexit = False
        return view

    def location(self, address: int, num_bytes: int) -> int:
        """1 + the offset of memory in the pool if other processes can read all of it, else 0."""
        offset = address - self.address
        if self.fd < 0 or offset < 0 or offset + num_bytes > self.capacity:
            return 0
        return 1 + offset

    def clear(self) -> None:
        """Give all unused blocks back to the system."""
        with self._locked():
            for offset in list(self._kept):
                self._drop(offset)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of pools; before and after, no freed block waits to be kept."""
        with _lock:
            self._keep_freed()
            yield
        self._settle()

    def _give_back(self, offset: int) -> None:
        self._freed.append(offset)
        self._settle()

    def _settle(self) -> None:
        """Keep the freed blocks, unless the lock is held: then its holder does so afterwards."""
        while self._freed and _lock.acquire(blocking=False):
            try:
                self._keep_freed()
            finally:
                _lock.release()

    def _keep_freed(self) -> None:
        while self._freed:
            offset = self._freed.popleft()
            self._kept[offset] = self._used.pop(offset)
        excess = sum(self._kept.values()) - MAX_KEPT_BYTES
        while excess > 0:
            excess -= self._drop(next(iter(self._kept)))

    def _found(self, size: int) -> int | None:
        # The block that was freed last is taken first: its pages may still be in the caches.
        for offset in reversed(self._kept):
            if self._kept[offset] == size:
                del self._kept[offset]
                return offset
        index = next((i for i, (_, room) in enumerate(self._holes) if room >= size), None)
        if index is None:
            return None
        offset, room = self._holes[index]
        if self.fd >= 0:
            try:
                # Allocate all pages now: access to a page that cannot be allocated is a SIGBUS.
                os.posix_fallocate(self.fd, offset, size)
            except OSError:
                self._memory.madvise(mmap.MADV_REMOVE, offset, size)
                return None
        self._holes[index : index + 1] = [(offset + size, room - size)] if room > size else []
        return offset

    def _drop(self, offset: int) -> int:
        """Turn a kept block into a hole; returns its size in bytes."""
        size = self._kept.pop(offset)
        option = mmap.MADV_REMOVE if self.fd >= 0 else mmap.MADV_DONTNEED
        self._memory.madvise(option, offset, size)
        insort(self._holes, (offset, size))
        joined: list[tuple[int, int]] = []
        for start, room in self._holes:
            if joined and sum(joined[-1]) == start:
                start, room = joined[-1][0], joined.pop()[1] + room
            joined.append((start, room))
        self._holes = joined
        return size

    def copy_in_child(self) -> None:
        """After a fork: give the child its own copy of the tensors, at the same addresses.

        Raises:
            OSError: the system has not enough memory.
        """
        if not self.has_shared:
            return
        # The child takes no more blocks from this pool, which ends with its last tensor.
        self._kept, self._holes, self.fd = {}, [], -1
        for offset, size in self._used.items():
            _replace_by_copy(self.address + offset, size)


_lock = threading.Lock()
"""Held while pools change. No finalizer waits for it: its own thread may hold it."""
_pool: Pool | None = None
_is_made = False


def _made() -> Pool | None:
    capacity = min(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, MAX_CAPACITY)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        capacity = min(capacity, address_space // 8 // mmap.PAGESIZE * mmap.PAGESIZE)
    for is_shared in (True, False):
        with suppress(OSError, ValueError):
            return Pool(capacity, is_shared=is_shared)
    return None


def mapping_of(fd: int) -> mmap.mmap | None:
    """A read-only mapping of another process's pool; None if the system refuses the mapping.

    A pool is mapped once, however many groups this process is in.
    """
    status, flags = os.fstat(fd), mmap.MAP_SHARED | _MAP_NORESERVE
    known = _mapped.get(status.st_ino)
    if known is not None:
        return known
    try:
        made = mmap.mmap(fd, status.st_size, flags=flags, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    _mapped[status.st_ino] = made
    return made


_mapped: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Mappings by inode number, which no other file gets as long as this one is mapped."""


def address_of(memory: mmap.mmap) -> int:
    """The address at which a mapping begins in this process."""
    return int(np.frombuffer(memory, dtype=np.uint8, count=1).ctypes.data)


# --- forks --------------------------------------------------------------------------------------

_MREMAP_MOVE_TO = 3
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [*[ctypes.c_size_t] * 2, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mremap.argtypes = [*[ctypes.c_size_t] * 3, ctypes.c_int, ctypes.c_size_t]
_waiting: list[tuple[int, int]] = []
"""Pipes on which a process that forks waits for its child."""


def _replace_by_copy(address: int, size: int) -> None:
    """Replace shared memory by private memory with the same bytes, at the same address."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = _libc.mmap(0, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if copy != _FAILED:
        ctypes.memmove(copy, address, size)
        copy = _libc.mremap(copy, size, size, _MREMAP_MOVE_TO, address)
    if copy == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _before_fork() -> None:
    _lock.acquire()
    if _pool is not None and _pool.has_shared:
        _waiting.append(os.pipe())


def _after_fork_in_parent() -> None:
    """Wait until the child has its copy, because the caller may write to its tensors at once."""
    try:
        while _waiting:
            ours, theirs = _waiting.pop()
            os.close(theirs)
            # The child's end closes when the child has its copy, or dies. ``poll`` takes larger
            # descriptor numbers than ``select``.
            poller = select.poll()
            poller.register(ours, select.POLLIN)
            poller.poll(_FORK_SECS * 1e3)
            os.close(ours)
    finally:
        _lock.release()


def _after_fork_in_child() -> None:
    global _pool, _is_made
    try:
        if _pool is not None:
            _pool.copy_in_child()
    except OSError as error:
        # Without its own copy, the child would see the parent's later results in its tensors.
        os.write(2, f"rvdcomm: a forked process cannot copy its tensors: {error}\n".encode())
        os._exit(1)
    finally:
        _pool, _is_made = None, False
        while _waiting:
            for fd in _waiting.pop():
                os.close(fd)
        _lock.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
