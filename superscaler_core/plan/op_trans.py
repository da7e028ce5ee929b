"""op_trans: replaces an op by parts that together do its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from superscaler_core.errors import PlanError
from superscaler_core.graph.part import Part, Piece


@dataclass(frozen=True, slots=True)
class Split:
    """Cut one loop into ``num`` pieces, as evenly as possible, or at ``cuts`` (ends included)."""

    identifier: str
    num: int = 0
    cuts: tuple[int, ...] = ()

    def __str__(self) -> str:
        how = f"into {self.num}" if not self.cuts else f"at {list(self.cuts)}"
        return f"split {self.identifier} {how}"

    def __call__(self, part: Part) -> tuple[Part, ...]:
        """The parts that replace ``part``.

        Raises:
            PlanError: the op has no such loop, or the loop cannot be cut, or not at these points.
        """
        self._check(part)
        lo, hi = part.range(self.identifier)
        cuts = self.cuts or tuple(lo + (hi - lo) * i // self.num for i in range(self.num + 1))
        if cuts[0] != lo or cuts[-1] != hi or any(a > b for a, b in pairwise(cuts)):
            raise PlanError(
                f"{self} of {part}: the loop runs from {lo} to {hi}, so the cuts have to ascend "
                f"from {lo} to {hi}."
            )
        return tuple(
            Part(part.op, _with(part.pieces, (self.identifier, a, b)), part.replica)
            for a, b in pairwise(cuts)
        )

    def _check(self, part: Part) -> None:
        op = part.op
        if self.identifier not in op.sizes:
            raise PlanError(
                f"{self} of {op.name}: its annotation {op.annotation} has no loop "
                f"{self.identifier!r}; it has {', '.join(op.sizes)}."
            )
        if not op.is_splittable(self.identifier):
            free = [i for i in op.sizes if op.is_splittable(i)]
            raise PlanError(
                f"{self} of {op.name}: {self.identifier} cannot be cut in {op.annotation}; "
                f"{', '.join(free) or 'none of its loops'} can."
            )
        lo, hi = part.range(self.identifier)
        if not self.cuts and not 1 <= self.num <= max(hi - lo, 1):
            raise PlanError(
                f"{self} of {part}: a loop of {hi - lo} iterations makes at most as many "
                f"pieces, and at least one."
            )


@dataclass(frozen=True, slots=True)
class Replicate:
    """Make ``num`` parts that all do the same work."""

    num: int

    def __call__(self, part: Part) -> tuple[Part, ...]:
        """The parts that replace ``part``."""
        if self.num < 1:
            raise PlanError(f"replicate {part} {self.num} times: it takes 1 or more.")
        first = part.replica * self.num
        return tuple(Part(part.op, part.pieces, first + i) for i in range(self.num))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Cut out pieces by hand: for every part, the ranges of the loops that it computes.

    ``check_coverage`` checks later that the pieces tile the work.
    """

    ranges: tuple[tuple[Piece, ...], ...]

    def __call__(self, part: Part) -> tuple[Part, ...]:
        """The parts that replace ``part``."""
        made: list[Part] = []
        for ranges in self.ranges:
            pieces = part.pieces
            for identifier, lo, hi in ranges:
                Split(identifier, 1)._check(part)
                start, stop = part.range(identifier)
                # The only piece of a loop without iterations is the loop.
                if not start <= lo < hi <= stop and (lo, hi) != (start, stop):
                    raise PlanError(
                        f"piece {identifier}[{lo}:{hi}] of {part}: the loop runs from {start} to "
                        f"{stop}."
                    )
                pieces = _with(pieces, (identifier, lo, hi))
            # A piece that is given twice becomes two replicas.
            copies = sum(other.pieces == pieces for other in made)
            made.append(Part(part.op, pieces, part.replica * len(self.ranges) + copies))
        return tuple(made)


Transformation = Split | Replicate | Pieces


def split(identifier: str, num: int = 0, *, cuts: Sequence[int] = ()) -> Split:
    """Cut a loop into ``num`` pieces, as evenly as possible, or at ``cuts`` (ends included)."""
    return Split(identifier, num, tuple(cuts))


def replicate(num: int) -> Replicate:
    """Make ``num`` parts that all do the same work."""
    return Replicate(num)


def pieces(*ranges: dict[str, tuple[int, int]]) -> Pieces:
    """Cut out pieces by hand: for every part the half-open ranges of its loops."""
    return Pieces(tuple(tuple(sorted((i, *r) for i, r in part.items())) for part in ranges))


def _with(pieces: tuple[Piece, ...], piece: Piece) -> tuple[Piece, ...]:
    return tuple(sorted([*(p for p in pieces if p[0] != piece[0]), piece]))
