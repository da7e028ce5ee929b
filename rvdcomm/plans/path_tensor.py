"""Path tensor: a tensor of a bundle that goes through the steps of a path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from rvdcomm.layout import ITEM_BYTES, Layout, widest_pieces
from rvdcomm.network import Topology
from rvdcomm.planning.binding import Binding, R, V
from rvdcomm.planning.path import State, Step
from rvdcomm.plans.load import Load, Ports
from rvdcomm.plans.member import TensorPlan
from rvdcomm.program import ALIGN_BYTES, SharedDomains
from rvdcomm.program.interleave import Lanes
from rvdcomm.program.lower import lanes
from rvdcomm.program.slices import slicing_of

BUFFERS_OF_LEG = 4
"""An exchange has at most one buffer each for packing, publishing, receiving and the result."""


@dataclass(frozen=True, eq=False)
class PathTensor(TensorPlan):
    """A tensor that goes through the steps of a path."""

    @cached_property
    def num_phases(self) -> int:
        return 1 + sum(len(step.step_exchanges) for step in self.plan.path.steps)

    @cached_property
    def _largest_message(self) -> int:
        step_exchanges = (
            (step, step_exchange)
            for step in self.plan.path.steps
            for step_exchange in step.step_exchanges
        )
        return max(
            (_largest_message(step, *step_exchange) for step, step_exchange in step_exchanges),
            default=0,
        )

    def num_lanes(self, num_slices: int) -> int:
        """Number of lanes; 1 if the path cannot be sliced."""
        return slicing_of(self.plan.path, num_slices).num_slices

    def staging_bound(self, num_slices: int) -> dict[int, int]:
        """An upper bound on the bytes of all staging buffers of a lane together, by rank.

        In an exchange, a rank packs or publishes its shard once per rank that will hold a copy. The
        rank receives its new shard once per part that is summed, and then writes the new shard. A
        lane does this for one slice.
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

    def lanes(
        self,
        num_slices: int,
        topology: Topology,
        *,
        ranks: tuple[int, ...] | None,
        domains: SharedDomains,
    ) -> Lanes:
        path, transition = self.plan.path, self.transition
        return lanes(
            path,
            transition,
            topology,
            ranks=ranks,
            domains=domains,
            num_slices=num_slices,
            staged=self.is_small,
        )

    def loads(self, ports: Ports) -> Iterator[Load]:
        for step in self.plan.path.steps:
            for load in ports.of_step(step, ITEM_BYTES[self.dtype]):
                yield replace(load, call=(step.kind, step.groups)) if self.is_small else load


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
    """An estimate of the elements of an exchange's largest message: the largest overlap of two
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
