"""The parts of an emulated cluster as data: names, addresses, command lines, environments.

This module does not touch the machine, so it is tested without root; ``bench.cluster`` runs the
command lines.

Each host is a network namespace, and so is the switch: a bridge whose ports are the far ends of
the hosts' links. Because the switch has a namespace of its own, no interface, address or firewall
rule of the real machine is involved, and deleting the namespaces deletes everything::

    host0 [eth0 10.213.0.1] ==tbf== [port0 .
    host1 [eth0 10.213.0.2] ==tbf== [port1 .  br0]  switch

Or hosts are wired to each other, as on a line; those between two others forward::

    host0 [eth0 10.213.0.1, to1] ==tbf== [to0, eth0 10.213.0.2, to2] host1 ==tbf== ...
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MASTER_PORT = 29500
MAX_HOSTS = 254
# Below this rate one frame takes longer than 120 ms, and a benchmark would measure TCP's timeouts.
MIN_RATE_BITS_PER_SEC = 1e5

# 1514: the bytes of a full Ethernet frame, as tbf counts them.
FRAME_BYTES = 1514
PAYLOAD_BYTES = 1448
"""Payload of a full frame, without its headers and TCP's time stamps."""
MAX_SEGMENT_BYTES = 65536
# A burst is the data that tbf sends at once after a pause. It must last longer than the period of
# the shaper's timer: at 2 Gbit/s, a burst of 0.26 ms (64 kB) reaches 80 % of the rate and one of
# 0.5 ms reaches 95 %. 1 ms is twice that, and is negligible in a transfer that is worth timing.
# Below 12 Mbit/s, a millisecond is less than one frame; four frames are enough for TCP, which sends
# segments in pairs.
BURST_SECS = 1e-3
MIN_BURST_BYTES = 4 * FRAME_BYTES
# A full queue drops packets, and a dropped last packet costs TCP a timeout of 200 ms. Real fabrics
# avoid this by flow control. One sender never fills its queue, because the kernel limits a socket
# to a few queued packets; several hosts that send to one host do fill it. A queue of 100 ms is
# enough for that. 256 KiB is four segments of 64 KiB; with less, a slow link drops whole segments
# (5 Mbit/s with 50 ms: 58 of 1600 packets).
QUEUE_SECS = 0.1
MIN_QUEUE_BYTES = 256 * 1024

_NAMESPACE = re.compile(r"rvd-(?P<pid>\d+)-\d+-(?:switch|host\d+)")
_RATE = re.compile(
    r"(?P<number>\d+(?:\.\d*)?|\.\d+)(?P<prefix>[kmgt]i?)?(?P<unit>bit|bps)?", re.IGNORECASE
)
_BITS_PER_UNIT = {"bit": 1, "bps": 8}


