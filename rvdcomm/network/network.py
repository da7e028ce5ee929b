"""Network: ranks and switches, and the directed links between them.

A ``Topology`` describes a cluster by nested groups. A ``Network`` describes any cluster: cube
meshes, tori, rails, PCIe trees, hosts of unequal size or speed. ``Network.of`` makes one of a
topology, and ``Network.levels`` finds the topology again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from rvdcomm.errors import LayoutError
from rvdcomm.json_file import entry, read_json, write_json
from rvdcomm.layout import MAX_RANK
from rvdcomm.network.link import Link
from rvdcomm.network.topology import (
    DEFAULT_LINK,
    FILE_VERSION,
    MAX_FILE_BYTES,
    Level,
    Topology,
)
from rvdcomm.text import quoted

if TYPE_CHECKING:
    from rvdcomm.network.routes import Routes

Node = int | str
"""A rank, or the name of a switch."""

SWITCH_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
"""The form of a switch's name, so that texts and pictures can show it."""

FABRIC = "fabric"
"""The name of the outermost switch of a network that is made of hosts."""

MAX_WIRES = 4_000_000
"""Wires of a network; a file of 8 MiB has fewer."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A node that forwards messages and has no data of its own.

    Attributes:
        name: a letter, then letters, digits and ``_.-``.
        multicasts: whether it can send one message that enters it over several wires.
        adds: whether it can add messages that enter it.
    """

    name: str
    multicasts: bool = False
    adds: bool = False


@dataclass(frozen=True, slots=True)
class Wire:
    """A directed link from ``src`` to ``dst``, each a rank or the name of a switch."""

    src: Node
    dst: Node
    link: Link


def place_of(node: Node) -> tuple[bool, Node]:
    """A sort key: ranks by number, then switches by name."""
    return isinstance(node, str), node


