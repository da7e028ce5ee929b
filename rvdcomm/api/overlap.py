"""Overlap: which tensors have bytes in common, exactly, also where they are strided views.

The engine knows tensors by their addresses, so addresses decide here too: two storages may be made
of one memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.exceptions import TooHardError
from numpy.typing import NDArray
from torch import Tensor

MAX_WORK = 1 << 16
"""Work of one exact comparison (``numpy.shares_memory``). Views of one tensor, whatever was sliced
and transposed, need less than a hundredth of it; strides made by hand may need any amount."""

PAIR_RUNS = 1 << 6
"""Comparing one pair exactly takes as long as sorting about this many runs."""

Dims = tuple[tuple[int, int], ...]
"""(stride in bytes, size) of every dim, longest stride first."""


class Region(NamedTuple):
    """The bytes of a tensor: runs of ``run`` bytes, the first at ``start``, the last until ``end``.

    Dims that have no other bytes (of one element, or expanded) are left out, and so are dims that
    only make the runs longer. A tensor without elements has no runs.
    """

    start: int
    end: int
    run: int
    dims: Dims
    name: str = ""

    @classmethod
    def of(cls, tensor: Tensor, name: str = "") -> Region:
        """The region of a tensor that has its elements in memory (``fault_of``)."""
        start = tensor.data_ptr()
        if tensor.is_contiguous() or not tensor.numel():
            num_bytes = tensor.nbytes if tensor.numel() else 0
            return cls(start, start + num_bytes, num_bytes, (), name)
        item = tensor.itemsize
        steps = zip(tensor.stride(), tensor.shape, strict=True)
        return strided(start, item, ((item * stride, size) for stride, size in steps), name)

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        count = 1 if self.run else 0
        for _, size in self.dims:
            count *= size
        return count

    def meets(self, other: Region) -> bool:
        """Whether the two have a byte in common.

        True, too, where it would take more than ``MAX_WORK`` to find out.
        """
        if self.start >= other.end or other.start >= self.end or not (self.run and other.run):
            return False
        if not (self.dims or other.dims):
            return True
        try:
            # Any number is allowed; the stubs of numpy know only those with a meaning of their own.
            limit: Any = MAX_WORK
            return bool(np.shares_memory(_array(self), _array(other), max_work=limit))
        except TooHardError:
            return True


def strided(start: int, item: int, steps: Iterable[tuple[int, int]], name: str = "") -> Region:
    """The region of a tensor with elements of ``item`` bytes, given (stride, size) of its dims.

    >>> strided(0, 4, [(24, 3), (4, 2)])
    Region(start=0, end=56, run=8, dims=((24, 3),), name='')
    """
    run, end = item, start + item
    outer: list[tuple[int, int]] = []
    for stride, size in sorted((stride, size) for stride, size in steps if stride and size > 1):
        end += stride * (size - 1)
        if stride == run and not outer:
            run *= size
        else:
            outer.append((stride, size))
    return Region(start, end, run, tuple(reversed(outer)), name)


def first_overlap(regions: Iterable[Region]) -> tuple[str, str] | None:
    """The names of two regions that have a byte in common; None if there are none.

    The time is that of sorting the regions. It is more only for strided ones that lie in each
    other's gaps, and whose rows are not of one length.

    Law (tests/api/test_overlap.py): equals the comparison of all pairs, byte by byte.
    """
    for cluster in _clusters(sorted(each for each in regions if each.run)):
        if len(cluster) > 1 and (found := _overlap_within(cluster)):
            return found
    return None


class RegionIndex:
    """Finds those of some regions that meet another one, without a scan if they lie apart.

    Law (tests/api/test_overlap.py): ``meeting`` gives the result of a scan.
    """

    def __init__(self, regions: Iterable[Region]) -> None:
        self._clusters = list(_clusters(sorted(each for each in regions if each.run)))
        self._starts = np.array([cluster[0].start for cluster in self._clusters], np.uint64)
        self._ends = np.array(
            [max(each.end for each in cluster) for cluster in self._clusters], np.uint64
        )

    def meeting(self, regions: Sequence[Region]) -> Iterator[tuple[Region, list[str]]]:
        """Every one of ``regions`` that meets some of the index, and the names of those."""
        starts, ends = (
            np.array([getattr(each, side) for each in regions], np.uint64)
            for side in ("start", "end")
        )
        # Clusters lie apart, so their starts and their ends have one order.
        first = np.searchsorted(self._ends, starts, side="right")
        last = np.searchsorted(self._starts, ends, side="left")
        for i in np.flatnonzero(first < last).tolist():
            region = regions[i]
            near = self._clusters[first[i] : last[i]]
            names = [each.name for cluster in near for each in cluster if region.meets(each)]
            if names:
                yield region, names


def _clusters(ordered: Iterable[Region]) -> Iterator[list[Region]]:
    """Split regions, which ascend, where all that begin before end before all others begin."""
    cluster: list[Region] = []
    end = 0
    for region in ordered:
        if cluster and region.start >= end:
            yield cluster
            cluster = []
        cluster.append(region)
        end = max(end, region.end)
    if cluster:
        yield cluster


def _overlap_within(cluster: Sequence[Region]) -> tuple[str, str] | None:
    """``first_overlap`` of regions that ascend and lie in each other's range."""
    inner = _without_rows(cluster)
    if inner is not None:
        return first_overlap(inner)
    num_pairs = len(cluster) * (len(cluster) - 1) // 2
    if num_pairs * PAIR_RUNS > sum(region.num_runs for region in cluster):
        return _overlap_of_runs(cluster)
    met = ((a.name, b.name) for a, b in combinations(cluster, 2) if a.meets(b))
    return next(met, None)


