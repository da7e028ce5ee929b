"""Member: one tensor of a bundle."""

from __future__ import annotations

from dataclasses import dataclass

from rvdcomm.plans.planner import Plan
from rvdcomm.program import Transition

JOIN_BYTES = 1 << 20
"""Tensors with larger messages keep their collectives: a round costs less than their bytes do."""


@dataclass(frozen=True)
class Member:
    """One tensor of a bundle: what it is called on either side, its way, and its plan alone."""

    src_name: str
    name: str
    transition: Transition
    plan: Plan

    @property
    def is_small(self) -> bool:
        """Whether its messages are worth joining with those of others."""
        program = self.plan.program
        messages = (m for one in program.collectives for m in one.messages)
        largest = max((m.num_elements for m in messages), default=0)
        return largest * program.item_bytes <= JOIN_BYTES