@dataclass(frozen=True)
class Network:
    """Ranks, switches, and the wires between them.

    Bytes from one rank to another pass each wire of their route once; a wire carries
    ``bytes_per_sec`` in its direction. A wire there and a wire back are independent (full duplex).
    The order in which wires and switches are given has no meaning.

    Attributes:
        wires: at most one from a node to another.
        switches: those that can do more than forward have to be named here; the others may be.

    Raises:
        LayoutError: a wire names no nodes, or the same one twice; two wires go from one node to
            another; a rank or a switch cannot be reached from a rank, or reaches none.
    """

    wires: tuple[Wire, ...]
    switches: tuple[Switch, ...] = ()

    def __post_init__(self) -> None:
        wires = tuple(self.wires)
        for wire in wires:
            _check_wire(wire)
        switches = _all_switches(wires, self.switches)
        ordered = sorted(wires, key=lambda wire: (place_of(wire.src), place_of(wire.dst)))
        object.__setattr__(self, "wires", tuple(ordered))
        object.__setattr__(self, "switches", switches)
        if len(self._by_ends) != len(wires):
            pairs = [(wire.src, wire.dst) for wire in self.wires]
            twice = next(a for a, b in pairwise(pairs) if a == b)
            raise LayoutError(
                f"two wires go from {twice[0]} to {twice[1]}; give one with the rates of both "
                "together."
            )
        self._check_reach()

    @classmethod
    def of(cls, network: Topology | Network) -> Network:
        """The network of a topology: the port of a group is a wire to a switch, and one back.

        >>> host = Topology.single_host(2, 1e-6, 1e9)
        >>> print(Network.of(host))
        0,1 <-> fabric  1 us  1 GB/s
        """
        check_links(network)
        if isinstance(network, Network):
            return network
        made = cls(tuple(_wires_of_levels(network.levels)))
        # Kept as given, because a network does not say how the levels are called.
        made.__dict__["levels"] = network
        return made

    @classmethod
    def hosts(
        cls,
        hosts: Iterable[Iterable[int]],
        intra: Link | Sequence[Link],
        inter: Link | Sequence[Link],
        ranks_per_nic: int | None = None,
    ) -> Network:
        """Hosts of any numbers of ranks, each with a switch inside and NICs to one fabric.

        Args:
            hosts: the ranks of each host.
            intra: the port of a rank to the switch of its host; or one for each host.
            inter: a NIC; or one for each host.
            ranks_per_nic: ranks that share a NIC, which they reach beside the switch of the host;
                without it a host has one NIC behind its switch, as in ``Topology.hosts``.

        Raises:
            LayoutError: there are not as many links as hosts, or a rank is named twice.
        """
        groups = [tuple(sorted(host)) for host in hosts]
        ranks = [rank for group in groups for rank in group]
        if len(set(ranks)) != len(ranks) or not all(groups):
            raise LayoutError(
                f"hosts {quoted(groups)}: each needs a rank, and no rank may be in two."
            )
        for rank in ranks:
            _check_rank(rank)
        if ranks_per_nic is not None and (type(ranks_per_nic) is not int or ranks_per_nic < 1):
            raise LayoutError(f"ranks_per_nic is {quoted(ranks_per_nic)}; expected at least 1.")
        inside, outside = _of_each(intra, groups, "intra"), _of_each(inter, groups, "inter")
        wires: list[Wire] = []
        for i, group in enumerate(groups):
            switch = f"host{i}"
            wires += both_ways(group, switch, inside[i])
            if len(groups) == 1:
                continue
            if ranks_per_nic is None:
                wires += both_ways([switch], FABRIC, outside[i])
                continue
            for j, share in enumerate(_shares(group, ranks_per_nic)):
                if len(share) == 1:
                    wires += both_ways(share, FABRIC, outside[i])
                else:
                    wires += both_ways(share, f"{switch}.nic{j}", outside[i])
                    wires += both_ways([f"{switch}.nic{j}"], FABRIC, outside[i])
        return cls(tuple(wires))

    @classmethod
    def preset(cls, name: str, *counts: int, link: Link = DEFAULT_LINK) -> Network:
        """A common cluster or a regular network; ranks are numbered host by host.

        >>> Network.preset("dgx-1").link(0, 3)
        Link(alpha_secs=3e-06, bytes_per_sec=50000000000.0)
        >>> len(Network.preset("torus", 4, 4, link=Link(1e-6, 1e9)).wires)
        64

        Args:
            name: one of ``MACHINES``, of ``SHAPES``, or of the presets of ``Topology``.
            counts: of a machine, the number of hosts (default 1); of a shape, the ranks along each
                dim; of a topology, as of ``Topology.preset``.
            link: the wires of a shape.

        Raises:
            LayoutError: there is no such preset, or none with these counts.
        """
        from rvdcomm.network.machines import preset

        return preset(name, *counts, link=link)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        ends = {end for wire in self.wires for end in (wire.src, wire.dst)}
        return tuple(sorted(end for end in ends if isinstance(end, int)))

    @cached_property
    def out(self) -> Mapping[Node, tuple[Wire, ...]]:
        """The wires that leave each node."""
        found: dict[Node, list[Wire]] = {node: [] for node in self.nodes}
        for wire in self.wires:
            found[wire.src].append(wire)
        return {node: tuple(wires) for node, wires in found.items()}

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Ranks, then switches."""
        return (*self.ranks, *(switch.name for switch in self.switches))

    def link(self, src: Node, dst: Node) -> Link | None:
        """The link from one node to another, if there is one."""
        return self._by_ends.get((src, dst))

    @cached_property
    def _by_ends(self) -> dict[tuple[Node, Node], Link]:
        return {(wire.src, wire.dst): wire.link for wire in self.wires}

    @cached_property
    def least_alpha_secs(self) -> float:
        """No message takes fewer seconds."""
        return min(wire.link.alpha_secs for wire in self.wires)

    @cached_property
    def levels(self) -> Topology | None:
        """The topology of which this is the network; None if its groups are not nested and equally
        fast on each level.
        """
        levels, above = _tree_of(self)
        return Topology(tuple(levels)) if above else None

    @cached_property
    def above(self) -> Mapping[Node, Node]:
        """The switch that each node of a level is wired to; empty if there are no ``levels``."""
        return _tree_of(self)[1]

    @cached_property
    def nearest_levels(self) -> Topology:
        """``levels``, or levels that resemble this network: what wires above each rate connect.

        A search can use them; times have to be those of the network.
        """
        from rvdcomm.network.nearest import nearest_levels

        return self.levels or nearest_levels(self)

    @cached_property
    def routes(self) -> Routes:
        """The routes of messages between ranks."""
        from rvdcomm.network.routes import Routes

        return Routes(self)

    def check_ranks(self, ranks: Iterable[int]) -> None:
        """Raise a LayoutError that names the ranks this network does not have."""
        missing = sorted(set(ranks) - set(self.ranks))
        if missing:
            raise LayoutError(
                f"ranks {quoted(missing)} are not in the network, which has {quoted(self.ranks)}."
            )

    @cached_property
    def _hash(self) -> int:
        return hash((self.wires, self.switches))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # Another process hashes texts differently, so cached hashes must not travel.
        known = {"levels": self.__dict__["levels"]} if "levels" in self.__dict__ else {}
        return {"wires": self.wires, "switches": self.switches, **known}

    def __repr__(self) -> str:
        return f"Network.parse({str(self)!r})"

    def __str__(self) -> str:
        """One line for wires that are alike; ``Network.parse`` reads it."""
        from rvdcomm.network.notation import text_of

        return text_of(self)

    @classmethod
    def parse(cls, text: str) -> Network:
        """Read a text such as ``str`` gives (docs/networks.md, "Notation").

        Raises:
            LayoutError: the text has another form. The message names the line.
        """
        from rvdcomm.network.notation import parse

        return parse(text)

    def to_json(self) -> dict[str, Any]:
        """The network as plain values, which ``save`` writes."""
        return {
            "version": FILE_VERSION,
            "switches": [
                {"name": switch.name, "multicasts": switch.multicasts, "adds": switch.adds}
                for switch in self.switches
            ],
            "wires": [
                {
                    "src": wire.src,
                    "dst": wire.dst,
                    "alpha_secs": wire.link.alpha_secs,
                    "bytes_per_sec": wire.link.bytes_per_sec,
                }
                for wire in self.wires
            ],
        }

    def save(self, path: str | FilePath, notes: Mapping[str, Any] | None = None) -> None:
        """Write this network as JSON, which ``load`` reads; ``notes`` adds entries for people.

        Raises:
            LayoutError: a wire has an infinite bandwidth, which JSON cannot express.
            OSError: the file cannot be written. An existing file stays as it was.
        """
        write_json(path, {**self.to_json(), **(notes or {})})

    @classmethod
    def load(cls, path: str | FilePath) -> Network:
        """Read a network that ``save`` wrote, or the topology that ``Topology.save`` wrote.

        Raises:
            LayoutError: the file is neither, or has another version.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_json(read_json(path, MAX_FILE_BYTES))
        except LayoutError as error:
            raise LayoutError(f"{path} is not a network: {str(error).rstrip('.')}.") from None

    @classmethod
    def from_json(cls, values: Any) -> Network:
        """The network of plain values as ``to_json`` of a network or a topology gives them.

        Raises:
            LayoutError: they are neither, or of another version.
        """
        if isinstance(values, dict) and "levels" in values:
            return cls.of(Topology.from_json(values))
        if (version := entry(values, "version", int)) != FILE_VERSION:
            raise LayoutError(
                f"it is of version {quoted(version)}, this release reads {FILE_VERSION}"
            )
        switches = [_switch_of(each) for each in entry(values, "switches", list)]
        return cls(tuple(map(_wire_of, entry(values, "wires", list))), tuple(switches))

    def _check_reach(self) -> None:
        """Raise unless every rank reaches every node, and every node every rank."""
        if not self.ranks:
            raise LayoutError("a network needs ranks; no wire names one.")
        first = self.ranks[0]
        for reached, text in zip(
            reach(self.wires, first), ("cannot be reached from", "cannot reach"), strict=True
        ):
            for node in self.nodes:
                if node not in reached:
                    raise LayoutError(f"{_name(node)} of the network {text} {_name(first)}.")