def parse_rate(text: str) -> float:
    """Return the bits per second of a rate in the notation of ``tc``.

    A unit is ``bit`` or ``bps`` (bytes per second), with a prefix ``k``, ``m``, ``g``, ``t``
    (powers of 1000) or ``ki``, ``mi``, ``gi``, ``ti`` (powers of 1024), in upper or lower case. A
    number without a unit is in bits per second.

    Raises:
        ValueError: ``text`` is not a rate, or is zero.

    >>> parse_rate("200mbit"), parse_rate("1gbit"), parse_rate("25MBps")
    (200000000.0, 1000000000.0, 200000000.0)
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or (match["prefix"] and not match["unit"]):
        raise ValueError(f"cannot parse rate {text!r}: expected a number and a unit, like 200mbit.")
    prefix = (match["prefix"] or "").lower()
    base = 1024.0 if prefix.endswith("i") else 1000.0
    power = " kmgt".index(prefix[0]) if prefix else 0
    unit = (match["unit"] or "bit").lower()
    rate: float = float(match["number"]) * base**power * _BITS_PER_UNIT[unit]
    if rate <= 0:
        raise ValueError(f"rate {text!r} is zero; a link needs a positive rate, like 200mbit.")
    return rate


def parse_rates(text: str) -> float | tuple[float, ...]:
    """Return the rate of all hosts' links, or with ``/`` between them one for each host.

    Raises:
        ValueError: a part of ``text`` is not a rate.

    >>> parse_rates("200mbit"), parse_rates("400mbit/100mbit")
    (200000000.0, (400000000.0, 100000000.0))
    """
    rates = tuple(map(parse_rate, text.split("/")))
    return rates if len(rates) > 1 else rates[0]


@dataclass(frozen=True, slots=True)
class ShapedLink:
    """A host's link, which carries ``rate_bits_per_sec`` each way."""

    rate_bits_per_sec: float

    @property
    def burst_bytes(self) -> int:
        """Bytes a link may send at once after a pause."""
        return max(MIN_BURST_BYTES, round(self.rate_bits_per_sec / 8 * BURST_SECS))

    @property
    def segment_bytes(self) -> int:
        """Bytes that the kernel hands to a link at once; their frames together fit in a burst.

        tbf cuts a larger segment into frames, and each frame then costs as much CPU time as a whole
        segment: at 500 Mbit/s with segments of 64 KiB, this took a third of two cores.
        """
        return min(MAX_SEGMENT_BYTES, self.burst_bytes // FRAME_BYTES * PAYLOAD_BYTES)

    @property
    def queue_secs(self) -> float:
        """Seconds that a packet may wait at a link before the queue drops it."""
        return max(QUEUE_SECS, MIN_QUEUE_BYTES * 8 / self.rate_bits_per_sec)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster of ``hosts`` hosts whose links carry ``rate_bits_per_sec`` each way.

    The rate is one for all hosts, or a tuple of one for each. A host has ``nics`` links to the
    switch, which its ranks share in blocks. NICs are rails: a connection to a rank leaves by the
    NIC that has the number of that rank's. With ``wires``, pairs of hosts, there is no switch:
    hosts are wired to each other, and forward what is for others, on the ways of fewest wires.
    ``pid`` (the process that owns the cluster) and ``serial`` (the number of the cluster in this
    process) make the names unique.
    """

    hosts: int
    ranks_per_host: int
    rate_bits_per_sec: float | tuple[float, ...]
    pid: int
    serial: int = 0
    nics: int = 1
    wires: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise ValueError(f"hosts={self.hosts}; a cluster has 1 to {MAX_HOSTS} hosts.")
        if self.ranks_per_host < 1:
            raise ValueError(f"ranks_per_host={self.ranks_per_host}; a host has at least 1 rank.")
        if not 1 <= self.nics <= self.ranks_per_host:
            raise ValueError(f"nics={self.nics}; a host has 1 to ranks_per_host of them.")
        if self.wires and (len(self.next_hops) < self.hosts or self.nics > 1):
            raise ValueError(
                f"wires={self.wires}; they have to connect all hosts, and leave no NICs."
            )
        if len(self.links) != self.hosts:
            raise ValueError(f"{len(self.links)} rates for {self.hosts} hosts; give one for each.")
        # The comparison is written so that NaN fails it too.
        if not all(
            MIN_RATE_BITS_PER_SEC <= link.rate_bits_per_sec < math.inf for link in self.links
        ):
            raise ValueError(
                f"rate_bits_per_sec={self.rate_bits_per_sec}; a link carries at least "
                f"{MIN_RATE_BITS_PER_SEC:g}, for example 200e6."
            )

    @property
    def links(self) -> tuple[ShapedLink, ...]:
        """The link of each host."""
        rate = self.rate_bits_per_sec
        rates = rate if isinstance(rate, tuple) else (rate,) * self.hosts
        return tuple(map(ShapedLink, rates))

    @property
    def next_hops(self) -> dict[int, dict[int, int]]:
        """For every host, the neighbour to which what is for another host goes; by that host.

        Hosts that do not reach all others are left out.
        """
        near: dict[int, list[int]] = {host: [] for host in range(self.hosts)}
        for a, b in self.wires:
            near[a].append(b)
            near[b].append(a)
        found = {}
        for start in near:
            first = {host: host for host in near[start]}
            todo = list(near[start])
            while todo:
                host = todo.pop(0)
                for other in near[host]:
                    if other != start and other not in first:
                        first[other] = first[host]
                        todo.append(other)
            if len(first) == self.hosts - 1:
                found[start] = first
        return found

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts together."""
        return self.hosts * self.ranks_per_host

    @property
    def switch(self) -> str:
        """Name of the namespace that holds the bridge."""
        return f"rvd-{self.pid}-{self.serial}-switch"

    @property
    def namespaces(self) -> list[str]:
        """All namespaces of the cluster, the switch first, if there is one."""
        hosts = map(self.namespace, range(self.hosts))
        return [*hosts] if self.wires else [self.switch, *hosts]

    def namespace(self, host: int) -> str:
        """Name of the namespace of ``host``."""
        return f"rvd-{self.pid}-{self.serial}-host{host}"

    def address(self, host: int, nic: int = 0) -> str:
        """IP address of a NIC; it is valid only inside the cluster's namespaces."""
        return f"10.213.{nic}.{host + 1}"

    def nic_of(self, rank: int) -> int:
        """The NIC that ``rank`` uses; ranks of a host are dealt to its NICs in blocks."""
        return rank % self.ranks_per_host * self.nics // self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """Host of ``rank``; ranks are numbered host by host."""
        return rank // self.ranks_per_host


def build_commands(spec: ClusterSpec) -> list[list[str]]:
    """Return the command lines that build the cluster, in order.

    Invariant: every namespace that they create is one of ``spec.namespaces``, and every other
    object is inside one of these, so ``remove_commands`` undoes any prefix of the list.
    """
    if spec.wires:
        return _wired_commands(spec)
    switch = ["ip", "-n", spec.switch, "link"]
    commands = [
        ["ip", "netns", "add", spec.switch],
        [*switch, "add", "br0", "type", "bridge"],
        [*switch, "set", "br0", "addrgenmode", "none", "up"],
    ]
    for host in range(spec.hosts):
        commands += _namespace_commands(spec.namespace(host))
        for nic in range(spec.nics):
            commands += _nic_commands(spec, host, nic)
    return commands


def _namespace_commands(name: str) -> list[list[str]]:
    return [["ip", "netns", "add", name], ["ip", "-n", name, "link", "set", "lo", "up"]]


def _nic_commands(spec: ClusterSpec, host: int, nic: int) -> list[list[str]]:
    name, link = spec.namespace(host), spec.links[host]
    port = f"port{host}" if spec.nics == 1 else f"port{host}.{nic}"
    device, address = interface(nic), spec.address(host, nic)
    veth = f"link add {device} netns {name} type veth peer name {port} netns {spec.switch}"
    # addrgenmode none: no IPv6 address, so that gloo has one address to choose from.
    commands = [
        ["ip", *veth.split()],
        ["ip", "-n", name, "link", "set", device, "addrgenmode", "none", "up"],
        [*f"ip -n {name} link set {device} gso_max_size {link.segment_bytes}".split()],
        ["ip", "-n", name, "address", "add", f"{address}/24", "dev", device],
        ["ip", "-n", spec.switch, "link", "set", port, "addrgenmode", "none", "up"],
        ["ip", "-n", spec.switch, "link", "set", port, "master", "br0"],
        _shape_command(link, name, device),
        _shape_command(link, spec.switch, port),
    ]
    if spec.nics > 1:
        # What is for the NIC of another host leaves by the NIC of that number, in its subnet; and a
        # NIC alone answers for its address.
        commands += [
            _setting(name, f"conf/{device}/arp_ignore", 1),
            _setting(name, f"conf/{device}/arp_announce", 2),
        ]
    return commands


def interface(nic: int) -> str:
    """The name of a NIC in its host.

    >>> interface(1)
    'eth1'
    """
    return f"eth{nic}"


def _setting(namespace: str, name: str, value: int) -> list[str]:
    """The command line that writes a setting of IPv4."""
    write = f"echo {value} > /proc/sys/net/ipv4/{name}"
    return ["ip", "netns", "exec", namespace, "sh", "-c", write]


def _wired_commands(spec: ClusterSpec) -> list[list[str]]:
    """The command lines for hosts that are wired to each other.

    A host has its address on a bridge without ports, and a route to every other host.
    """
    commands = []
    for host in range(spec.hosts):
        name = spec.namespace(host)
        device = interface(0)
        commands += [
            *_namespace_commands(name),
            ["ip", "-n", name, "link", "add", device, "type", "bridge"],
            ["ip", "-n", name, "link", "set", device, "addrgenmode", "none", "up"],
            ["ip", "-n", name, "address", "add", f"{spec.address(host)}/32", "dev", device],
            _setting(name, "ip_forward", 1),
        ]
    for a, b in spec.wires:
        (one, other), link = (spec.namespace(a), spec.namespace(b)), spec.links[a]
        veth = f"link add to{b} netns {one} type veth peer name to{a} netns {other}"
        commands.append(["ip", *veth.split()])
        for name, device in ((one, f"to{b}"), (other, f"to{a}")):
            commands += [
                ["ip", "-n", name, "link", "set", device, "addrgenmode", "none", "up"],
                [*f"ip -n {name} link set {device} gso_max_size {link.segment_bytes}".split()],
                _shape_command(link, name, device),
            ]
    for host, first in spec.next_hops.items():
        name, own = spec.namespace(host), spec.address(host)
        # Neighbours first: the others are reached over them.
        for other in sorted(first, key=lambda other: first[other] != other):
            via = "" if first[other] == other else f" via {spec.address(first[other])}"
            route = f"{spec.address(other)}/32{via} dev to{first[other]} src {own}"
            commands.append([*f"ip -n {name} route add {route}".split()])
    return commands


def _shape_command(link: ShapedLink, namespace: str, device: str) -> list[str]:
    """The command line that limits the rate at which ``device`` sends.

    Segmentation offload stays on. tbf counts the bytes of a segment on the wire, including the
    headers of all its frames, so the rate is exact. Without offload (``gso_max_segs 1``), two cores
    carry at most 430 Mbit/s, and a benchmark would measure the CPU.
    """
    return [
        *["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"],
        *["rate", f"{round(link.rate_bits_per_sec)}bit"],
        *["burst", f"{link.burst_bytes}b"],
        *["latency", f"{round(link.queue_secs * 1e6)}us"],
    ]


def remove_commands(spec: ClusterSpec) -> list[list[str]]:
    """Return the command lines that remove the cluster; devices go with their namespace."""
    return [["ip", "netns", "delete", name] for name in reversed(spec.namespaces)]


def rank_env(spec: ClusterSpec, rank: int) -> dict[str, str]:
    """Return the variables that ``init_process_group("gloo")`` needs, and a thread limit."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(rank % spec.ranks_per_host),
        "LOCAL_WORLD_SIZE": str(spec.ranks_per_host),
        "GROUP_RANK": str(spec.host_of(rank)),
        "MASTER_ADDR": spec.address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": interface(spec.nic_of(rank)),
        "OMP_NUM_THREADS": "1",
    }


def exec_command(spec: ClusterSpec, host: int, command: list[str]) -> list[str]:
    """Return the command line that runs ``command`` on ``host``."""
    return ["ip", "netns", "exec", spec.namespace(host), *command]


def owner_pid(namespace: str) -> int | None:
    """Return the process id in the name of a namespace, or None if the name is not ours.

    >>> owner_pid("rvd-4711-0-host3"), owner_pid("rvd-4711-0-switch"), owner_pid("docker")
    (4711, 4711, None)
    """
    match = _NAMESPACE.fullmatch(namespace)
    return int(match["pid"]) if match else None
