"""Member: one tensor of a bundle, and bounds on its memory that follow from its layouts alone.

Every rank has to choose the same buckets and slices without reading the programs of other ranks. So
they are chosen by bounds that are computed from the states of a path, never from a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from rvdcomm.layout import ITEM_BYTES, Layout, widest_pieces
from rvdcomm.planning.binding import Binding, R, V
from rvdcomm.planning.path import State, Step
from rvdcomm.plans.plan import Plan
from rvdcomm.program import ALIGN_BYTES, DST, SRC, Transition
from rvdcomm.program.lower import wire_dtype
from rvdcomm.program.slices import slicing_of

JOIN_BYTES = 1 << 20
"""Tensors with longer messages (in bytes) are not joined: their bytes cost more than a round."""

BUFFERS_OF_LEG = 4
"""An exchange has at most one buffer each for packing, publishing, receiving and the result."""


@dataclass(frozen=True, eq=False)
class TensorPlan:
    """The transition and the plan of a tensor; tensors with equal transitions share one object."""

    transition: Transition
    plan: Plan

    def __contains__(self, rank: int) -> bool:
        """Whether ``rank`` takes part."""
        return rank in self.transition.src or rank in self.transition.dst

    @cached_property
    def dtype(self) -> str:
        """The dtype of staging buffers and of messages."""
        return wire_dtype(self.transition)

    @cached_property
    def shard_bounds(self) -> list[tuple[int, int]]:
        """(rank, bytes of its layout's largest shard) of all ranks of src, then of dst."""
        found = []
        for name in (SRC, DST):
            layout = self.transition.layout(name)
            size = layout.largest_shard * ITEM_BYTES[self.transition.dtype(name)]
            found += [(rank, size) for rank in layout.ranks]
        return found

    @cached_property
    def num_phases(self) -> int:
        """An upper bound on the number of phases of a lane of the program."""
        return 1 + sum(len(step.step_exchanges) for step in self.plan.path.steps)

    @cached_property
    def is_small(self) -> bool:
        """Whether the messages are so small that they are joined with those of other tensors."""
        step_exchanges = (
            (step, step_exchange)
            for step in self.plan.path.steps
            for step_exchange in step.step_exchanges
        )
        largest = max(
            (_largest_message(step, *step_exchange) for step, step_exchange in step_exchanges),
            default=0,
        )
        return largest * ITEM_BYTES[self.dtype] <= JOIN_BYTES

    def num_lanes(self, num_slices: int) -> int:
        """Number of lanes of the program with ``num_slices``; 1 if the path cannot be sliced."""
        return slicing_of(self.plan.path, num_slices).num_slices

    def staging_bound(self, num_slices: int) -> dict[int, int]:
        """An upper bound on the bytes of all staging buffers of a lane together, by rank.

        In a exchange, a rank packs or publishes its shard once per rank that will hold a copy. The
        rank receives its new shard once per part that is summed, and then writes the new shard. A
        lane does this for one slice.

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
        step_exchanges = [
            (step, *step_exchange) for step in path.steps for step_exchange in step.step_exchanges
        ]
        for i, (step, src, dst) in enumerate(step_exchanges):
            before, after = src.source.largest_shard, dst.source.largest_shard
            copies, parts = _copies_and_parts(step, src, dst)
            in_place = (
                i == len(step_exchanges) - 1
                and step.kind != "all_reduce"
                and transition.dst_dtype == self.dtype
            )
            # Every window of a step has buffers of its own.
            num_buffers = BUFFERS_OF_LEG * step.num_slices * path.src.rvd.v
            add(src.ranks, before * copies, num_buffers)
            add(dst.ranks, after * (parts + (not in_place)), num_buffers)
        return found


@dataclass(frozen=True)
class Member:
    """One tensor of a bundle: its names in src and dst, and its way."""

    src_name: str
    name: str
    tensor_plan: TensorPlan

    @property
    def transition(self) -> Transition:
        """The layouts and dtypes of the tensor before and after."""
        return self.tensor_plan.transition

    @property
    def plan(self) -> Plan:
        """The plan of this tensor alone."""
        return self.tensor_plan.plan


def shard_sizes(layout: Layout) -> dict[int, int]:
    """Elements of the shard of every rank."""
    if layout.is_even:
        return dict.fromkeys(layout.ranks, layout.largest_shard)
    return {rank: layout.cell(rank).box.num_elements for rank in layout.ranks}


def _copies_and_parts(step: Step, src: State, dst: State) -> tuple[int, int]:
    """The number of ranks that get what one rank holds, and the most parts that one rank gets."""
    a, b = src.source, dst.source
    copies = b.rvd.r * b.rvd.v if isinstance(b, Layout) else _sizes(b, step, (R, V))
    return copies, a.rvd.v if isinstance(a, Layout) else _sizes(a, step, (V,))


def _sizes(binding: Binding, step: Step, targets: tuple[int, ...]) -> int:
    """The product of the sizes of the step's axes that have these targets."""
    return prod(
        axis.size
        for a, axis in enumerate(binding.grid.axes)
        if binding.targets[a] in targets and (step.changed is None or a in step.changed)
    )


def _largest_message(step: Step, src: State, dst: State) -> int:
    """An estimate of the elements of a exchange's largest message: the largest overlap of two
    cells.

    Holders of the same cell share a need, so messages from replicas are smaller.
    """
    a, b = src.source, dst.source
    if step.kind == "all_reduce":
        return a.largest_shard
    if isinstance(a, Layout) and isinstance(b, Layout):
        gaps = zip(widest_pieces(a.cuts), widest_pieces(b.cuts), strict=True)
        return prod(map(min, gaps))
    if step.changed is None or isinstance(a, Layout) or isinstance(b, Layout):
        return min(a.largest_shard, b.largest_shard)
    bound = (zip(x.targets, x.grid.axes, strict=True) for x in (a, b))
    digits = {target: axis.size for pairs in bound for target, axis in pairs if target >= 0}
    return min(a.padded_elements, b.padded_elements) // prod(digits.values())