Links = Topology | Network
"""What says how fast ranks are joined."""


def both_ways(nodes: Iterable[Node], other: Node, link: Link) -> Iterator[Wire]:
    """Wires of one speed from each of ``nodes`` to ``other`` and back."""
    for node in nodes:
        yield Wire(node, other, link)
        yield Wire(other, node, link)


def reach(wires: Iterable[Wire], first: Node) -> tuple[set[Node], set[Node]]:
    """The nodes that messages from ``first`` can reach, and those whose messages reach it."""
    ahead: dict[Node, list[Node]] = {}
    back: dict[Node, list[Node]] = {}
    for wire in wires:
        ahead.setdefault(wire.src, []).append(wire.dst)
        back.setdefault(wire.dst, []).append(wire.src)
    return _reached(first, ahead), _reached(first, back)


def connected(wires: Iterable[Wire]) -> dict[Node, Node]:
    """For each end of a wire, one node of those that wires connect it with, in any direction."""
    parent: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for wire in wires:
        parent[root(wire.src)] = root(wire.dst)
    return {node: root(node) for node in list(parent)}


def _reached(first: Node, edges: Mapping[Node, Iterable[Node]]) -> set[Node]:
    found, left = {first}, [first]
    while left:
        for node in edges.get(left.pop(), ()):
            if node not in found:
                found.add(node)
                left.append(node)
    return found