def _without_rows(cluster: Sequence[Region]) -> list[Region] | None:
    """What the regions have in the first row, if all have equal rows; None if they do not.

    Columns of one matrix are an example: they overlap if they do in its first row.
    """
    if len({region.dims[:1] for region in cluster}) > 1 or not cluster[0].dims:
        return None
    stride, size = cluster[0].dims[0]
    found = [
        Region(start, end - stride * (size - 1), run, dims[1:], name)
        for start, end, run, dims, name in cluster
    ]
    is_one_row = max(region.end for region in found) - found[0].start <= stride
    return found if is_one_row else None


def _overlap_of_runs(cluster: Sequence[Region]) -> tuple[str, str] | None:
    """``first_overlap`` by sorting all runs: if any two overlap, then so do two neighbours."""
    runs = [_runs(region) for region in cluster]
    starts = np.concatenate(runs)
    owners = np.repeat(np.arange(len(cluster)), [len(each) for each in runs])
    order = np.argsort(starts, kind="stable")
    starts, owners = starts[order], owners[order]
    ends = starts + np.array([region.run for region in cluster])[owners]
    found = np.flatnonzero((ends[:-1] > starts[1:]) & (owners[:-1] != owners[1:]))
    if not len(found):
        return None
    first, second = sorted(int(owner) for owner in owners[found[0] : found[0] + 2])
    return cluster[first].name, cluster[second].name


def _runs(region: Region) -> NDArray[np.int64]:
    """The start of every run."""
    starts = np.array([region.start], np.int64)
    for stride, size in region.dims:
        starts = np.add.outer(starts, stride * np.arange(size)).reshape(-1)
    return starts


class _Pointer:
    """Memory as numpy describes it. Arrays of it are only compared, never read."""

    def __init__(self, region: Region) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (*(size for _, size in region.dims), region.run),
            "strides": (*(stride for stride, _ in region.dims), 1),
            "typestr": "|u1",
            "data": (region.start, True),
        }


def _array(region: Region) -> NDArray[Any]:
    return np.asarray(_Pointer(region))
