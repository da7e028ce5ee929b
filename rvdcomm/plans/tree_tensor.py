"""Tree tensor: a tensor of a bundle that goes along trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from rvdcomm.cost.demands import demand_boxes
from rvdcomm.layout import ITEM_BYTES, Box
from rvdcomm.network import Topology
from rvdcomm.plans.load import Load, Ports
from rvdcomm.plans.member import TensorPlan
from rvdcomm.program import ALIGN_BYTES, SharedDomains
from rvdcomm.program.interleave import Lanes
from rvdcomm.program.trees import lanes_of_trees, split
from rvdcomm.synthesis import Forest, Pair


@dataclass(frozen=True, eq=False)
class TreeTensor(TensorPlan):
    """A tensor that goes along trees, beat by beat."""

    @property
    def forest(self) -> Forest:
        """The trees."""
        assert self.plan.forest is not None, "the plan goes along trees"
        return self.plan.forest

    @property
    def identity(self) -> str:
        return f"{super().identity} {self.forest.to_json()}"

    @cached_property
    def _hops(self) -> list[tuple[int, Pair, Box]]:
        """(beat, ranks, box) of every message, if the tensor is not sliced."""
        forest = self.forest
        ways = dict(zip(forest.demands, forest.ways, strict=True))
        found = []
        for demand, boxes in demand_boxes(self.transition.src, self.transition.dst):
            of_demand = ways.get(demand, ())
            beats = [[side for tree in way for side in forest.beats(tree)] for way, _ in of_demand]
            for box in boxes:
                parts = split(box, [share for _, share in of_demand])
                for part, sides in zip(parts, beats, strict=True):
                    if part is not None:
                        found += [(at, pair, part) for side in sides for pair, at in side.items()]
        return found

    @cached_property
    def _sent(self) -> list[Counter[Pair]]:
        """Elements from rank to rank in every beat."""
        found = [Counter[Pair]() for _ in range(self.forest.num_beats)]
        for beat, pair, box in self._hops:
            found[beat][pair] += box.num_elements
        return found

    @property
    def _largest_message(self) -> int:
        return max((n for sent in self._sent for n in sent.values()), default=0)

    @property
    def num_phases(self) -> int:
        return 1 + self.forest.num_beats

    def num_lanes(self, num_slices: int) -> int:
        return num_slices

    def staging_bound(self, num_slices: int) -> dict[int, int]:
        """An upper bound on the bytes of all staging buffers of a lane together, by rank.

        A hop has its elements packed or published where they come from, and received, and perhaps
        added to others, where they go to.
        """
        item = ITEM_BYTES[self.dtype]
        found: dict[int, int] = {}
        buffers = set[tuple[int, int, bool]]()
        for beat, (src, dst), box in self._hops:
            longest = max(box.shape, default=1)
            num_bytes = prod(box.shape) // longest * ceil(longest / num_slices) * item
            found[src] = found.get(src, 0) + num_bytes
            found[dst] = found.get(dst, 0) + 2 * num_bytes
            buffers |= {(src, beat, True), (dst, beat, False)}
        for rank, _, is_sent in buffers:
            found[rank] += ALIGN_BYTES * (1 if is_sent else 2)
        return found

    def lanes(
        self,
        num_slices: int,
        topology: Topology,
        *,
        ranks: tuple[int, ...] | None,
        domains: SharedDomains,
    ) -> Lanes:
        return lanes_of_trees(
            self.transition,
            self.dtype,
            self.forest,
            num_slices,
            ranks=ranks,
            domains=domains,
            staged=self.is_small,
        )

    def loads(self, ports: Ports) -> Iterator[Load]:
        call = tuple(sorted({rank for pairs in self._sent for pair in pairs for rank in pair}))
        for beat, sent in enumerate(self._sent):
            load = ports.of_pairs(sent, ITEM_BYTES[self.dtype])
            # Tensors that are in the same beat are in the same bucket.
            yield replace(load, call=(beat, call)) if self.is_small else load
