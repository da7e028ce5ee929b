"""Step peaks: the memory of a device at every step of its runs, and how it grows with a model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.segments import Segment, Step
from superscaler_core.materialize.sequence import Close, MoveStep, Open
from superscaler_core.plan import Device
from superscaler_core.schedules import ActionKind


@dataclass(frozen=True)
class StepPeak:
    """The largest memory of a device at one step of a stage, over all runs of that step.

    Attributes:
        form: what the step does; equal for the same step of alike blocks.
        num_bytes: bytes of all kinds.
    """

    form: Hashable
    num_bytes: int


Run = tuple[ActionKind, int, bool]
"""A kind of run, the stage, and whether it allocates the gradients of weights."""


@dataclass(frozen=True)
class StepPeaks:
    """The memory of a device at every step of its runs.

    Law (tests/superscaler_core/memory/test_step_peaks.py): ``most_bytes`` is the peak of
    ``memory_of``.

    Attributes:
        runs: the steps of every run, in the order in which it does them.
        between_bytes: the peak of all other moments: at the start and the end of a step, at
            updates, and where two runs are woven.
    """

    runs: Mapping[Run, Sequence[StepPeak]]
    between_bytes: int

    @property
    def most_bytes(self) -> int:
        """The peak of a step."""
        steps = (peak.num_bytes for peaks in self.runs.values() for peak in peaks)
        return max(self.between_bytes, max(steps, default=0))

    def grown(self, more: StepPeaks, times: int) -> int:
        """The peak of a deeper model, extrapolated from this model and one with more blocks.

        If ``more`` has n additional blocks, the deeper model has ``times * n``. The overall peak
        does not grow evenly with the blocks, because another step may become the largest; the peak
        of each single step does. Blocks are added in the middle. So all steps in front of them grow
        as the first one does, by the memory held before a run, and all steps behind them as the
        last one does.

        Args:
            more: the peaks of the same plan for a model with more blocks.
            times: at least 1.
        """
        between = _line(self.between_bytes, more.between_bytes, times)
        pairs = [(peaks, more.runs[run]) for run, peaks in self.runs.items() if run in more.runs]
        runs = (_grown(peaks, longer, times) for peaks, longer in pairs if peaks)
        return max(more.most_bytes, between, max(runs, default=0))


def _grown(peaks: Sequence[StepPeak], longer: Sequence[StepPeak], times: int) -> int:
    """The peak of a run, extrapolated from two runs to ``times`` their difference in steps."""
    added = len(longer) - len(peaks)
    first = _num_alike(peaks, longer)
    last = len(longer) - _num_alike(peaks[::-1], longer[::-1])
    # Steps in between are behind the blocks that one row gains, and in front of those of another.
    ends = [longer[place].num_bytes - peaks[place].num_bytes for place in (0, -1)]
    lifts = {(0, first): ends[0], (first, last): sum(ends) // 2, (last, len(longer)): ends[1]}
    if last <= first:
        # In a row of alike steps, the place of the added ones is unknown. It is taken to be the
        # middle, and steps of a block there count as in front and as behind.
        low, high = (last + first - added) // 2, (last + first + added + 1) // 2
        lifts = {(0, max(1, high)): ends[0], (max(0, low), len(longer)): ends[1]}
    return max(
        peak.num_bytes + (times - 1) * max(0, lift)
        for (start, stop), lift in lifts.items()
        for peak in longer[start:stop]
    )


def _num_alike(peaks: Sequence[StepPeak], longer: Sequence[StepPeak]) -> int:
    """The number of steps at the start of two runs that have equal forms."""
    pairs = zip(peaks, longer, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].form == pair[1].form, pairs))


def _line(first: int, second: int, times: int) -> int:
    """The first value plus ``times`` the difference of two values; never less than the first."""
    return first + times * max(0, second - first)


def step_form(made: Materialized, device: Device, step: Step) -> Hashable:
    """What a step does, by forms and shapes alone.

    A segment may region many blocks, and more of them in a deeper model. The set of its parts'
    forms is the same in both.
    """
    if isinstance(step, Segment):
        parts = frozenset(part.form for part in step.parts)
        return step.recompute, step.swap, bool(step.region), parts
    if isinstance(step, MoveStep):
        return step.edge.src.shape_on(device), step.edge.dst.shape_on(device)
    assert isinstance(step, Open | Close)
    uses = made.uses_in(step.unit)
    ends = tuple((u.sharding.shape_on(device), u.storage.shape_on(device)) for u in uses)
    return isinstance(step, Open), ends
