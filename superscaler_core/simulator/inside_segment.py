"""Inside a segment: how its memory changes while it runs, op by op.

The peak of a segment and the memory after it are measured (``memory.footprint``). In between,
memory grows as ops keep values for the backward, and falls as the backward frees them; the largest
op has the peak. That is an estimate, fitted to the measured ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from superscaler_core.cost.op_time import OpTimes
from superscaler_core.known import remembers
from superscaler_core.materialize.segments import Segment
from superscaler_core.memory import memory_by_part
from superscaler_core.program.verb import GOES_BACK, Verb


class _OpRun(NamedTuple):
    """One op that runs: its seconds, what memory it adds or frees, and what it handles."""

    secs: float
    added_bytes: int
    handled_bytes: int


class InsideSegments:
    """The memory inside segments.

    Args:
        times: the times of ops.
    """

    def __init__(self, times: OpTimes) -> None:
        self._times = times

    def levels(
        self, segment: Segment, verb: Verb, before: int, most: int, after: int
    ) -> list[tuple[float, int]]:
        """The memory from each share of the duration on, from 0 to 1.

        Laws (tests/superscaler_core/simulator/test_inside_segment.py): the largest is ``most``, the
        last is ``after``, and shares ascend.

        Args:
            segment: the segment.
            verb: how it runs.
            before, most, after: bytes before it, at its peak, and after it.
        """
        ops = self._ops(segment, verb)
        total = sum(op.secs for op in ops)
        if not total:
            return [(0.0, most), (1.0, after)]
        estimates, now = [], 0
        for op in ops:
            estimates.append(now + op.handled_bytes)
            now += op.added_bytes
        largest = estimates.index(max(estimates))
        # What the estimate lacks at the end is spread evenly over all ops.
        lack = after - before - now
        found: list[tuple[float, int]] = [(0.0, before)]
        elapsed, level = 0.0, before
        for number, op in enumerate(ops):
            if number == largest:
                found.append((elapsed / total, most))
            elapsed += op.secs
            level += op.added_bytes
            fitted = level + lack * (number + 1) // len(ops)
            found.append((min(1.0, elapsed / total), min(most, max(fitted, min(before, after)))))
        found[-1] = 1.0, after
        return found

    @remembers()
    def _ops(self, segment: Segment, verb: Verb) -> Sequence[_OpRun]:
        """The ops that an instruction runs, in the order in which it runs them."""
        parts = [*zip(segment.parts, memory_by_part(segment), strict=True)]
        # A forward that is computed again later keeps nothing of its own.
        keeps = verb is not Verb.COMPUTE and not (verb is Verb.FORWARD and segment.recompute)
        forward = [
            _OpRun(self._times.of(part.form)[0], keeps * own.kept_bytes, own.handled_bytes)
            for part, own in parts
        ]
        if verb not in GOES_BACK and verb is not Verb.BACKWARD_WEIGHTS:
            return forward
        # The first half of a backward frees only what the second does not need: no estimate.
        frees = verb is Verb.BACKWARD
        backward = [
            _OpRun(self._times.of(part.form)[1], -own.kept_bytes * frees, own.handled_bytes)
            for part, own in reversed(parts)
        ]
        return [*forward, *backward] if segment.recompute and frees else backward
