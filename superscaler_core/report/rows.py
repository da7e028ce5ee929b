"""Rows: similar moves in one row, so that a model with many layers stays readable."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import rvdcomm as rv
from rvdcomm.units import bytes_text
from superscaler_core.grouped import grouped
from superscaler_core.report.move import PricedMove
from superscaler_core.report.table import NO_BREAK, numbers_text

MAX_NAMES = 3
"""Number of names that a row of many tensors shows."""


@dataclass(frozen=True)
class Row:
    """Moves that differ only in layer, stage and devices; for weights also in shape."""

    moves: tuple[PricedMove, ...]

    @property
    def first(self) -> PricedMove:
        """One of the moves."""
        return self.moves[0]

    @property
    def level_bytes(self) -> tuple[int, ...]:
        """Bytes per step of all moves, by the highest level of the topology that they cross."""
        each = ([size * m.num_times for size in m.level_bytes] for m in self.moves)
        return tuple(map(sum, zip(*each, strict=True)))

    @property
    def sent_bytes(self) -> int:
        """Bytes per step of all moves, over all ranks."""
        return sum(self.level_bytes)

    @property
    def gap(self) -> float:
        """The moves' time divided by its lower bound; 1 is best."""
        secs, bound = (sum(part) for part in zip(*(m.secs for m in self.moves), strict=True))
        return secs / bound if bound else 1.0 if not secs else float("inf")

    @property
    def tensors(self) -> str:
        """The tensors' names, without the numbers of layers."""
        names = list(dict.fromkeys(move.pattern for move in self.moves))
        more = len(names) - MAX_NAMES
        return ", ".join(names[:MAX_NAMES]) + (f", {more} more" if more > 0 else "")

    @property
    def stages(self) -> str:
        """The stages of the moves, or their src and dst stages."""
        ends = sorted({move.stages for move in self.moves})
        if all(a == b for a, b in ends):
            return numbers_text([a for a, _ in ends])
        texts = [f"{a}>{b}" for a, b in ends]
        return f"{texts[0]}..{texts[-1]}" if len(texts) > 2 else ",".join(texts)

    def cells(self) -> list[str]:
        """The cells of the row under ``HEADER``."""
        return [
            self.first.name,
            str(len(self.moves)),
            self.tensors,
            self.stages,
            self.first.layouts.replace(" ->", f"{NO_BREAK}->"),
            ", ".join(self.first.primitives),
            str(self.first.num_times),
            bytes_text(self.sent_bytes),
            f"{self.gap:.3g}",
        ]


HEADER = ("edge", "#", "tensors", "stages", "layouts", "by", "x", "a step", "gap")


def rows_of(moves: Iterable[PricedMove]) -> tuple[Row, ...]:
    """Merge similar moves, in the order of the first of each group."""
    found = grouped(((move.way, *_alike(move)), move) for move in moves)
    return tuple(Row(tuple(group)) for group in found.values())


def _alike(move: PricedMove) -> tuple[Hashable, ...]:
    common = move.primitives, move.num_times, move.stages[0] != move.stages[1]
    if move.way in ("fetch", "reduce"):
        return *common, tuple(_counts(end.rvd) for p in move.plans for end in (p.src, p.dst))
    return *common, move.pattern, move.layouts, move.level_bytes


def _counts(layout: rv.RVD) -> tuple[Hashable, ...]:
    """The layout of a weight, without its dims."""
    return layout.r, layout.v, tuple(count for count in layout.d if count > 1)
