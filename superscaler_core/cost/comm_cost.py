"""Communication costs: the load on the links of a topology, in whole picoseconds (*ticks*).

Sums of whole numbers are exact, so equal runs have equal times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise, permutations
from math import prod

import rvdcomm as rv
from superscaler_core.cost.collective import Collective
from superscaler_core.errors import PlanError
from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.known import ByKey, remembers
from superscaler_core.materialize.moved_home import moved_home
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.plan import Device

TICKS_PER_SEC = 10**12

METHODS = ("rvd", "ring", "p2p")
"""How tensors move: by rvdcomm's plans; by plans that know no hosts, whose collectives go around a
flat ring of their ranks; or every reader pulls what it needs from the writers."""

RINGS = ("reduce_scatter", "all_reduce", "all_gather")
"""Collectives that can go around a ring."""

MAX_COMM_COSTS = 1 << 16
"""Bound on cached prices of transfers, and of calls that move several."""

Port = tuple[int, int, str]
"""Level of the topology, group of that level, and "in" or "out"; or ``(HOST, device, "copy")``."""

HOST = -1
"""Level of the ports between devices and the memory of their hosts."""

HOST_NAME = "host memory"

_Ends = tuple[rv.Layout, rv.Layout, str]
"""The src and dst layouts, and the dtype."""

Traffic = Mapping[tuple[Device, Device], int]
"""Bytes from device to device."""


def ticks(secs: float) -> int:
    """Seconds as whole picoseconds."""
    return round(secs * TICKS_PER_SEC)


@dataclass(frozen=True)
class CommCost:
    """One call of communication.

    Attributes:
        devices: all that take part.
        ticks: its duration without other traffic.
        ports: time that it keeps each port busy, of devices (level 0) and of shared links.
        level_bytes: bytes sent, by the highest level whose ports they pass; the last entry is
            between devices and host memory.
        level: the highest level with any bytes; 0 if nothing moves.
        ring: the most devices of one measured collective; 0 if there is none.
    """

    devices: tuple[Device, ...]
    ticks: int
    ports: tuple[tuple[Port, int], ...]
    level_bytes: tuple[int, ...]
    level: int
    ring: int = 0

    @cached_property
    def shared(self) -> tuple[tuple[Port, int], ...]:
        """The ports at which calls wait for each other; not those between devices of a host."""
        return tuple((port, busy) for port, busy in self.ports if port[0] != 0)


@dataclass(frozen=True)
class _Step:
    """Simultaneous moves: a latency, then bytes through ports, of which the busiest counts."""

    alpha_secs: float
    bytes_secs: float
    ports: Mapping[Port, float]
    level_bytes: tuple[int, ...]
    ring: int = 0

    def on(self, devices: Mapping[Device, Device], topology: rv.Topology) -> _Step:
        """The same step on other devices, given by the step's own devices."""
        groups = {
            (level, topology.home(level, device)): topology.home(level, new)
            for device, new in devices.items()
            for level in range(len(topology.levels))
        }
        ports = {
            (level, groups[level, group], way): secs
            for (level, group, way), secs in self.ports.items()
        }
        return replace(self, ports=ports)


@dataclass(frozen=True, slots=True)
class CallSecs:
    """The duration of one communication call of all ``devices`` without other traffic.

    It is the latency of its rounds, which tensors in one call share, and the time of the bytes
    through the busiest port, step by step.
    """

    devices: tuple[Device, ...]
    latency_secs: float
    bytes_secs: float

    @property
    def secs(self) -> float:
        """Seconds of the latency and the bytes."""
        return self.latency_secs + self.bytes_secs


Collectives = tuple[tuple[int, Collective], ...]
"""Measured collectives, by the number of devices."""


