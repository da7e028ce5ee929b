"""Primitives: what one change of a binding is called, and what it costs in closed form.

A step *rebinds* some axes inside their product group. There is one formula for its bytes and one
table for its name; the names only choose the best-known implementation of a pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil, lcm, prod

import numpy as np

from rvdcomm.errors import LayoutError
from rvdcomm.layout import Topology
from rvdcomm.planning.binding import Binding, Grid, R, V

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
"""Name of a step by what its changed axes were bound to and are bound to."""

MOVES_NOTHING = frozenset({"slice", "mask", "local"})
"""Kinds of steps that every rank does alone."""

KINDS = frozenset({*KIND_OF_CHANGE.values(), "permute", "exchange", "transfer", "local"})
"""All kinds of steps. ``transfer`` is an exchange between two rank sets, ``local`` a copy."""


def role(target: int) -> str:
    """What a target is: ``R``, ``V`` or ``digit`` (a scratch digit is a digit)."""
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


def product_groups(src: Binding, dst: Binding) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that differ only in the axes that change; each ascending."""
    grid = src.grid
    fixed = [a for a, (s, t) in enumerate(zip(src.targets, dst.targets, strict=True)) if s == t]
    changed = [a for a in range(len(grid.axes)) if a not in fixed]
    sizes = [axis.size for axis in grid.axes]
    ranks = np.array(grid.ranks).reshape(sizes).transpose(fixed + changed)
    groups = np.sort(ranks.reshape(-1, prod(sizes[a] for a in changed)), axis=1)
    return tuple(sorted(map(tuple, groups.tolist())))


