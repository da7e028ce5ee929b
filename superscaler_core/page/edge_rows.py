"""Edge rows: the communication of a step by edge, as the report has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from superscaler_core.materialize import Materialized
from superscaler_core.program import P2PSend, StepInstruction, Verb
from superscaler_core.report import TITLES, Report, plan_in_words
from superscaler_core.report.rows import Row

MAX_MEMBERS = 40
"""Most names of tensors that a row lists."""

WAYS = {
    Verb.MOVE: "forward",
    Verb.MOVE_BACK: "backward",
    Verb.FETCH: "fetch",
    Verb.UNSHARD: "fetch",
    Verb.REDUCE: "reduce",
    Verb.LOSS: "loss",
}
"""The way of a move, as in ``PricedMove``, by the instruction that does it."""


class EdgeRows:
    """The rows of a report, and the row of each event of a timeline.

    Args:
        made: the plan.
        report: its report.
    """

    def __init__(self, made: Materialized, report: Report) -> None:
        self._made, self._report = made, report
        self._row_of = {
            (move.name, move.way): number
            for number, row in enumerate(report.rows)
            for move in row.moves
        }
        self._known: dict[tuple[Verb, str], int] = {}

    @property
    def values(self) -> list[dict[str, Any]]:
        """The rows for JSON; the bytes of a row are those of the report."""
        return [self._value(row) for row in self._report.rows]

    def of_instruction(self, does: StepInstruction | None) -> int:
        """The number of the row of an instruction; -1 if it has none."""
        if does is None or does.kind not in WAYS:
            return -1
        key = does.kind, does.name
        if key not in self._known:
            self._known[key] = self._found(does)
        return self._known[key]

    def of_send(self, sent: P2PSend) -> int:
        """The number of the row of a transfer between stages; -1 if it has none."""
        return self._row_of.get((sent.name, "backward" if sent.is_back else "forward"), -1)

    def _found(self, does: StepInstruction) -> int:
        """Weights that one call moves may be in several rows, of which this is the first."""
        way = WAYS[does.kind]
        names = ["loss" if way == "loss" else does.name]
        if way in ("fetch", "reduce"):
            names = [use.name for use in self._made.uses_of(does)]
        rows = (self._row_of.get((name, way), -1) for name in names)
        return next((row for row in rows if row >= 0), -1)

    def _value(self, row: Row) -> dict[str, Any]:
        first = row.first
        levels: Mapping[str, int] = dict(
            zip(self._report.level_names, row.level_bytes, strict=False)
        )
        return {
            # Weights and the loss have no names of edges: their tensors say what they are.
            "edge": first.name if first.way in ("forward", "backward") else "",
            "what": TITLES[first.way],
            "tensors": row.tensors,
            "stages": row.stages,
            "count": len(row.moves),
            "times": first.num_times,
            "by": ", ".join(first.primitives),
            "bytes": row.sent_bytes,
            "levels": levels,
            "secs": sum(move.secs[0] * move.num_times for move in row.moves),
            "words": [text for plan in first.plans[:4] for text in plan_in_words(plan)],
            "members": [move.tensor for move in row.moves[:MAX_MEMBERS]],
        }
