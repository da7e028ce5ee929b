"""Member: one tensor of a bundle, and what the bundle has to know of its plan.

Every rank has to choose the same buckets and slices without reading the programs of other ranks. So
they are chosen by bounds that are computed from states and trees, never from a program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rvdcomm.layout import ITEM_BYTES, Layout
from rvdcomm.network import Topology
from rvdcomm.plans.plan import Plan
from rvdcomm.program import DST, SRC, SharedDomains, Transition, wire_dtype
from rvdcomm.program.interleave import Lanes

if TYPE_CHECKING:
    from rvdcomm.plans.load import Load, Ports

JOIN_BYTES = 1 << 20
"""Tensors with longer messages (in bytes) are not joined: their bytes cost more than a round."""


@dataclass(frozen=True, eq=False)
class TensorPlan(ABC):
    """The transition and the plan of a tensor; tensors with equal transitions share one object.

    There are two kinds: by a path of steps, and by trees.
    """

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

    @property
    def identity(self) -> str:
        """A text that is equal on all ranks that move the tensor in the same way."""
        steps = [(step.kind, step.dst.text) for step in self.plan.path.steps]
        return f"{self.transition.lines('')} {steps}"

    @cached_property
    def is_small(self) -> bool:
        """Whether the messages are so small that they are joined with those of other tensors."""
        return self._largest_message * ITEM_BYTES[self.dtype] <= JOIN_BYTES

    # --- of each kind of plan -------------------------------------------------------------------

    @property
    @abstractmethod
    def _largest_message(self) -> int:
        """An estimate of the elements of the largest message."""

    @property
    @abstractmethod
    def num_phases(self) -> int:
        """An upper bound on the number of phases of a lane of the program."""

    @abstractmethod
    def num_lanes(self, num_slices: int) -> int:
        """Number of lanes of the program with ``num_slices``."""

    @abstractmethod
    def staging_bound(self, num_slices: int) -> dict[int, int]:
        """An upper bound on the bytes of all staging buffers of a lane together, by rank.

        Law (tests/plans/test_bundle.py): never below the staging of any program of the member.
        """

    @abstractmethod
    def lanes(
        self,
        num_slices: int,
        topology: Topology,
        *,
        ranks: tuple[int, ...] | None,
        domains: SharedDomains,
    ) -> Lanes:
        """The instructions, lane by lane, as in ``program.lower.lanes``."""

    @abstractmethod
    def loads(self, ports: Ports) -> Iterator[Load]:
        """The load of every exchange."""


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
