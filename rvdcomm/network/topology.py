"""Topology: the boundaries that bytes cross (rank, host, rack, ...) and how fast each one is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from pathlib import Path as FilePath
from typing import Any

from rvdcomm.errors import LayoutError
from rvdcomm.json_file import entry, read_json, write_json
from rvdcomm.layout.layout import MAX_RANK
from rvdcomm.network.link import Link
from rvdcomm.network.presets import preset_of
from rvdcomm.text import quoted

FILE_VERSION = 1
"""Version of the JSON that ``Topology.save`` writes."""

MAX_FILE_BYTES = 8 << 20
"""100,000 ranks on three levels take 5 MB. Reading the worst file of 8 MiB takes 3 s and 500 MB."""

MAX_FILE_LEVELS, MAX_NAME_LENGTH = 16, 64
"""Limits of a file: the number of levels, and the characters of a level's name."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level: groups of ranks, and the port that connects each group with all ranks outside."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    link: Link


@dataclass(frozen=True, slots=True)
class LevelRuns:
    """A level whose groups are runs of ``size`` consecutive ranks, from rank ``first`` on."""

    first: int
    size: int
    num_groups: int

    def holds(self, ranks: range) -> bool:
        """Whether each of these ranks is in some group."""
        stop = self.first + self.size * self.num_groups
        return self.first <= ranks.start and ranks.stop <= stop

    def groups(self, ranks: range) -> range:
        """Indices of the groups that these ranks are in."""
        low, high = ranks.start - self.first, ranks.stop - self.first
        return range(low // self.size, (high - 1) // self.size + 1)

    def block(self, ranks: range) -> int | None:
        """The number of these ranks in each of their groups; None if the groups differ in this."""
        num_groups = len(self.groups(ranks))
        if num_groups == 1:
            return len(ranks)
        first = self.size - (ranks.start - self.first) % self.size
        is_equal = first * num_groups == len(ranks) and (num_groups == 2 or first == self.size)
        return first if is_equal else None


def _run_of(groups: tuple[tuple[int, ...], ...]) -> LevelRuns | None:
    if not groups or not groups[0]:
        return None
    first, size = groups[0][0], len(groups[0])
    run = LevelRuns(first, size, len(groups))
    starts = range(first, first + size * len(groups), size)
    is_run = all(
        group == tuple(range(start, start + size))
        for start, group in zip(starts, groups, strict=True)
    )
    return run if is_run else None


@dataclass(frozen=True)
class Topology:
    """The levels of a cluster, innermost first: every rank's port, every host's shared NIC, ...

    Bytes between two ranks pass the port of every group that holds exactly one of them. In
    ``levels[0]`` every rank is its own group. Each group of a level consists of whole groups of the
    level below.

    Raises:
        LayoutError: the groups of a level do not consist of whole groups of the level below.
    """

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise LayoutError("a topology needs a level, whose groups are single ranks.")
        if any(len(group) != 1 for group in self.levels[0].groups):
            raise LayoutError(
                f"the lowest level, {self.levels[0].name!r}, must have every rank in a group of "
                f"its own, got {quoted(self.levels[0].groups)}."
            )
        for level in self.levels:
            _check_level(level)
        for below, level in pairwise(self.levels):
            _check_tiles(below, level)

        # These take time in proportion to the ranks, so they are computed here and not per plan.
        _ = self._hash, self.runs

    @classmethod
    def single_host(cls, num_ranks: int, alpha_secs: float, bytes_per_sec: float) -> Topology:
        """Ranks ``0`` to ``num_ranks - 1``, each with a port of its own."""
        link = Link(alpha_secs, bytes_per_sec)
        return cls((Level("rank", tuple((rank,) for rank in range(num_ranks)), link),))

    @classmethod
    def hosts(cls, hosts: Iterable[Iterable[int]], intra: Link, inter: Link) -> Topology:
        """Hosts of ranks: ``intra`` is every rank's port, ``inter`` every host's shared NIC."""
        groups = tuple(tuple(sorted(host)) for host in hosts)
        ports = tuple((rank,) for host in groups for rank in host)
        return cls((Level("rank", ports, intra), Level("host", groups, inter)))

    @classmethod
    def preset(cls, name: str, *counts: int) -> Topology:
        """A common cluster; ranks are numbered host by host.

        >>> [len(level.groups) for level in Topology.preset("dgx-h100", 2, 32, 8).levels]
        [512, 64, 2]

        Args:
            name: one of ``PRESETS``.
            counts: ``(num_hosts, ranks_per_host)``, or with a third level
                ``(num_pods, hosts_per_pod, ranks_per_host)``. With ``(num_hosts,)`` alone, hosts
                have the preset's usual number of ranks.

        Raises:
            LayoutError: there is no such preset, or it has fewer levels than ``counts``.
        """
        found = preset_of(name)
        if len(counts) == 1:
            counts = (*counts, found.ranks_per_host)
        num_ranks = prod(counts)
        if not 2 <= len(counts) <= len(found.links) or min(counts) < 1 or num_ranks > MAX_RANK:
            raise LayoutError(
                f"preset {name!r} of {'x'.join(map(str, counts)) or 'no'} groups: expected hosts x "
                f"ranks or pods x hosts x ranks, each at least 1, and at most {MAX_RANK} ranks."
            )
        sizes = accumulate(reversed(counts[1:]), mul, initial=1)
        return cls(
            tuple(
                Level(level, tuple(map(tuple, blocks(num_ranks // size, size))), link)
                for level, link, size in zip(found.names, found.links, sizes, strict=False)
            )
        )

    @cached_property
    def ranks(self) -> frozenset[int]:
        """All ranks of the topology."""
        return frozenset(rank for group in self.levels[0].groups for rank in group)

    @cached_property
    def homes(self) -> tuple[dict[int, int], ...]:
        """For every level, the index of each rank's group."""
        return tuple(
            {rank: i for i, group in enumerate(level.groups) for rank in group}
            for level in self.levels
        )

    @cached_property
    def runs(self) -> tuple[LevelRuns, ...] | None:
        """Every level as runs of ranks; None if some level has groups that are not equal runs."""
        runs = tuple(_run_of(level.groups) for level in self.levels)
        return None if None in runs else tuple(run for run in runs if run is not None)

    @cached_property
    def latencies(self) -> tuple[float, ...]:
        """For every level, the seconds of a message that crosses it: of its slowest port.

        A message that crosses a level crosses all levels inside it, too.
        """
        return tuple(accumulate((level.link.alpha_secs for level in self.levels), max))

    @property
    def least_alpha_secs(self) -> float:
        """No message takes fewer seconds."""
        return self.latencies[0]

    @cached_property
    def order(self) -> dict[int, tuple[int, ...]]:
        """Sort keys, by rank; ranks in this order are together in the groups of every level."""
        return {
            rank: (*(home[rank] for home in reversed(self.homes[1:])), rank) for rank in self.ranks
        }

    @cached_property
    def _hash(self) -> int:
        return hash(self.levels)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # Another process hashes texts differently, so cached hashes must not travel.
        return {"levels": self.levels}

    def check_ranks(self, ranks: Iterable[int]) -> None:
        """Raise a LayoutError that names the ranks this topology does not know."""
        if isinstance(ranks, range) and self.runs is not None and self.runs[0].holds(ranks):
            return
        missing = sorted(set(ranks) - self.ranks)
        if missing:
            raise LayoutError(
                f"ranks {missing} are not in the topology, which has {sorted(self.ranks)}."
            )

    def distance(self, a: int, b: int) -> int:
        """Number of levels whose ports a byte from ``a`` to ``b`` passes; 0 if ``a == b``."""
        if a == b:
            return 0
        for level in range(1, len(self.levels)):
            if self.home(level, a) == self.home(level, b):
                return level
        return len(self.levels)

    def home(self, level: int, rank: int) -> int:
        """The index of the group of ``level`` that ``rank`` is in."""
        if self.runs is None:
            return self.homes[level][rank]
        return (rank - self.runs[level].first) // self.runs[level].size

    def to_json(self) -> dict[str, Any]:
        """The topology as plain values, which ``save`` writes."""
        levels = [
            {
                "name": level.name,
                "groups": [list(group) for group in level.groups],
                "alpha_secs": level.link.alpha_secs,
                "bytes_per_sec": level.link.bytes_per_sec,
            }
            for level in self.levels
        ]
        return {"version": FILE_VERSION, "levels": levels}

    def save(self, path: str | FilePath, notes: Mapping[str, Any] | None = None) -> None:
        """Write this topology as JSON, which ``load`` reads; ``notes`` adds entries for people.

        Raises:
            LayoutError: a port has an infinite bandwidth, which JSON cannot express.
            OSError: the file cannot be written. An existing file stays as it was.
        """
        write_json(path, {**self.to_json(), **(notes or {})})

    @classmethod
    def load(cls, path: str | FilePath) -> Topology:
        """Read a topology that ``save`` wrote; entries with other names are ignored.

        Raises:
            LayoutError: the file is not a topology, or has another version. Reading takes bounded
                time and memory, whatever the file contains.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_json(read_json(path, MAX_FILE_BYTES))
        except LayoutError as error:
            raise LayoutError(f"{path} is not a topology: {str(error).rstrip('.')}.") from None

    @classmethod
    def from_json(cls, values: Any) -> Topology:
        """The topology of plain values as ``to_json`` gives them; they are not trusted.

        Raises:
            LayoutError: they are no topology, or of another version.
        """
        # Files of the first release have no version.
        version = values.get("version", 1) if isinstance(values, dict) else 1
        if version != FILE_VERSION:
            raise LayoutError(
                f"it is of version {quoted(version)}, this release reads {FILE_VERSION}"
            )
        levels = entry(values, "levels", list)
        if len(levels) > MAX_FILE_LEVELS:
            raise LayoutError(f"it has {len(levels)} levels, more than {MAX_FILE_LEVELS}")
        return cls(tuple(map(_level_of, levels)))


def _level_of(values: Any) -> Level:
    """A level from plain values; each value is checked."""
    name, groups = entry(values, "name", str), entry(values, "groups", list)
    if len(name) > MAX_NAME_LENGTH:
        raise LayoutError(f"name {quoted(name)} is longer than {MAX_NAME_LENGTH} characters")
    for group in groups:
        if type(group) is not list or any(type(rank) is not int for rank in group):
            raise LayoutError(
                f"groups of {quoted(name)} must be lists of ranks, got {quoted(group)}"
            )
    link = Link(entry(values, "alpha_secs", float), entry(values, "bytes_per_sec", float))
    return Level(name, tuple(map(tuple, groups)), link)


def _check_level(level: Level) -> None:
    if not isinstance(level.link, Link):
        raise LayoutError(
            f"{level.name} of the topology has the link {quoted(level.link)}; give a "
            "Link(alpha_secs, bytes_per_sec)."
        )
    ranks = sorted(rank for group in level.groups for rank in group)
    if len(set(ranks)) != len(ranks):
        raise LayoutError(f"topology names a rank twice: {quoted(ranks)}.")
    if not ranks or not 0 <= ranks[0] <= ranks[-1] <= MAX_RANK:
        named = f"{quoted(ranks[0])} to {quoted(ranks[-1])}" if ranks else "none"
        raise LayoutError(f"{level.name} of the topology has ranks {named}; use 0 to {MAX_RANK}.")


def _check_tiles(below: Level, level: Level) -> None:
    """Raise unless each group of a level is made of whole groups of the level below."""
    home = {rank: i for i, group in enumerate(level.groups) for rank in group}
    for group in below.groups:
        if len({home.get(rank) for rank in group}) != 1 or group[0] not in home:
            raise LayoutError(
                f"{below.name} {quoted(group)} is not inside one {level.name} of the topology."
            )
    num_ranks = sum(map(len, below.groups))
    if num_ranks != len(home):
        raise LayoutError(
            f"{level.name} has {len(home)} ranks and {below.name}, the level below, {num_ranks}; "
            "every level of a topology has all its ranks."
        )


def blocks(num_hosts: int, ranks_per_host: int) -> Sequence[range]:
    """Ranks of every host when they are numbered host by host."""
    return [range(h * ranks_per_host, (h + 1) * ranks_per_host) for h in range(num_hosts)]


DEFAULT_LINK = Link(alpha_secs=5e-6, bytes_per_sec=200e9)
