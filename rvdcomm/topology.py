"""Topology: the boundaries that bytes cross (rank, host, rack, ...) and how fast each one is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath

from rvdcomm.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Link:
    """A full-duplex port: ``alpha_secs`` a round of messages, ``bytes_per_sec`` each way."""

    alpha_secs: float
    bytes_per_sec: float

    def __post_init__(self) -> None:
        if self.alpha_secs < 0 or self.bytes_per_sec <= 0:
            raise LayoutError(
                f"link with alpha_secs={self.alpha_secs}, bytes_per_sec={self.bytes_per_sec}: "
                "alpha_secs must be at least 0 and bytes_per_sec above 0."
            )


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of ranks, and the port through which each group speaks to all outside it."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    link: Link


@dataclass(frozen=True, slots=True)
class Run:
    """A level whose groups are runs of ``size`` ranks one after another, from rank ``first``."""

    first: int
    size: int
    num_groups: int

    def holds(self, ranks: range) -> bool:
        """Whether all these ranks are in some group."""
        stop = self.first + self.size * self.num_groups
        return self.first <= ranks.start and ranks.stop <= stop

    def groups(self, ranks: range) -> range:
        """Indices of the groups that these ranks are in."""
        low, high = ranks.start - self.first, ranks.stop - self.first
        return range(low // self.size, (high - 1) // self.size + 1)

    def block(self, ranks: range) -> int | None:
        """How many of these ranks every group has; None if some have more than others."""
        num_groups = len(self.groups(ranks))
        if num_groups == 1:
            return len(ranks)
        first = self.size - (ranks.start - self.first) % self.size
        is_equal = first * num_groups == len(ranks) and (num_groups == 2 or first == self.size)
        return first if is_equal else None


def _run_of(groups: tuple[tuple[int, ...], ...]) -> Run | None:
    if not groups or not groups[0]:
        return None
    first, size = groups[0][0], len(groups[0])
    run = Run(first, size, len(groups))
    starts = range(first, first + size * len(groups), size)
    is_run = all(
        group == tuple(range(start, start + size))
        for start, group in zip(starts, groups, strict=True)
    )
    return run if is_run else None


@dataclass(frozen=True)
class Topology:
    """Levels from the innermost out: every rank's own port, then every host's shared NIC, ...

    Bytes between two ranks pass the ports of every group that holds one but not the other. Ranks
    of ``levels[0]`` are alone in their groups; the groups of each level tile those of the next.

    Raises:
        LayoutError: the groups of a level do not hold the groups of the level below.
    """

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise LayoutError("a topology needs a level, whose groups are single ranks.")
        if any(len(group) != 1 for group in self.levels[0].groups):
            raise LayoutError(
                f"the lowest level, {self.levels[0].name!r}, must have every rank in a group of "
                f"its own, got {self.levels[0].groups}."
            )
        ranks = sorted(rank for group in self.levels[0].groups for rank in group)
        if len(set(ranks)) != len(ranks):
            raise LayoutError(f"topology names a rank twice: {ranks}.")
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            home = {rank: i for i, group in enumerate(level.groups) for rank in group}
            for group in below.groups:
                if len({home.get(rank) for rank in group}) != 1 or group[0] not in home:
                    raise LayoutError(
                        f"{below.name} {group} is not inside one {level.name} of the topology."
                    )

        # What takes time in proportion to the ranks is done here: a plan starts from values.
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
    def preset(cls, name: str, num_hosts: int, ranks_per_host: int) -> Topology:
        """A cluster that people have: one of ``PRESETS``, ranks numbered host by host."""
        if name not in PRESETS:
            raise LayoutError(f"no preset {name!r}; the presets are {', '.join(sorted(PRESETS))}.")
        intra, inter = PRESETS[name]
        return cls.hosts(blocks(num_hosts, ranks_per_host), intra, inter)

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
    def runs(self) -> tuple[Run, ...] | None:
        """Every level as runs of ranks; None if the groups of a level are no equal runs."""
        runs = tuple(_run_of(level.groups) for level in self.levels)
        return None if None in runs else tuple(run for run in runs if run is not None)

    @cached_property
    def order(self) -> dict[int, tuple[int, ...]]:
        """Sort key of every rank that keeps the groups of every level together."""
        return {
            rank: (*(home[rank] for home in reversed(self.homes[1:])), rank) for rank in self.ranks
        }

    @cached_property
    def _hash(self) -> int:
        return hash(self.levels)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # Another process hashes texts differently: nothing that was cached may travel.
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
        """Levels whose ports a byte from ``a`` to ``b`` passes; 0 from a rank to itself."""
        if a == b:
            return 0
        return next(
            (i for i, home in enumerate(self.homes) if i and home[a] == home[b]), len(self.levels)
        )

    def save(self, path: str | FilePath) -> None:
        """Write this topology as JSON; ``load`` reads it."""
        levels = [
            {
                "name": level.name,
                "groups": [list(group) for group in level.groups],
                "alpha_secs": level.link.alpha_secs,
                "bytes_per_sec": level.link.bytes_per_sec,
            }
            for level in self.levels
        ]
        FilePath(path).write_text(json.dumps({"levels": levels}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | FilePath) -> Topology:
        """Read a topology that ``save`` wrote."""
        try:
            levels = json.loads(FilePath(path).read_text())["levels"]
            return cls(
                tuple(
                    Level(
                        level["name"],
                        tuple(tuple(group) for group in level["groups"]),
                        Link(level["alpha_secs"], level["bytes_per_sec"]),
                    )
                    for level in levels
                )
            )
        except (json.JSONDecodeError, KeyError, TypeError, LayoutError) as error:
            raise LayoutError(f"{path} is not a topology: {error!r}.") from None


def blocks(num_hosts: int, ranks_per_host: int) -> Sequence[range]:
    """Ranks of every host when they are numbered host by host."""
    return [range(h * ranks_per_host, (h + 1) * ranks_per_host) for h in range(num_hosts)]


# Vendors' figures, one direction, after protocol overhead; alphas are typical small-message times.
# `calibrate` measures the real ones.
PRESETS: dict[str, tuple[Link, Link]] = {
    # NVLink 4, 450 GB/s a GPU; eight 400 Gbit/s NICs a host.
    "h100": (Link(3e-6, 380e9), Link(12e-6, 8 * 45e9)),
    # NVLink 3, 300 GB/s a GPU; eight 200 Gbit/s NICs a host.
    "a100": (Link(3e-6, 240e9), Link(12e-6, 8 * 22e9)),
    # NVLink 2, 150 GB/s a GPU; one 100 Gbit/s InfiniBand NIC a host (SuperScaler's test bed).
    "v100": (Link(5e-6, 120e9), Link(15e-6, 11e9)),
    # Processes on CPU hosts with 10 Gbit/s Ethernet between them.
    "ethernet": (Link(20e-6, 3e9), Link(60e-6, 1.15e9)),
}
DEFAULT_LINK = Link(alpha_secs=5e-6, bytes_per_sec=200e9)
