"""Member: one tensor of a bundle, and what its way may take, from the layouts alone.

Every rank has to choose the same buckets and slices without reading the programs of others. So
they are chosen from bounds that are computed from the states of a path, never from a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from rvdcomm.layout import ITEM_BYTES, Layout, widest_pieces
from rvdcomm.planning.binding import Binding, R, V
from rvdcomm.planning.path import State, Step
from rvdcomm.plans.planner import Plan
from rvdcomm.program import ALIGN_BYTES, DST, SRC, Transition
from rvdcomm.program.lower import wire_dtype
from rvdcomm.program.slices import slicing_of

JOIN_BYTES = 1 << 20
"""Tensors with larger messages keep their collectives: a round costs less than their bytes do."""

BUFFERS_OF_LEG = 4
"""An exchange packs, publishes, receives and writes its result: a buffer each, at most."""


@dataclass(frozen=True, eq=False)
class Way:
    """How tensors of one transition travel: those of a bundle that are alike share the object."""

    transition: Transition
    plan: Plan

    def __contains__(self, rank: int) -> bool:
        """Whether ``rank`` takes part."""
        return rank in self.transition.src or rank in self.transition.dst

    @cached_property
    def dtype(self) -> str:
        """The dtype of staging, and of all that is sent."""
        return wire_dtype(self.transition)

    @cached_property
    def shard_bounds(self) -> list[tuple[int, int]]:
        """(rank, bytes of the largest shard) of both sides."""
        found = []
        for name in (SRC, DST):
            layout = self.transition.layout(name)
            size = layout.largest_shard * ITEM_BYTES[self.transition.dtype(name)]
            found += [(rank, size) for rank in layout.ranks]
        return found

    @cached_property
    def num_phases(self) -> int:
        """The most phases that a lane of its program has."""
        return 1 + sum(len(step.legs) for step in self.plan.path.steps)

    @cached_property
    def is_small(self) -> bool:
        """Whether its messages are worth joining with those of others."""
        legs = ((step, leg) for step in self.plan.path.steps for leg in step.legs)
        largest = max((_largest_message(step, *leg) for step, leg in legs), default=0)
        return largest * ITEM_BYTES[self.dtype] <= JOIN_BYTES

    def num_lanes(self, num_slices: int) -> int:
        """Lanes of its program in so many slices; one if its path is not to be sliced."""
        return slicing_of(self.plan.path, num_slices).num_slices

    def staging_bound(self, num_slices: int) -> dict[int, int]:
        """At least the bytes of all staging buffers of a lane together, by rank.

        Of a leg, a rank packs or publishes what it sends: its shard, once for every rank that is
        to hold a copy. It receives its new shard once for every part that is summed, and writes it.
        A lane is a slice of all of that.

        Law (tests/plans/test_bundle.py): never below the staging of any program of the member.
        """
        path, transition = self.plan.path, self.transition
        share = slicing_of(path, num_slices).largest_share
        item = ITEM_BYTES[self.dtype]
        found: dict[int, int] = {}

        def add(ranks: tuple[int, ...], num_elements: int, num_buffers: int) -> None:
            num_bytes = ceil(num_elements * share) * item + num_buffers * ALIGN_BYTES
            for rank in ranks:
                found[rank] = found.get(rank, 0) + num_bytes

        if transition.src_dtype != self.dtype and transition.src.rvd.v > 1:
            add(path.src.ranks, path.src.largest_shard, 1)
        legs = [(step, *leg) for step in path.steps for leg in step.legs]
        for i, (step, src, dst) in enumerate(legs):
            before, after = _largest_cell(src), _largest_cell(dst)
            copies, parts = _copies_and_parts(step, src, dst)
            in_place = (
                i == len(legs) - 1
                and step.kind != "all_reduce"
                and transition.dst_dtype == self.dtype
            )
            # Windows that follow one another have buffers of their own.
            num_buffers = BUFFERS_OF_LEG * step.num_slices * path.src.rvd.v
            add(src.ranks, before * copies, num_buffers)
            add(dst.ranks, after * (parts + (not in_place)), num_buffers)
        return found


@dataclass(frozen=True)
class Member:
    """One tensor of a bundle: its name on both sides, and its way."""

    src_name: str
    name: str
    way: Way

    @property
    def transition(self) -> Transition:
        """The layouts and dtypes that it has and gets."""
        return self.way.transition

    @property
    def plan(self) -> Plan:
        """The plan that it would have alone."""
        return self.way.plan


def shard_sizes(layout: Layout) -> dict[int, int]:
    """Elements of the shard of every rank."""
    if layout.is_even:
        return dict.fromkeys(layout.ranks, layout.largest_shard)
    return {rank: layout.cell(rank).box.num_elements for rank in layout.ranks}


def _largest_cell(state: State) -> int:
    """At least the elements that any rank holds in a state."""
    source = state.source
    if isinstance(source, Layout):
        return source.largest_shard
    return source.padded_elements // prod(source.grid.axes[a].size for a in _bound(source))


def _bound(binding: Binding) -> list[int]:
    """The axes that cut the tensor."""
    return [a for a, target in enumerate(binding.targets) if target >= 0]


def _copies_and_parts(step: Step, src: State, dst: State) -> tuple[int, int]:
    """How many ranks of a group get what one holds, and how many parts one gets at most."""
    a, b = src.source, dst.source
    copies = b.rvd.r * b.rvd.v if isinstance(b, Layout) else _sizes(b, step, (R, V))
    return copies, a.rvd.v if isinstance(a, Layout) else _sizes(a, step, (V,))


def _sizes(binding: Binding, step: Step, targets: tuple[int, ...]) -> int:
    """The product of the axes with these targets, of those that the step's groups span."""
    return prod(
        axis.size
        for a, axis in enumerate(binding.grid.axes)
        if binding.targets[a] in targets and (step.changed is None or a in step.changed)
    )


def _largest_message(step: Step, src: State, dst: State) -> int:
    """About the elements of the largest message of a leg: what a cell of either side shares.

    Holders of the same cell share a need, so messages from replicas are smaller.
    """
    a, b = src.source, dst.source
    if step.kind == "all_reduce":
        return _largest_cell(src)
    if isinstance(a, Layout) and isinstance(b, Layout):
        gaps = zip(widest_pieces(a.cuts), widest_pieces(b.cuts), strict=True)
        return prod(map(min, gaps))
    if step.changed is None or isinstance(a, Layout) or isinstance(b, Layout):
        return min(_largest_cell(src), _largest_cell(dst))
    digits = {x.targets[i]: x.grid.axes[i].size for x in (a, b) for i in _bound(x)}
    return min(a.padded_elements, b.padded_elements) // prod(digits.values())