# --- checks ------------------------------------------------------------------------------------


def _name(node: Node) -> str:
    return f"rank {node}" if isinstance(node, int) else f"switch {node}"


def check_links(links: object) -> None:
    """Raise a LayoutError if this is neither a topology nor a network."""
    if not isinstance(links, Topology | Network):
        raise LayoutError(
            f"a topology is an rv.Topology or an rv.Network, such as rv.Network.preset('dgx-1'), "
            f"and not {quoted(links)}."
        )


def _check_rank(rank: object) -> None:
    if type(rank) is not int or not 0 <= rank <= MAX_RANK:
        raise LayoutError(f"a network has ranks from 0 to {MAX_RANK}, not {quoted(rank)}.")


def _check_wire(wire: Wire) -> None:
    for end in (wire.src, wire.dst):
        if type(end) is int:
            _check_rank(end)
        elif not isinstance(end, str) or not SWITCH_NAME.fullmatch(end):
            raise LayoutError(
                f"a wire names {quoted(end)}; a rank is a number, and a switch has a name of a "
                "letter, then letters, digits and _ . -"
            )
    if wire.src == wire.dst:
        raise LayoutError(f"a wire goes from {wire.src} to itself.")
    if not isinstance(wire.link, Link):
        raise LayoutError(
            f"the wire from {wire.src} to {wire.dst} has the link {quoted(wire.link)}; give a "
            "Link(alpha_secs, bytes_per_sec)."
        )


def _all_switches(wires: Sequence[Wire], named: Iterable[Switch]) -> tuple[Switch, ...]:
    """The named switches and those that only wires name, by name."""
    found: dict[str, Switch] = {}
    used = {end for wire in wires for end in (wire.src, wire.dst) if isinstance(end, str)}
    for switch in named:
        if switch.name in found:
            raise LayoutError(f"two switches are named {quoted(switch.name)}.")
        if switch.name not in used:
            raise LayoutError(f"switch {quoted(switch.name)} has no wires.")
        found[switch.name] = switch
    return tuple(found.get(name, Switch(name)) for name in sorted(used))


