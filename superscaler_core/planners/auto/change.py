"""Change: what auto decides anew about a plan that another planner has filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from superscaler_core.plan import Keep, Plan
from superscaler_core.planners.search.offers import OVERLAPS, overlapped
from superscaler_core.plans.pieces.storage import shard_storage


@dataclass(frozen=True, slots=True)
class Change:
    """Decisions in addition to those of a plan; ``str`` names them.

    Attributes:
        overlap: a name of ``OVERLAPS``; none if empty.
        zero: 1 or 3: what of the weights the devices that read them share; nothing more if 0.
        keep: what blocks are to keep; as the plan has it if None.
    """

    overlap: str = ""
    zero: int = 0
    keep: Keep | None = None

    def __str__(self) -> str:
        zero = f"zero={self.zero}" if self.zero else ""
        keep = f"keep={self.keep}" if self.keep else ""
        return " ".join(filter(None, [self.overlap, zero, keep]))

    def __call__(self, plan: Plan) -> None:
        """Change a filled plan."""
        if self.zero:
            shard_storage(plan)
        if self.zero == 3:
            plan.gather_weights(*plan.blocks.groups)
        if self.keep is not None:
            plan.keep(self.keep)
        if self.overlap:
            plan.overlap = overlapped(plan.overlap, OVERLAPS[self.overlap])

    def more(self) -> Iterator[Change]:
        """The same with one decision more that may make a step faster."""
        for name in OVERLAPS if not self.overlap else ():
            yield replace(self, overlap=name)
        for zero in (1, 3) if not self.zero else ():
            yield replace(self, zero=zero)

    def savings(self, is_far: bool) -> Iterator[Change]:
        """The same with one decision more that saves memory; the most saving one if it is far."""
        for zero in (1, 3) if not (self.zero or is_far) else ():
            yield replace(self, zero=zero)
        keeps = (Keep.BLOCK_INPUTS,) if is_far else (Keep.SEGMENT_INPUTS, Keep.BLOCK_INPUTS)
        for keep in keeps if self.keep is None else ():
            yield replace(self, keep=keep)


NO_CHANGE = Change()


@dataclass(frozen=True)
class Changed:
    """An sProgram with a change."""

    sprogram: Callable[..., None]
    change: Change

    def __call__(self, plan: Plan) -> None:
        self.sprogram(plan)
        self.change(plan)