@dataclass(frozen=True, eq=False)
class CommCosts:
    """Prices of transfers on a topology that has all their devices; each is computed once.

    Attributes:
        topology: hosts and links.
        collectives: measured times, which are used inside hosts instead of those of the links.
    """

    topology: rv.Topology
    collectives: Collectives = ()

    @property
    def level_names(self) -> tuple[str, ...]:
        """Names of the levels, innermost first, and of the host memory."""
        return (*(level.name for level in self.topology.levels), HOST_NAME)

    def copy(self, device: Device, num_bytes: int, bytes_per_sec: float) -> CommCost:
        """A copy between a device and its host's memory; a device makes one at a time."""
        busy = ticks(num_bytes / bytes_per_sec)
        levels = (0,) * len(self.topology.levels)
        ports = (((HOST, device, "copy"), busy),)
        return CommCost((device,), busy, ports, (*levels, num_bytes), len(levels))

    def of(self, sub_transfers: Iterable[Transfer], method: str) -> CommCost:
        """One call that moves several transfers of the same devices; their latency is paid once.

        The transfers move something; the method is one of ``METHODS``.
        """
        counts = Counter(map(_ends, sub_transfers))
        return self._call(tuple(sorted(counts.items())), method)

    def secs(self, sub_transfer: Transfer, method: str) -> CallSecs:
        """The duration of one transfer alone; ``of`` sums these with the longest latency of all.

        It equals the duration of the program. Where a formula gives the same, no program is made.
        """
        return self._secs(_ends(sub_transfer), method)

    @remembers(MAX_COMM_COSTS)
    def _secs(self, ends: _Ends, method: str) -> CallSecs:
        devices = tuple(sorted({*ends[0].ranks, *ends[1].ranks}))
        src, dst, _ = moved_home(ends[0], ends[1], self.topology)
        if (src, dst) != ends[:2]:
            return replace(self._secs((src, dst, ends[2]), method), devices=devices)
        if method == "rvd" and not self.collectives:
            found = self._plan(*ends).modelled
            if found is not None and found.is_exact:
                return CallSecs(devices, found.latency_secs, found.cost.secs - found.latency_secs)
        steps = self._steps(ends, method)
        alpha_secs = sum(step.alpha_secs for step in steps)
        return CallSecs(devices, alpha_secs, sum(step.bytes_secs for step in steps))

    @remembers(MAX_COMM_COSTS)
    def _call(self, counts: tuple[tuple[_Ends, int], ...], method: str) -> CommCost:
        devices: set[Device] = set()
        alpha_secs = bytes_secs = 0.0
        ports: dict[Port, float] = {}
        level_bytes, ring = [0] * (1 + len(self.topology.levels)), 0
        for ends, count in counts:
            devices |= {*ends[0].ranks, *ends[1].ranks}
            steps = self._steps(ends, method)
            alpha_secs = max(alpha_secs, sum(step.alpha_secs for step in steps))
            for step in steps:
                ring = max(ring, step.ring)
                bytes_secs += count * step.bytes_secs
                for port, secs in step.ports.items():
                    ports[port] = ports.get(port, 0.0) + count * secs
                for level, num_bytes in enumerate(step.level_bytes):
                    level_bytes[level] += count * num_bytes
        return CommCost(
            tuple(sorted(devices)),
            ticks(alpha_secs + bytes_secs),
            tuple((port, ticks(secs)) for port, secs in sorted(ports.items())),
            tuple(level_bytes),
            max((i for i, count in enumerate(level_bytes) if count), default=0),
            ring,
        )

    # --- steps ----------------------------------------------------------------------------------

    @remembers(MAX_COMM_COSTS)
    def _steps(self, ends: _Ends, method: str) -> tuple[_Step, ...]:
        src, dst, devices = moved_home(ends[0], ends[1], self.topology)
        if (src, dst) != ends[:2]:
            steps = self._steps((src, dst, ends[2]), method)
            return tuple(step.on(devices, self.topology) for step in steps)
        make = {"rvd": self._planned, "ring": self._around, "p2p": self._pulled}[method]
        return tuple(make(*ends))

    def _planned(self, src: rv.Layout, dst: rv.Layout, dtype: str) -> Sequence[_Step]:
        plan = self._plan(src, dst, dtype)
        if not plan.is_counted:
            return self._modelled(plan)
        if not _has_even_chunks(plan.path):
            return self._lowered(plan)
        # The moves of a path are the messages of its program, except for uneven chunks.
        moves = self._moved(plan.path, dtype)
        rings = [
            self._measured(s.kind, s.groups) for s in plan.path.steps for _ in s.step_exchanges
        ]
        if len(moves) == 1 and _is_sum(src.rvd, dst.rvd):
            # Plans exchange and add few bytes; a measured all-reduce has two halves.
            num = self._measured("all_reduce", plan.path.steps[0].groups)
            half: Traffic = {pair: num_bytes // max(1, num) for pair, num_bytes in moves[0].items()}
            moves, rings = ([half, half], [num, num]) if num else (moves, rings)
        return [self._step(*each) for each in zip(moves, map(_rounds, moves), rings, strict=True)]

    def _measured(self, kind: str, groups: Sequence[Sequence[Device]]) -> int:
        """The devices of each group, if collectives among so many in a host were measured; or 0."""
        num = len(groups[0])
        if kind not in RINGS or num not in dict(self.collectives):
            return 0
        hosts = self.topology.homes[1:2]
        is_inside = all(len({home[d] for d in group}) == 1 for home in hosts for group in groups)
        return num if is_inside else 0

    def _around(self, src: rv.Layout, dst: rv.Layout, dtype: str) -> list[_Step]:
        """Steps without a hierarchy: a collective between hosts is one ring, not one per host.

        The ring has the ranks in ascending order, so it enters and leaves every host once.
        """
        far = self.topology.levels[-1].link
        flat = rv.Topology.single_host(
            max(self.topology.ranks) + 1, far.alpha_secs, far.bytes_per_sec
        )
        found = []
        path = rv.plan(src, dst, dtype, flat, executor="dist", trees=False).path
        steps = [step for step in path.steps for _ in step.step_exchanges]
        for step, sub_transfer in zip(steps, self._moved(path, dtype), strict=True):
            moved = _ring(step.groups, sub_transfer) if step.kind in RINGS else sub_transfer
            found.append(self._step(moved, _rounds(sub_transfer)))
        return found

    def _moved(self, path: rv.Path, dtype: str) -> list[Traffic]:
        """The bytes that every sub-transfer of a path moves."""
        num_elements, sub_transfers = self._elements_moved(ByKey(_form_of(path), path))
        num_bytes = prod(path.src.shape) * ITEM_BYTES[dtype]
        return [
            {pair: n * num_bytes // num_elements for pair, n in sub_transfer.items()}
            for sub_transfer in sub_transfers
        ]

    @remembers(MAX_COMM_COSTS)
    def _elements_moved(self, path: ByKey[rv.Path]) -> tuple[int, list[Traffic]]:
        """The number of elements of a tensor, and for each sub-transfer those that it moves."""
        steps = path.value.steps
        moved = chain.from_iterable(step.traffic(self.topology, 1) for step in steps)
        return prod(path.value.src.shape), list(moved)

    def _lowered(self, plan: rv.Plan) -> list[_Step]:
        traffic = [Counter[tuple[Device, Device]]() for _ in plan.path.steps]
        rounds = [Counter[Device]() for _ in plan.path.steps]
        for collective in plan.program.collectives:
            for pair, count in collective.traffic().items():
                traffic[collective.step][pair] += count * ITEM_BYTES[plan.dtype]
            for rank in collective.ranks:
                rounds[collective.step][rank] += collective.rounds
        pairs = zip(traffic, rounds, strict=True)
        return [self._step(moved, max(mine.values(), default=0)) for moved, mine in pairs]

    def _plan(self, src: rv.Layout, dst: rv.Layout, dtype: str) -> rv.Plan:
        return rv.plan(src, dst, dtype, self.topology, executor="dist", trees=False)

    def _modelled(self, plan: rv.Plan) -> list[_Step]:
        """Steps for a plan of many ranks without a program.

        The hosts with senders of a step send equally, and those with receivers receive equally.
        """
        topology, found = self.topology, []
        for step, cost in zip(plan.path.steps, plan.step_costs, strict=True):
            far = cost.host_bytes
            alpha_secs = topology.latencies[1 if far else 0] * cost.rounds
            ports: dict[Port, float] = {}
            for ranks, way in ((step.src.ranks, "out"), (step.dst.ranks, "in")) if far else ():
                hosts = {topology.home(1, rank) for rank in ranks}
                secs = far / len(hosts) / topology.levels[1].link.bytes_per_sec
                ports |= {(1, host, way): secs for host in hosts}
            sent = (cost.wire_bytes - far, far)[: len(topology.levels)]
            found.append(_Step(alpha_secs, max(0.0, cost.secs - alpha_secs), ports, sent))
        return found

    def _step(self, traffic: Traffic, rounds: int, ring: int = 0) -> _Step:
        """The step of this traffic, or half of a measured all-reduce of ``ring`` devices."""
        topology, known = self.topology, dict(self.collectives).get(ring)
        through, sent = Counter[Port](), [0] * len(topology.levels)
        for (src, dst), num_bytes in traffic.items():
            if src == dst or num_bytes == 0:
                continue
            distance = topology.distance(src, dst)
            sent[distance - 1] += num_bytes
            for level in range(distance):
                home = topology.homes[level]
                through[level, home[src], "out"] += num_bytes
                through[level, home[dst], "in"] += num_bytes
        links = [level.link for level in topology.levels]
        far = max((level for level, count in enumerate(sent) if count), default=None)
        alpha_secs = 0.0 if far is None else topology.latencies[far] * rounds
        if known is not None:
            alpha_secs, links = known.latency_secs / 2, [rv.Link(0.0, known.bytes_per_sec)]
        ports = {port: count / links[port[0]].bytes_per_sec for port, count in through.items()}
        return _Step(alpha_secs, max(ports.values(), default=0.0), ports, tuple(sent), ring)

    def _pulled(self, src: rv.Layout, dst: rv.Layout, dtype: str) -> list[_Step]:
        """SuperScaler's baseline: a message for every part that a reader needs, from one writer.

        If replicas hold the part, readers alternate among them; a reader that holds it uses its
        own.
        """
        holders: dict[tuple[int, rv.Box], list[Device]] = {}
        for rank in src.ranks:
            cell = src.cell(rank)
            holders.setdefault((cell.part, cell.box), []).append(rank)
        moved, partners = Counter[tuple[Device, Device]](), Counter[tuple[Device, str]]()
        for position, reader in enumerate(dst.ranks):
            wanted = dst.cell(reader).box
            for (_, box), ranks in holders.items():
                common = box.intersect(wanted)
                writer = reader if reader in ranks else ranks[position % len(ranks)]
                if common is None or writer == reader:
                    continue
                moved[writer, reader] += common.num_elements * ITEM_BYTES[dtype]
                partners.update([(writer, "out"), (reader, "in")])
        return [self._step(moved, max(partners.values(), default=0))]


def _is_sum(src: rv.RVD, dst: rv.RVD) -> bool:
    """Whether partial sums become replicas of the same boxes."""
    return src.v > 1 == dst.v and src.d == dst.d


def _ends(sub_transfer: Transfer) -> _Ends:
    return sub_transfer.src, sub_transfer.dst, sub_transfer.dtype


def _form_of(path: rv.Path) -> tuple[object, ...]:
    """What decides the share of a tensor that each message of a path is.

    In a path with only even shards it does not depend on the tensor's size.
    """
    states = [tuple(chain.from_iterable(step.step_exchanges)) for step in path.steps]
    # One pair may have paths of other kinds, for another dtype.
    steps = tuple(
        (step.kind, step.direct, step.num_slices, step.groups, tuple(s.text for s in mine))
        for step, mine in zip(path.steps, states, strict=True)
    )
    ends = path.src, path.dst
    if not all(state.is_even for state in (*ends, *(s.source for s in chain(*states)))):
        return steps, ends
    return steps, *((layout.rvd, layout.ranks) for layout in ends)


def comm_costs_on(topology: rv.Topology, collectives: Collectives = ()) -> CommCosts:
    """The prices on a topology, shared by all who ask for the same in turn."""
    return _shared(topology, collectives)


_shared = lru_cache(maxsize=1)(CommCosts)


def _has_even_chunks(path: rv.Path) -> bool:
    """Whether the chunks of every all_reduce are equal, or of one element."""
    sums = [step for step in path.steps if step.kind == "all_reduce"]
    sizes = [(step.src.source.largest_shard, len(step.groups[0])) for step in sums]
    are_even = all(step.src.source.is_even for step in sums)
    return are_even and all(size % num == 0 or size == 1 for size, num in sizes)


def _ring(groups: Iterable[Sequence[Device]], traffic: Traffic) -> Traffic:
    """The bytes of every group as a ring: each rank sends an equal share to the next one."""
    sent: dict[tuple[Device, Device], int] = {}
    for group in groups:
        total = sum(traffic.get(pair, 0) for pair in permutations(group, 2))
        around = pairwise([*sorted(group), min(group)])
        sent |= dict.fromkeys(around, total // len(group))
    return sent


def _rounds(traffic: Traffic) -> int:
    """The number of successive messages on the device that has the most."""
    ends = [end for a, b in traffic if a != b for end in ((a, "out"), (b, "in"))]
    return max(Counter(ends).values(), default=0)


def topology_for(given: rv.Topology | None, devices: Sequence[Device]) -> rv.Topology:
    """The topology to simulate on: the given one, or the one host that plans are made for.

    Raises:
        PlanError: the topology lacks a device.
    """
    if given is None:
        # The topology that rvdcomm assumes if it is given none.
        return rv.Topology.single_host(max(devices) + 1, alpha_secs=5e-6, bytes_per_sec=200e9)
    missing = sorted(set(devices) - given.ranks)
    if missing:
        raise PlanError(
            f"devices {missing} are not in the topology, which has {len(given.ranks)} ranks."
        )
    return given
