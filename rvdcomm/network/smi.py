"""The matrix that ``nvidia-smi topo -m`` prints, as a network of one host.

The matrix says how each pair of GPUs is connected, and not how fast. Rates come from the tables
below. If the NVLinks of all pairs are equal and more than a GPU has, they lead to an NVSwitch. PCIe
is a tree: GPUs under one switch (PIX, PXB), switches under one socket (PHB, NODE), sockets (SYS).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from rvdcomm.errors import LayoutError
from rvdcomm.network.link import Link
from rvdcomm.network.machines import BRICK, NVLINK_SECS, PCIE3, PCIE_SECS
from rvdcomm.network.network import Network, Node, Wire, both_ways
from rvdcomm.text import quoted

BRICKS: Mapping[int, tuple[float, int]] = {
    1: (20e9, 4),
    2: (BRICK, 6),
    3: (BRICK, 12),
    4: (BRICK, 18),
    5: (2 * BRICK, 18),
}
"""(bytes a second and direction of an NVLink, NVLinks of a GPU) by generation: P100, V100, A100,
H100, B200 (NVIDIA's data sheets)."""

UPI = 20.8e9
"""Bytes a second and direction between two sockets (a UPI link of 10.4 GT/s)."""

_SAME_SWITCH, _SAME_SOCKET, _OTHER_SOCKET = {"PIX", "PXB"}, {"PHB", "NODE"}, {"SYS", "SOC", "QPI"}
_NVLINK = re.compile(r"NV(\d{1,2})")
_MARKS = re.compile(r"\x1b\[[0-9;]*m")
MAX_GPUS = 64
"""GPUs of a matrix; the largest hosts have 16."""


def parse_matrix(
    text: str, nvlink: int | None = None, pcie_bytes_per_sec: float = PCIE3
) -> Network:
    """The network of a host, from the matrix; rank ``i`` is GPU ``i``.

    Args:
        text: what ``nvidia-smi topo -m`` prints; columns of NICs and CPUs are left out.
        nvlink: the generation of NVLink, 1 to 5; by default the oldest with as many links on a GPU
            as the matrix shows.
        pcie_bytes_per_sec: the rate of a PCIe port, each way.

    Raises:
        LayoutError: there is no such matrix in the text, it is not symmetric, or it has more
            NVLinks than a GPU of the generation.
    """
    kinds, sockets = _rows(text)
    num_bricks = [[_bricks(kind) for kind in row] for row in kinds]
    return Network(
        (*_nvlinks(num_bricks, nvlink), *_pcie(kinds, sockets, Link(PCIE_SECS, pcie_bytes_per_sec)))
    )


def _rows(text: str) -> tuple[list[list[str]], list[str]]:
    """The kinds of connection between GPUs, [GPUs][GPUs], and the CPUs that each GPU is near."""
    lines = [_MARKS.sub("", line).split() for line in text.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    count = sum(1 for i, word in enumerate(header) if word == f"GPU{i}")
    rows = {words[0]: words[1:] for words in lines if words and "X" in words}
    found = [rows.get(f"GPU{i}", [])[:count] for i in range(count)]
    # Columns of NICs lie between those of the GPUs and that of the CPUs.
    near = header.index("CPU") if "CPU" in header else len(header)
    cpus = ["".join(rows.get(f"GPU{i}", [])[near : near + 1]) for i in range(count)]
    if not 2 <= count <= MAX_GPUS or any(len(row) != count for row in found):
        raise LayoutError(
            "no matrix of 'nvidia-smi topo -m' of 2 GPUs and more: expected a line of GPU0 GPU1 "
            "..., and for each GPU a line of its connections."
        )
    known = {"X", *_SAME_SWITCH, *_SAME_SOCKET, *_OTHER_SOCKET}
    for i, row in enumerate(found):
        for j, kind in enumerate(row):
            if (kind not in known and not _NVLINK.fullmatch(kind)) or (kind == "X") != (i == j):
                raise LayoutError(f"GPU{i} to GPU{j} of the matrix is {quoted(kind)}.")
            if kind != found[j][i]:
                raise LayoutError(
                    f"GPU{i} to GPU{j} of the matrix is {kind}, and back it is {found[j][i]}."
                )
    return found, cpus


def _bricks(kind: str) -> int:
    found = _NVLINK.fullmatch(kind)
    return int(found[1]) if found else 0


def _nvlinks(num_bricks: Sequence[Sequence[int]], generation: int | None) -> Iterator[Wire]:
    most, different = max(map(sum, num_bricks)), {n for row in num_bricks for n in row if n}
    if not different:
        return
    # Behind a switch, every pair shows all links of a GPU.
    all_pairs = sum(bool(n) for row in num_bricks for n in row) == len(num_bricks) * (
        len(num_bricks) - 1
    )
    is_switched = len(different) == 1 and all_pairs and most > max(n for _, n in BRICKS.values())
    used = different.pop() if is_switched else most
    if generation is None:
        generation = next((g for g, (_, links) in BRICKS.items() if g > 1 and used <= links), 4)
    if generation not in BRICKS or used > BRICKS[generation][1]:
        raise LayoutError(
            f"the matrix shows {used} NVLinks of a GPU; NVLink {quoted(generation)} has "
            f"{BRICKS.get(generation, (0, 'no'))[1]} (known are 1 to {max(BRICKS)})."
        )
    rate = BRICKS[generation][0]
    if is_switched:
        link = Link(NVLINK_SECS, used * rate)
        yield from both_ways(range(len(num_bricks)), "nvswitch", link)
        return
    for a, row in enumerate(num_bricks):
        for b, width in enumerate(row[:a]):
            if width:
                yield from both_ways([a], b, Link(NVLINK_SECS, width * rate))


def _pcie(kinds: Sequence[Sequence[str]], cpus: Sequence[str], link: Link) -> Iterator[Wire]:
    """The tree of switches and sockets, if some pair of GPUs needs it."""
    if all(kind == "X" or _bricks(kind) for row in kinds for kind in row):
        return

    def is_near(a: int, b: int) -> bool:
        # A pair with NVLinks does not show where it is on PCIe; the CPUs do.
        return kinds[a][b] in _SAME_SOCKET or (
            bool(_bricks(kinds[a][b])) and cpus[a] == cpus[b] != ""
        )

    def is_at_a_switch(a: int, b: int) -> bool:
        return kinds[a][b] in _SAME_SWITCH

    above: dict[int, Node] = {}
    for i, group in enumerate(_groups(len(kinds), is_at_a_switch)):
        switch = f"pcie{i}"
        above |= {rank: rank if len(group) == 1 else switch for rank in group}
        if len(group) > 1:
            yield from both_ways(group, switch, link)
    sockets = _groups(len(kinds), lambda a, b: is_at_a_switch(a, b) or is_near(a, b))
    for i, group in enumerate(sockets):
        under = dict.fromkeys(above[rank] for rank in group)
        if len(sockets) > 1 or len(under) > 1:
            yield from both_ways(under, f"cpu{i}", link)
    names = [f"cpu{i}" for i in range(len(sockets))]
    if len(sockets) == 2:
        yield from both_ways(names[:1], names[1], Link(PCIE_SECS, UPI))
    elif len(sockets) > 2:
        yield from both_ways(names, "upi", Link(PCIE_SECS, UPI))


def _groups(count: int, joins: Callable[[int, int], bool]) -> list[list[int]]:
    """Numbers below ``count`` that pairs join, each group ascending."""
    groups: list[list[int]] = []
    for number in range(count):
        joined = [group for group in groups if any(joins(number, other) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([number, *(other for group in joined for other in group)]))
    return sorted(groups)
