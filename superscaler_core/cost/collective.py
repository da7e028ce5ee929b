"""Collective: a measured ring collective of some devices of one host."""

from __future__ import annotations

from typing import NamedTuple


class Collective(NamedTuple):
    """An all-reduce of a host's devices, as a benchmark of the library measures it.

    Its time is ``latency_secs`` and 2 (n - 1) / n of the bytes at ``bytes_per_sec``, which is the
    benchmark's bus bandwidth (NVIDIA/nccl-tests, doc/PERFORMANCE.md). A reduce-scatter or an
    all-gather takes half of this.

    Attributes:
        latency_secs: time of a few bytes.
        bytes_per_sec: rate of many bytes.
        issue_secs: time in which a host issues the call; that of a kernel if None.
    """

    latency_secs: float
    bytes_per_sec: float
    issue_secs: float | None = None