def _of_each(link: Link | Sequence[Link], groups: Sequence[object], what: str) -> list[Link]:
    """A link for each group."""
    links = [link] * len(groups) if isinstance(link, Link) else list(link)
    if len(links) != len(groups):
        raise LayoutError(f"{what} has {len(links)} links for {len(groups)} hosts.")
    return links


def _shares(ranks: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    left = iter(ranks)
    while share := tuple(islice(left, size)):
        yield share


def _switch_of(values: Any) -> Switch:
    name, flags = entry(values, "name", str), ("multicasts", "adds")
    return Switch(name, *(entry(values, flag, bool) for flag in flags))


def _wire_of(values: Any) -> Wire:
    src, dst = (_node_of(values, key) for key in ("src", "dst"))
    return Wire(
        src, dst, Link(entry(values, "alpha_secs", float), entry(values, "bytes_per_sec", float))
    )


def _node_of(values: Any, key: str) -> Node:
    if isinstance(values, dict) and isinstance(values.get(key), int):
        return entry(values, key, int)
    return entry(values, key, str)


# --- levels ------------------------------------------------------------------------------------


def _wires_of_levels(levels: Sequence[Level]) -> Iterator[Wire]:
    """Each group of a level is wired to the switch of its group of the next level."""
    names = list(map(_switch_name, (level.name for level in levels[1:])))
    if len({*names, FABRIC}) <= len(names):
        names = [f"level{depth}." for depth in range(1, len(levels))]
    homes = [
        {rank: f"{name}{i}" for i, group in enumerate(level.groups) for rank in group}
        for name, level in zip(names, levels[1:], strict=True)
    ]
    for depth, level in enumerate(levels):
        for group in level.groups:
            node = group[0] if depth == 0 else homes[depth - 1][group[0]]
            above = homes[depth][group[0]] if depth < len(homes) else FABRIC
            yield from both_ways([node], above, level.link)


def _switch_name(level: str) -> str:
    """The name of a level as the beginning of a switch's name."""
    name = re.sub(r"[^A-Za-z_.-]", "_", level)[:48]
    return name if SWITCH_NAME.fullmatch(name) else f"level{name}"


def _tree_of(network: Network) -> tuple[list[Level], dict[Node, Node]]:
    """The levels, innermost first, and the switch above each node.

    Both are empty unless the network is a tree whose wires of one level are alike.
    """
    groups: dict[Node, tuple[int, ...]] = {rank: (rank,) for rank in network.ranks}
    above: dict[Node, Node] = {}
    levels: list[Level] = []
    if any(switch.multicasts or switch.adds for switch in network.switches):
        return [], {}
    while True:
        ahead = {
            node: [wire for wire in network.out[node] if above.get(wire.dst) != node]
            for node in groups
        }
        if len(groups) == 1 and levels and not any(ahead.values()):
            break
        links: set[Link | None] = set()
        members: dict[Node, list[int]] = {}
        for node, wires in ahead.items():
            if len(wires) != 1 or isinstance(wires[0].dst, int):
                return [], {}
            above[node] = wires[0].dst
            links |= {wires[0].link, network.link(wires[0].dst, node)}
            members.setdefault(wires[0].dst, []).extend(groups[node])
        (link, *others) = links
        if others or link is None or groups.keys() & members.keys():
            return [], {}
        name = _level_name(groups, len(levels)) if levels else "rank"
        levels.append(Level(name, tuple(sorted(groups.values())), link))
        groups = {node: tuple(sorted(ranks)) for node, ranks in members.items()}
    # All wires have been passed, there and back.
    return (levels, above) if 2 * len(above) == len(network.wires) else ([], {})


def _level_name(switches: Iterable[Node], depth: int) -> str:
    """What the names of a level's switches begin with, as ``host`` of ``host0`` and ``host1``."""
    names = {re.sub(r"\d+$", "", str(switch)) for switch in switches}
    return names.pop() if len(names) == 1 and "" not in names else f"level{depth}"
