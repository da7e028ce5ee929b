"""Meter: speeds of a device, from calls of a few sizes on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median
from time import perf_counter, thread_time

import torch

from superscaler_core.cost.reach import Reach

MIN_SAMPLES, MAX_SAMPLES = 3, 200
"""Samples of a call; the median is used."""

NUM_ISSUED, NUM_REPEATED = 100, 10
"""Launches that a host issues without waiting for its device, and calls in a graph."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that are measured.

    Attributes:
        stream_bytes: of the copies that measure the memory; no cache holds the last.
        product_rows: rows and columns of the products.
    """

    stream_bytes: tuple[int, ...]
    product_rows: tuple[int, ...]


SIZES = {
    "cpu": Sizes((64 << 10, 2 << 20, 64 << 20), (32, 128, 512)),
    "cuda": Sizes((1 << 20, 32 << 20, 1 << 30), (256, 1024, 4096, 8192)),
}
"""By the type of the device."""


def _when_done() -> float:
    """Seconds, after all kernels of the device are done."""
    torch.cuda.synchronize()
    return perf_counter()


@dataclass(frozen=True)
class Meter:
    """Measures a device.

    Times on a CPU are processor times of this thread, which computes alone (``one_thread``), so
    other processes on its core do not matter. Those on a GPU are of calls in a graph, which no host
    delays.

    Attributes:
        device: a CPU or a CUDA device; the current one of its type is measured.
        secs: approximate seconds that a call is measured.
    """

    device: torch.device
    secs: float = 0.02

    @property
    def sizes(self) -> Sizes:
        """The sizes for this type of device."""
        return SIZES[self.device.type]

    @property
    def is_async(self) -> bool:
        """Whether the device executes what its host issues, while the host goes on."""
        return self.device.type == "cuda"

    def timed(self, work: Callable[[], object]) -> float:
        """The median time of one call on the device, in seconds."""
        work()
        if not self.is_async:
            return self._median(work, thread_time)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(NUM_REPEATED):
                work()
        return self._median(graph.replay, _when_done) / NUM_REPEATED

    def _median(self, work: Callable[[], object], clock: Callable[[], float]) -> float:
        times = []
        for _ in samples_in(self.secs):
            start = clock()
            work()
            times.append(clock() - start)
        return median(times)

    def launch_secs(self) -> float:
        """Seconds of an op that computes next to nothing, on the device alone."""
        one = torch.zeros(1, device=self.device)
        return self.timed(lambda: one + one)

    def issue_secs(self) -> float:
        """Seconds that a host needs to issue a kernel from Python; 0 where it is the device."""
        if not self.is_async:
            return 0.0
        one, times = torch.zeros(1, device=self.device), []
        for _ in samples_in(self.secs):
            start = _when_done()
            for _ in range(NUM_ISSUED):
                torch.add(one, one, out=one)
            times.append((perf_counter() - start) / NUM_ISSUED)
        torch.cuda.synchronize()
        return median(times)

    def streams(self) -> tuple[float, Reach]:
        """The memory's peak in bytes per second, and the share of it by bytes read and written."""
        launch_secs, found = self.launch_secs(), []
        for num_bytes in self.sizes.stream_bytes:
            src, dst = torch.rand(2, num_bytes // 4, device=self.device)
            taken = self.timed(partial(dst.copy_, src))
            found.append((2.0 * num_bytes, 2 * num_bytes / _beyond(taken, launch_secs)))
        return _peak_and_reach(found)

    def products(self, dtype: str) -> tuple[float, Reach]:
        """The peak of products in operations per second, and the share of it by operations.

        A larger product is taken to be at least as fast as a smaller one: planners' bounds rely on
        this, and effects of caches and other processes on one size are noise here.
        """
        launch_secs, found = self.launch_secs(), []
        for rows in self.sizes.product_rows:
            # Not of equal values: a device that draws less power for them runs faster.
            square = torch.rand(rows, rows, device=self.device).to(getattr(torch, dtype))
            taken = self.timed(partial(torch.mm, square, square))
            found.append((2.0 * rows**3, 2 * rows**3 / _beyond(taken, launch_secs)))
        amounts, speeds = zip(*found, strict=True)
        return _peak_and_reach(zip(amounts, accumulate(speeds, max), strict=True))

    def host_bytes_per_sec(self) -> float | None:
        """Bytes per second from the host's pinned memory; None where device and host are one."""
        if not self.is_async:
            return None
        num_bytes = self.sizes.stream_bytes[1]
        src = torch.zeros(num_bytes // 4, pin_memory=True)
        dst = torch.zeros(num_bytes // 4, device=self.device)
        return num_bytes / self.timed(lambda: dst.copy_(src, non_blocking=True))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of this process, as a rank does; the number is restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def samples_in(secs: float) -> Iterable[int]:
    """Count samples until enough time has passed, at least ``MIN_SAMPLES``."""
    end = perf_counter() + secs
    for i in range(MAX_SAMPLES):
        if i >= MIN_SAMPLES and perf_counter() > end:
            return
        yield i


def _beyond(taken: float, launch_secs: float) -> float:
    """The part of a time that a profile does not count as a launch; at least half of it."""
    return max(taken - launch_secs, taken / 2)


def _peak_and_reach(speeds: Iterable[tuple[float, float]]) -> tuple[float, Reach]:
    """The greatest speed, and the share of it that each amount reaches."""
    found = [*speeds]
    peak = max(speed for _, speed in found)
    return peak, Reach.lawful((amount, speed / peak) for amount, speed in found)
