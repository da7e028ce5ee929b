"""Primitives: the name of a step between two bindings, and its cost by formula.

A step *rebinds* some axes. It moves data inside groups of ranks that differ in these axes alone.
One formula gives its bytes (docs/primitives.md), and one table gives its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rvdcomm.cost import PortTicks
from rvdcomm.errors import LayoutError
from rvdcomm.network import Topology
from rvdcomm.planning.binding import Grid, R, V

Targets = tuple[int, ...]

KIND_OF_CHANGE = {
    ("digit", "R"): "all_gather",
    ("digit", "digit"): "all_to_all",
    ("V", "R"): "all_reduce",
    ("V", "digit"): "reduce_scatter",
    ("R", "digit"): "slice",
    ("R", "V"): "mask",
    ("digit", "V"): "mask",
}
"""The name of a step, by the roles that its rebound axes have before and after the step."""

MOVES_NOTHING = frozenset({"slice", "mask", "local"})
"""Kinds of steps in which no rank needs data of another rank."""


def axes_by_digit(targets: Targets) -> dict[int, int]:
    """The axis that is bound to each digit."""
    return {t: a for a, t in enumerate(targets) if t >= 0}


def role(target: int) -> str:
    """The role of a target: ``R``, ``V`` or ``digit``, scratch digits included."""
    return {R: "R", V: "V"}.get(target, "digit")


def kind_of_rebind(src: Targets, dst: Targets) -> str:
    """Name the step between two bindings of one grid.

    >>> kind_of_rebind((0, 1), (R, 1))
    'all_gather'
    >>> kind_of_rebind((0, 1), (1, 0))
    'permute'
    >>> kind_of_rebind((0, 1), (1, 2))  # axes 0 and 1 want digits that overlap: no plain pattern
    'exchange'
    """
    changed = [(a, b) for a, b in zip(src, dst, strict=True) if a != b]
    if not changed:
        return "local"
    kinds = {KIND_OF_CHANGE.get((role(a), role(b)), "exchange") for a, b in changed}
    before, after = zip(*changed, strict=True)
    if len(changed) > 1 and sorted(before) == sorted(after):
        return "permute"
    is_chained = any(t >= 0 for t in set(before) & set(after))
    return kinds.pop() if len(kinds) == 1 and not is_chained else "exchange"


@dataclass(frozen=True)
class RebindPricer:
    """A pricer of rebinds on ``grid``, for a tensor of ``num_bytes``.

    Costs are whole ticks (``PortTicks``): sums are exact, and plans never depend on rounding.

    Formula (tests/planning/test_primitives.py compares it with counted bytes): let L be the bytes
    of a shard under dst, and v the number of parts that are summed in each of its elements. A group
    of a level needs ``group size * v * L`` bytes. Its own ranks hold the fraction
    ``prod(f(a) for axes a outside the group)`` of them, where k is the size of a and ``f(a)`` is

    - 1 if a is bound to R in src, or to the same target in src and dst;
    - ``1/k`` if a leaves V, or if no axis is bound to its digit in dst;
    - ``1/k`` if its digit goes to an axis inside the group;
    - 0 for the group that has least, if its digit goes to another axis outside the group.
    """

    grid: Grid
    topology: Topology
    num_bytes: int

    @property
    def square(self) -> int:
        """Bytes are counted in units of ``1 / square`` of a byte, so that fractions are whole."""
        return len(self.grid.ranks) ** 2

    @cached_property
    def ports(self) -> PortTicks:
        """The ports of the topology, for these units."""
        return PortTicks.of(self.topology, self.square)

    def secs(self, ticks: int) -> float:
        """A cost in seconds."""
        return ticks / self.ports.a_sec

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(axis.size for axis in self.grid.axes)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """For every axis, the outermost level between ranks that differ in this axis alone."""
        return tuple(
            sum(a in outer for outer in self.grid.outer_axes) - 1 for a in range(len(self.sizes))
        )

    def missing(
        self, outer: Sequence[int], src: Targets, dst: Targets, axis_of_dst: Mapping[int, int]
    ) -> int:
        """The n such that a group has one n-th of its need; 0 if some group has none of its need.

        ``outer`` are the axes outside the group.
        """
        missing = 1
        for a in outer:
            s = src[a]
            if s != R and s != dst[a]:
                missing *= self.sizes[a] if axis_of_dst.get(s, -1) not in outer else 0
        return missing

    def port_bytes(self, src: Targets, dst: Targets) -> list[int]:
        """Units of bytes into the busiest group of every level."""
        sizes, num_ranks = self.sizes, len(self.grid.ranks)
        held = parts = 1
        for k, s, t in zip(sizes, src, dst, strict=True):
            if t >= 0:
                held *= k
            if s == V != t:
                parts *= k
        shard = self.num_bytes * parts * (num_ranks // held)
        axis_of, out = axes_by_digit(dst), []
        for outer, block in zip(self.grid.outer_axes, self.grid.blocks, strict=True):
            missing = self.missing(outer, src, dst, axis_of)
            out.append(shard * block * (num_ranks - (num_ranks // missing if missing else 0)))
        return out

    @staticmethod
    def is_priced(src: Targets, dst: Targets) -> bool:
        """Whether the step has a price: dst binds no digit twice, and only masks bind axes to V."""
        digits = [t for t in dst if t >= 0]
        if len(set(digits)) != len(digits):
            return False
        enters_v = any(t == V != s for s, t in zip(src, dst, strict=True))
        return not enters_v or kind_of_rebind(src, dst) == "mask"

    def ticks(self, src: Targets, dst: Targets) -> tuple[int, int]:
        """Cost of one step, in ticks, and its rounds.

        Raises:
            LayoutError: the step moves bytes and binds an axis to V, which no formula covers.
        """
        kind = kind_of_rebind(src, dst)
        if kind in MOVES_NOTHING:
            return 0, 0
        if any(t == V != s for s, t in zip(src, dst, strict=True)):
            raise LayoutError(f"no closed-form cost for {kind} into V; mask in a step of its own.")
        port_bytes = self.port_bytes(src, dst)
        rounds = self._rounds(src, dst) if any(port_bytes) else 0
        return self.ports.step(port_bytes, rounds), rounds

    def _rounds(self, src: Targets, dst: Targets) -> int:
        """Partners of the busiest rank: the other ranks that hold a piece of its need.

        If replicas leave R, they may share a need. A rank then has more partners than this.
        """
        axis_of = axes_by_digit(dst)
        holders, is_own = 1, True
        for a, (s, t) in enumerate(zip(src, dst, strict=True)):
            if s == V != t or (s >= 0 and s not in axis_of):
                holders *= self.sizes[a]
            elif s >= 0 and axis_of[s] != a:
                is_own = False
        return holders - is_own
