"""Machines: hosts whose GPUs are not all equally near, clusters of them, and other presets.

Rates are those of the data sheets, as in the publications that are named, without a share for
overhead, so that results can be compared with theirs. ``rvdcomm calibrate`` measures real rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

from rvdcomm.errors import LayoutError
from rvdcomm.network.link import Link
from rvdcomm.network.network import FABRIC, Network, Wire, both_ways
from rvdcomm.network.presets import PRESETS
from rvdcomm.network.shapes import mesh, torus
from rvdcomm.network.topology import DEFAULT_LINK, Topology
from rvdcomm.text import quoted

NVLINK_SECS, PCIE_SECS, NIC_SECS = 3e-6, 5e-6, 12e-6
"""Typical times of a small message inside a host by NVLink and by PCIe, and between hosts."""

BRICK = 25e9
"""Bytes a second and direction of an NVLink of a V100, an A100 or an H100 (NVIDIA's data sheets:
6, 12 and 18 of them, 150, 300 and 450 GB/s)."""

PCIE3 = 13e9
"""Bytes a second of a PCIe 3.0 x16 port, of 15.75 GB/s on the wire."""

Pairs = Mapping[int, Iterable[tuple[int, int]]]
"""Pairs of GPUs of a host that are wired to each other, by the number of links between them."""

CUBE_MESH: Pairs = {
    1: [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)],
    2: [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)],
}
"""NVLinks of a DGX-1 with V100s (hybrid cube mesh), as in its white paper."""

NDV2: Pairs = {
    1: [(0, 2), (0, 3), (1, 2), (1, 5), (3, 7), (4, 6), (4, 7), (5, 6)],
    2: [(0, 1), (0, 4), (1, 3), (2, 3), (2, 6), (4, 5), (5, 7), (6, 7)],
}
"""The same in the order of the evaluation of TE-CCL (Liu et al. 2024, arXiv:2305.13479)."""

MI250: Pairs = {
    1: [
        *[(0, 8), (1, 5), (1, 9), (1, 10), (2, 6), (2, 9), (2, 10), (3, 11)],
        *[(4, 6), (5, 6), (5, 7), (9, 13), (10, 14), (12, 14), (13, 14), (13, 15)],
    ],
    2: [(0, 4), (3, 7), (8, 12), (11, 15)],
    4: [(2 * i, 2 * i + 1) for i in range(8)],
}
"""Links of 50 GB/s between the 16 dies of 8 MI250s, as in the evaluation of ForestColl (Zhao et
al. 2024, arXiv:2402.06787)."""


def _meshed(num_hosts: int, size: int, pairs: Pairs, link: Link) -> Iterator[Wire]:
    """Hosts of GPUs that are wired to each other."""
    for host in range(0, num_hosts * size, size):
        for width, ends in pairs.items():
            wide = Link(link.alpha_secs, width * link.bytes_per_sec)
            for a, b in ends:
                yield from both_ways([host + a], host + b, wide)


def _dgx1(num_hosts: int) -> Iterator[Wire]:
    """A DGX-1: four NICs of 100 Gbit/s, one for two GPUs."""
    yield from _meshed(num_hosts, 8, CUBE_MESH, Link(NVLINK_SECS, BRICK))
    if num_hosts > 1:
        nic = Link(NIC_SECS, 12.5e9)
        for host in range(num_hosts):
            for i in range(4):
                name = f"host{host}.nic{i}"
                yield from both_ways([8 * host + 2 * i, 8 * host + 2 * i + 1], name, nic)
                yield from both_ways([name], FABRIC, nic)


def _ndv2(num_hosts: int) -> Iterator[Wire]:
    """Azure's NDv2: a DGX-1's GPUs and one NIC, which GPU 0 receives from and GPU 1 sends to.

    So it is in the evaluation of TE-CCL: two hosts are wired to each other, more to a switch.
    """
    yield from _meshed(num_hosts, 8, NDV2, Link(NVLINK_SECS, BRICK))
    nic = Link(NIC_SECS, 12.5e9)
    hosts = range(num_hosts)
    if num_hosts == 2:
        yield from (Wire(1, 8, nic), Wire(9, 0, nic))
    elif num_hosts > 2:
        for host in hosts:
            yield from (Wire(8 * host + 1, FABRIC, nic), Wire(FABRIC, 8 * host, nic))


def _dgx2(num_hosts: int) -> Iterator[Wire]:
    """A DGX-2: 16 V100s on a switch; two GPUs have a NIC, to which the odd one sends.

    The even one receives from it. So it is in the evaluation of TE-CCL, where two hosts are wired
    to each other; more are wired to a switch here.
    """
    port, nic = Link(NVLINK_SECS, 5 * BRICK), Link(NIC_SECS, 12.5e9)
    for host in range(num_hosts):
        first = 16 * host
        yield from both_ways(range(first, first + 16), f"host{host}", port)
        for odd in range(1, 16, 2) if num_hosts > 1 else ():
            if num_hosts == 2:
                yield Wire(first + odd, 16 * (1 - host) + odd - 1, nic)
            else:
                yield from (Wire(first + odd, FABRIC, nic), Wire(FABRIC, first + odd - 1, nic))


def _mi250(num_hosts: int) -> Iterator[Wire]:
    """Hosts of 8 MI250s, 16 dies, each with 16 GB/s to the other hosts."""
    yield from _meshed(num_hosts, 16, MI250, Link(NVLINK_SECS, 50e9))
    if num_hosts > 1:
        yield from both_ways(range(16 * num_hosts), FABRIC, Link(NIC_SECS, 16e9))


def _rails(port: float, nic: float) -> Callable[[int], Iterator[Wire]]:
    """Hosts of 8 GPUs on a switch; the NICs of equal GPUs of all hosts share another switch."""

    def wires(num_hosts: int) -> Iterator[Wire]:
        for host in range(num_hosts):
            ranks = range(8 * host, 8 * host + 8)
            yield from both_ways(ranks, f"host{host}", Link(NVLINK_SECS, port))
            for i, rank in enumerate(ranks if num_hosts > 1 else ()):
                yield from both_ways([rank], f"rail{i}", Link(NIC_SECS, nic))

    return wires


def _pcie_tree(num_hosts: int) -> Iterator[Wire]:
    """Hosts of two sockets, each with two PCIe 3.0 switches of two GPUs; a NIC of 100 Gbit/s."""
    port = Link(PCIE_SECS, PCIE3)
    for host in range(num_hosts):
        sockets = [f"host{host}.cpu{i}" for i in range(2)]
        for i, cpu in enumerate(sockets):
            for j in range(2):
                name = f"host{host}.pcie{2 * i + j}"
                first = 8 * host + 4 * i + 2 * j
                yield from both_ways([first, first + 1], name, port)
                yield from both_ways([name], cpu, port)
        # Two UPI links of 10.4 GT/s: 20.8 GB/s each way (Intel's data sheet of Skylake-SP).
        yield from both_ways([sockets[0]], sockets[1], Link(PCIE_SECS, 41.6e9))
        if num_hosts > 1:
            yield from both_ways([sockets[0]], FABRIC, Link(NIC_SECS, 12.5e9))


MACHINES: Mapping[str, tuple[int, Callable[[int], Iterator[Wire]]]] = {
    "dgx-1": (8, _dgx1),
    "ndv2": (8, _ndv2),
    "dgx-2": (16, _dgx2),
    "dgx-a100-rails": (8, _rails(12 * BRICK, 25e9)),
    "dgx-h100-rails": (8, _rails(18 * BRICK, 50e9)),
    "mi250": (16, _mi250),
    "pcie-tree": (8, _pcie_tree),
}
"""(ranks of a host, wires of a number of hosts) by name."""


MAX_PRESET_RANKS = 1 << 16
"""A preset has no more ranks, whose wires would not fit in memory."""

SHAPES: Mapping[str, Callable[[Sequence[int], Link], Network]] = {
    "line": lambda counts, link: mesh((prod(counts),), link),
    "ring": lambda counts, link: torus((prod(counts),), link),
    "mesh": mesh,
    "torus": torus,
}
"""Networks of neighbours by name; the counts are the ranks along each dim."""


def preset(name: str, *counts: int, link: Link = DEFAULT_LINK) -> Network:
    """The network of this name; ``Network.preset`` says how it is used."""
    if odd := [count for count in counts if type(count) is not int or count < 1]:
        raise LayoutError(f"preset {name!r}: expected counts of at least 1, not {quoted(odd[0])}.")
    if prod(counts) > MAX_PRESET_RANKS:
        raise LayoutError(
            f"preset {name!r} of {'x'.join(map(str, counts))}: at most {MAX_PRESET_RANKS} in all."
        )
    if name in PRESETS:
        return Network.of(Topology.preset(name, *(counts or (1,))))
    if name in SHAPES:
        return SHAPES[name](counts, link)
    if name not in MACHINES:
        known = ", ".join(sorted({*MACHINES, *PRESETS, *SHAPES}))
        raise LayoutError(f"no preset {name!r}; the presets are {known}.")
    size, wires = MACHINES[name]
    num_hosts = counts[0] if counts else 1
    if (len(counts) > 1 and counts[1:] != (size,)) or num_hosts * size > MAX_PRESET_RANKS:
        raise LayoutError(
            f"preset {name!r} of {'x'.join(map(str, counts))}: its hosts have {size} ranks, and "
            f"there are 1 to {MAX_PRESET_RANKS // size} of them."
        )
    return Network(tuple(wires(num_hosts)))