@dataclass(frozen=True)
class RebindPricer:
    """Integer costs of rebinds on ``grid`` of a tensor of ``num_bytes``.

    One *tick* is ``secs_per_tick`` seconds, a rational chosen so that every cost is a whole number
    of ticks: sums are exact, so that ties are ties and plans never depend on rounding.

    Formula (tests/planning/test_primitives.py compares it with counted bytes): let L be the bytes
    of a shard under dst and v the number of parts that every element of it sums. A group of a level
    needs ``group size * v * L`` bytes; of them its own ranks hold the fraction
    ``prod(f(a) for axes a outside the group)``, where ``f(a)`` is 1 if a is bound to R, or to the
    same target on both sides; ``1/k`` if a leaves V or its digit becomes local; and if its digit
    moves to another axis b, ``1/k`` on average for b inside the group, 0 at worst for b outside.
    """

    grid: Grid
    topology: Topology
    num_bytes: int

    @cached_property
    def scale(self) -> TickScale:
        """Whole-number units of all costs on this grid."""
        ticks_a_sec, ticks_a_byte, ticks_a_round = _link_ticks(self.topology)
        # Bytes are counted in units of 1 / square, which makes all of them whole.
        square = len(self.grid.ranks) ** 2
        return TickScale(
            square=square,
            ticks_a_sec=square * ticks_a_sec,
            ticks_a_unit=ticks_a_byte,
            ticks_a_round=tuple(square * ticks for ticks in ticks_a_round),
        )

    def secs(self, ticks: int) -> float:
        """A cost in seconds."""
        return ticks / self.scale.ticks_a_sec

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(axis.size for axis in self.grid.axes)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """For every axis, the farthest level that a byte along it crosses."""
        return tuple(
            sum(a in outer for outer in self.outer_axes) - 1 for a in range(len(self.sizes))
        )

    @cached_property
    def outer_axes(self) -> list[list[int]]:
        """For every level, the axes that tell its groups apart."""
        axes = list(enumerate(self.grid.axes))
        return [[a for a, axis in axes if axis.stride >= block] for block in self.grid.blocks]

    def port_bytes(self, src: Targets, dst: Targets) -> list[int]:
        """Bytes into the busiest group of every level, times the square of the rank count."""
        sizes, num_ranks = self.sizes, len(self.grid.ranks)
        axis_of = {t: a for a, t in enumerate(dst) if t >= 0}
        held = parts = 1
        for k, s, t in zip(sizes, src, dst, strict=True):
            if t >= 0:
                held *= k
            if s == V != t:
                parts *= k
        shard = self.num_bytes * parts * (num_ranks // held)
        out = []
        for outer, block in zip(self.outer_axes, self.grid.blocks, strict=True):
            missing = 1
            for a in outer:
                s = src[a]
                if s != R and s != dst[a]:
                    missing *= sizes[a] if axis_of.get(s) not in outer else 0
            out.append(shard * block * (num_ranks - (num_ranks // missing if missing else 0)))
        return out

    @staticmethod
    def is_priced(src: Targets, dst: Targets) -> bool:
        """Whether a digit is bound at most once, and V is entered by masks alone."""
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
        busiest, farthest = self.busiest(self.port_bytes(src, dst))
        if farthest is None:
            return 0, 0
        rounds = self._rounds(src, dst)
        return busiest + rounds * self.scale.ticks_a_round[farthest], rounds

    def busiest(self, port_bytes: list[int]) -> tuple[int, int | None]:
        """Ticks of the busiest port, and the farthest level that is crossed."""
        ticks, farthest = 0, None
        for level, num in enumerate(port_bytes):
            if num:
                ticks, farthest = max(ticks, num * self.scale.ticks_a_unit[level]), level
        return ticks, farthest

    def _rounds(self, src: Targets, dst: Targets) -> int:
        """Partners of the busiest rank: ranks that hold a piece it needs, less itself.

        At least: replicas that leave R may share a need, and then a rank has more partners.
        """
        axis_of = {t: a for a, t in enumerate(dst) if t >= 0}
        holders, is_own = 1, True
        for a, (s, t) in enumerate(zip(src, dst, strict=True)):
            if s == V != t or (s >= 0 and s not in axis_of):
                holders *= self.sizes[a]
            elif s >= 0 and axis_of[s] != a:
                is_own = False
        return holders - is_own

    def bound_ticks(self, src: Targets, dst: Targets) -> int:
        """A lower bound on all paths from ``src`` to ``dst``; 0 only where nothing must move."""
        busiest, farthest = self.busiest(self.union_bytes(src, dst))
        if farthest is None:
            return 0
        # A message that must leave a group of this level may go any farther, if that is quicker.
        return busiest + min(self.scale.ticks_a_round[farthest:])

    def union_bytes(self, src: Targets, dst: Targets) -> list[int]:
        """Bytes that must enter a group of every level, times the square of the rank count.

        Source: docs/bound.md, with each group taken as one node; where parts are summed or made,
        ``messages_an_element``.
        """
        sizes, square = self.sizes, self.scale.square
        axis_of = {t: a for a, t in enumerate(dst) if t >= 0}
        out = []
        for outer in self.outer_axes:
            need = groups = missing = src_r = src_v = dst_r = dst_v = 1
            for a in outer:
                k, s, t = sizes[a], src[a], dst[a]
                groups *= k
                if t >= 0:
                    need *= k
                elif t == R:
                    dst_r *= k
                else:
                    dst_v *= k
                if s == R:
                    src_r *= k
                elif s == V:
                    src_v *= k
                elif s != t:
                    missing *= k if axis_of.get(s) not in outer else 0
            if src_v > 1 or dst_v > 1:
                units = square // groups * messages_an_element(src_r, src_v, dst_r, dst_v)
            else:
                units = square // need - (square // (need * missing) if missing else 0)
            out.append(self.num_bytes * units)
        return out


@dataclass(frozen=True, slots=True)
class TickScale:
    """Whole-number units of a search: see ``RebindPricer``. One entry a level."""

    square: int
    ticks_a_sec: int
    ticks_a_unit: tuple[int, ...]
    ticks_a_round: tuple[int, ...]


MAX_EXACT_BITS = 72
"""Denominators above this are rounded, so that costs fit in 128 bits."""

BITS_OF_A_BYTE = 30
"""What a rounded link keeps at least: an error below a billionth."""


@lru_cache(maxsize=64)
def _link_ticks(topology: Topology) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Ticks a second, and for every level ticks a byte and a round: whole numbers.

    A link's figures are taken as the decimals that they print as. Decimals of few digits have a
    small common denominator and are exact.
    """
    links = [level.link for level in topology.levels]
    secs_a_byte = [_inverse(link.bytes_per_sec) for link in links]
    alphas = [Fraction(repr(float(link.alpha_secs))) for link in links]
    common = lcm(*(f.denominator for f in (*secs_a_byte, *alphas)))
    if common.bit_length() > MAX_EXACT_BITS:
        quickest = min((f for f in (*secs_a_byte, *alphas) if f), default=Fraction(1))
        common = ceil(2**BITS_OF_A_BYTE / quickest)
    ticks = [[round(f * common) for f in figures] for figures in (secs_a_byte, alphas)]
    return common, tuple(ticks[0]), tuple(ticks[1])


def _inverse(bytes_per_sec: float) -> Fraction:
    if bytes_per_sec == float("inf"):
        return Fraction(0)
    return 1 / Fraction(repr(float(bytes_per_sec)))


def messages_an_element(src_r: int, src_v: int, dst_r: int, dst_v: int) -> int:
    """Fewest messages that one element needs when parts are summed or made, ranks being the same.

    Source: docs/bound.md, "Messages in all". For ``dst_v > 1``: to merge ``src_v`` values into
    ``dst_v`` takes a message for each that disappears; and the value of some part must reach
    ``dst_r`` ranks, of which at most ``src_r`` have it.
    """
    if dst_v == 1:
        return src_v + dst_r - 2
    return max(src_v - dst_v, dst_r - src_r if src_v == 1 else 0, 0)
