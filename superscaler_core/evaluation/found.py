"""Found: the plan that a search chose, and all its trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path

from rvdcomm.units import bytes_text, secs_text
from superscaler_core.compiled import Compiled
from superscaler_core.evaluation.evaluate import compiled
from superscaler_core.evaluation.lower_bound import LowerBound
from superscaler_core.evaluation.picture import draw
from superscaler_core.evaluation.request import KINDS, Candidate, Request, Trial
from superscaler_core.page import CandidateRow, save_page
from superscaler_core.plan import Decisions, Plan
from superscaler_core.simulator import Simulated, simulate
from superscaler_core.space.explained import explain_op

WIDTH = 100
"""Columns of the table."""


@dataclass(frozen=True, eq=False)
class Found:
    """The result of a search; print it.

    Attributes:
        request: the model, cluster and step of the search.
        best: the fastest trial that fits in memory, simulated in full.
        tried: all trials, in the order in which they ended, ``best`` included.
        num_skipped: candidates whose lower bound was not below the best plan's time.
        num_left: candidates that were still waiting when the search ended.
        search_secs: seconds of the search.
    """

    request: Request
    best: Trial
    tried: tuple[Trial, ...]
    num_skipped: int
    num_left: int
    search_secs: float

    @property
    def name(self) -> str:
        """The name of the chosen candidate."""
        return self.best.candidate.name

    @property
    def secs(self) -> float:
        """Simulated seconds of a step."""
        return self.best.secs

    @property
    def peak_bytes(self) -> int:
        """Bytes on the fullest device."""
        return self.best.peak_bytes

    @property
    def samples_per_sec(self) -> float:
        """Speed of training."""
        return self.request.batch / self.secs

    @cached_property
    def bound(self) -> LowerBound:
        """What no plan of any planner can beat."""
        return LowerBound(self.request)

    @property
    def gap(self) -> float | None:
        """The step over its lower bound; None if there is none."""
        return self.secs / self.bound.secs if self.bound.secs else None

    @property
    def num_full(self) -> int:
        """Number of evaluations in full: of all microbatches and all blocks."""
        return sum(not trial.is_estimate for trial in self.tried)

    @cached_property
    def plan(self) -> Plan:
        """The chosen plan, filled."""
        return self.best.candidate.plan(self.request)

    @cached_property
    def compiled(self) -> Compiled:
        """The chosen plan's program."""
        return compiled(self.request, self.best.candidate)

    @cached_property
    def simulated(self) -> Simulated:
        """The step of the chosen plan, on devices of the memory that was asked for."""
        asked = self.request
        profile = replace(asked.profile, memory_bytes=asked.memory_bytes)
        return simulate(self.compiled, profile, communication=asked.communication)

    @property
    def decisions(self) -> Decisions:
        """The chosen plan as a value with a text."""
        return self.plan.decisions

    def save(self, path: str | Path) -> None:
        """Write the plan's decisions to a file that ``Decisions.load`` reads."""
        self.decisions.save(path)

    def draw(self, path: str | Path) -> None:
        """Write a picture: time against memory of all trials, with the chosen one marked.

        Raises:
            PlanError: matplotlib is missing, or cannot write this suffix.
        """
        draw(self.request, self.tried, self.best, path)

    def save_page(self, path: str | Path) -> None:
        """Write a page for a browser: the step of the chosen plan, and all candidates.

        Raises:
            PlanError: the name has another suffix than .html or .htm.
        """
        save_page(self.simulated, path, self.candidates)

    @property
    def candidates(self) -> list[CandidateRow]:
        """All candidates, each by its last trial, as a page shows them."""
        return list(map(self._row, _last(self.tried)))

    def _row(self, trial: Trial) -> CandidateRow:
        return CandidateRow(
            trial.candidate.name,
            trial.secs if isfinite(trial.secs) else None,
            trial.peak_bytes,
            trial.problem,
            is_chosen=trial is self.best,
            is_estimate=trial.is_estimate,
        )

    def explain(self, op: str) -> str:
        """A table of the cost of each cut of an op, with all other ops as in the chosen plan.

        Raises:
            PlanError: the model has no such op.
        """
        asked = self.request
        return explain_op(
            self.plan, op, asked.costs_of(self.plan.graph),
            microbatches=asked.microbatches(self.best.candidate.samples),
            memory_bytes=asked.memory_bytes,
        )  # fmt: skip

    # --- text -----------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n".join([self.summary(), "", self.table()])

    def summary(self) -> str:
        """The chosen plan, and how many candidates were tried, skipped and left."""
        num, samples = len(self.tried), self.best.candidate.samples
        left = f", {self.num_left} not evaluated" if self.num_left else ""
        return "\n".join(
            [
                f"chosen   {self.name}",
                f"step     {secs_text(self.secs)}, {self.samples_per_sec:.4g} samples/s; "
                f"{self.request.microbatches(samples)} microbatches of {samples} samples",
                f"bound    {self.bound.certificate(self.secs)}",
                f"memory   {bytes_text(self.peak_bytes)} of "
                f"{bytes_text(self.request.memory_bytes)} on the fullest device",
                f"search   {self.search_secs:.1f} s: {num} tried, {self.num_skipped} skipped by "
                f"their lower bound{left}",
                *self._unsettled(),
            ]
        )

    def _unsettled(self) -> list[str]:
        """A line about estimates below the chosen step for which the budget was too small."""
        rows = (t for t in _last(self.tried) if t.is_estimate and t.fits and t.secs < self.secs)
        secs = [trial.secs for trial in rows]
        if not secs:
            return []
        least = secs_text(min(secs))
        count = "1 estimate is" if len(secs) == 1 else f"{len(secs)} estimates are"
        return [f"perhaps  {count} faster, down to {least}; a larger budget simulates more in full"]

    def table(self, num: int = 10) -> str:
        """The ``num`` best candidates, and why the others lost."""
        fits = sorted(_last(self.tried), key=lambda trial: trial.secs)
        lines = [f"{'step':>10} {'memory':>10}  {'':>7}  plan"]
        shown = [trial for trial in fits[:num] if trial.fits]
        lines += [self._line(trial) for trial in shown]
        lines += self._of_kinds(shown)
        lines += [f"{count:>10} x {_cut(why, WIDTH - 13)}" for why, count in self._losses(num)]
        if any(trial.is_estimate for trial in fits[:num] if trial.fits):
            lines.append(
                "~ few microbatches or blocks were simulated, and the rest added at their pace"
            )
        return "\n".join(lines)

    def _line(self, trial: Trial) -> str:
        slower = f"{trial.secs / self.secs:.3f} x" if trial is not self.best else "chosen"
        size, secs = bytes_text(trial.peak_bytes), secs_text(trial.secs)
        mark, name = "~" if trial.is_estimate else " ", _cut(trial.candidate.name, WIDTH - 33)
        return f"{mark}{secs:>9} {size:>10}  {slower:>7}  {name}"

    def _of_kinds(self, shown: Sequence[Trial]) -> Iterator[str]:
        """For each kind of plans that is not shown, its fastest plan, or why there is none."""
        seen = {kind for trial in shown for kind in trial.candidate.kinds}
        rows = _last(self.tried)
        for kind in KINDS if any(trial.candidate.kinds for trial in rows) else ():
            mine = [trial for trial in rows if kind in trial.candidate.kinds]
            fits = [trial for trial in mine if trial.fits]
            if kind in seen:
                continue
            if fits:
                best = min(fits, key=lambda trial: trial.secs)
                seen |= best.candidate.kinds
                yield self._line(best)
                continue
            least = min((trial.peak_bytes for trial in mine if trial.lacks_memory), default=0)
            text = f"{kind}: none was evaluated"
            if mine:
                why = f"the smallest needs {bytes_text(least)}" if least else mine[0].problem
                text = f"{kind}: none of {len(mine)} fits; {why}"
            yield f"{'-':>10} {'-':>10}  {'':>7}  {_cut(text, WIDTH - 33)}"

    def _losses(self, num: int) -> list[tuple[str, int]]:
        """Why the candidates that the table does not show lost, with the count of each reason."""
        rows = _last(self.tried)
        fit = sum(trial.fits for trial in rows)
        whys = Counter(
            "more memory than a device has" if trial.lacks_memory else trial.problem
            for trial in rows
            if not trial.fits
        )
        slower = [("slower than these", fit - num)] if fit > num else []
        skipped = [
            ("skipped: their lower bound is not below the chosen plan's step", self.num_skipped)
        ]
        return [*slower, *(row for row in skipped if row[1]), *whys.most_common(8)]


def _last(tried: Sequence[Trial]) -> list[Trial]:
    """The last trial of every candidate, which is the full evaluation if there was one."""
    found: dict[Candidate, Trial] = {}
    for trial in tried:
        found[trial.candidate] = trial
    return list(found.values())


def _cut(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."
