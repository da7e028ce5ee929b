"""Fitted: decisions about a graph of one size, for the same graph of another size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from superscaler_core.errors import PlanError
from superscaler_core.graph.part import Piece
from superscaler_core.plan.decisions import Chosen, ChosenGroup, Decisions, PlacedPart


def fitted(decisions: Decisions, sizes_of: Callable[[str], Mapping[str, int]]) -> Decisions:
    """The decisions with ranges of loops in proportion to the iterations that loops have here.

    A loop that was cut has had as many iterations as its last part ends at; so a plan that cuts 8
    samples among four devices cuts 12 of them by threes. Decisions of this size stay as they are.

    Law (tests/superscaler_core/plan/test_fitted.py): decisions of a shipped plan, fitted to a graph
    of another batch, are those of the plan for that batch.

    Args:
        decisions: what was decided.
        sizes_of: iterations of every loop here, by the name of an op.

    Raises:
        PlanError: a loop has fewer iterations here than it has parts.
    """
    scales = {op: _Scale.of(op, parts, sizes_of(op)) for op, parts in decisions.parts.items()}

    def chosen(one: Chosen) -> Chosen:
        if one.part is None or one.op not in scales:
            return one
        pieces, replica = one.part
        return replace(one, part=(scales[one.op].pieces(pieces), replica))

    def group(ones: ChosenGroup) -> ChosenGroup:
        return tuple(map(chosen, ones))

    return replace(
        decisions,
        parts={op: scales[op].parts(parts) for op, parts in decisions.parts.items()},
        orders=tuple((chosen(first), chosen(then)) for first, then in decisions.orders),
        recomputed=tuple(map(group, decisions.recomputed)),
        recompute_regions=tuple(map(group, decisions.recompute_regions)),
        offloaded=tuple(map(group, decisions.offloaded)),
        fsdp_units=tuple((group(ones), unshards) for ones, unshards in decisions.fsdp_units),
    )


@dataclass(frozen=True)
class _Scale:
    """Iterations of the cut loops of an op: when it was decided, and here."""

    op: str
    before: Mapping[str, int]
    here: Mapping[str, int]

    @classmethod
    def of(cls, op: str, parts: tuple[PlacedPart, ...], here: Mapping[str, int]) -> _Scale:
        before: dict[str, int] = {}
        for part in parts:
            for loop, _, end in part.pieces:
                before[loop] = max(end, before.get(loop, 0))
        return cls(op, before, here)

    def pieces(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Ranges here."""
        return tuple(self._piece(*piece) for piece in pieces)

    def parts(self, parts: tuple[PlacedPart, ...]) -> tuple[PlacedPart, ...]:
        """Parts with ranges here."""
        return tuple(replace(part, pieces=self.pieces(part.pieces)) for part in parts)

    def _piece(self, loop: str, start: int, end: int) -> Piece:
        before, here = self.before[loop], self.here.get(loop, self.before[loop])
        found = start * here // before, end * here // before
        if found[0] == found[1]:
            raise PlanError(
                f"{self.op}: its loop {loop} has {here} iterations, too few for the part "
                f"{loop}[{start}:{end}] of {before} that was decided."
            )
        return (loop, *found)
