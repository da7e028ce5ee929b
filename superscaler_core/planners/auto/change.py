"""Change: decisions that auto adds to a plan of another planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from superscaler_core.plan import Keep, Plan
from superscaler_core.planners.search.offers import OVERLAPS, overlapped
from superscaler_core.plans.pieces.storage import shard_storage


@dataclass(frozen=True, slots=True)
class Change:
    """Decisions to add to a filled plan; ``str`` names them.

    Attributes:
        overlap: a name of ``OVERLAPS``; no more overlap if empty.
        zero: ZeRO stage to add, 1 or 3; none if 0.
        keep: what blocks keep for their backward; the plan's own choice if None.
    """

    overlap: str = ""
    zero: int = 0
    keep: Keep | None = None

    def __str__(self) -> str:
        zero = f"zero={self.zero}" if self.zero else ""
        keep = f"keep={self.keep}" if self.keep else ""
        return " ".join(filter(None, [self.overlap, zero, keep]))

    def __call__(self, plan: Plan) -> None:
        """Add the decisions to a filled plan."""
        if self.zero:
            shard_storage(plan)
        if self.zero == 3:
            plan.gather_weights(*plan.blocks.groups)
        if self.keep is not None:
            plan.keep(self.keep)
        if self.overlap:
            plan.overlap = overlapped(plan.overlap, OVERLAPS[self.overlap])

    def more(self) -> Iterator[Change]:
        """This change with one more decision that may make a step faster."""
        for name in OVERLAPS if not self.overlap else ():
            yield replace(self, overlap=name)
        for zero in (1, 3) if not self.zero else ():
            yield replace(self, zero=zero)

    def savings(self, is_far: bool) -> Iterator[Change]:
        """This change with one more decision that saves memory.

        Args:
            is_far: whether the plan needs far too much memory; only what saves most is proposed.
        """
        for zero in (1, 3) if not (self.zero or is_far) else ():
            yield replace(self, zero=zero)
        keeps = (Keep.BLOCK_INPUTS,) if is_far else (Keep.SEGMENT_INPUTS, Keep.BLOCK_INPUTS)
        for keep in keeps if self.keep is None else ():
            yield replace(self, keep=keep)


NO_CHANGE = Change()


@dataclass(frozen=True)
class Changed:
    """An sProgram that fills a plan and applies a change."""

    sprogram: Callable[..., None]
    change: Change

    def __call__(self, plan: Plan) -> None:
        self.sprogram(plan)
        self.change(plan)
