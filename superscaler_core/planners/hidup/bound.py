"""A lower bound of all strategies of a problem of forms, which says how far a beam may be off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from superscaler_core.planners.hidup.problem import Form, FormCall, FormProblem
from superscaler_core.planners.hidup.recurrence import DuplexStage
from superscaler_core.planners.space import Space, SpaceEdge, SpaceNode
from superscaler_core.planners.space.alpa_intra import alpa_intra

NUM_TURNS = 12
"""Of the search for the best weight; the last ones differ by less than a hundredth."""


def least_secs(problem: FormProblem, *, backward: str = "woven", counts_last: bool = True) -> float:
    """No strategy of a problem takes less; arguments are those of ``hidup``.

    As ``max(a, b) >= w a + (1 - w) b`` for any weight w from 0 to 1, both halves take at least

        2 (w computing + (1 - w) communication)

    of all stages, whatever the stages are: a sum over calls, and over pairs of calls of which one
    reads the other's tensors. A tensor communicates at most once, so each of the k calls that read
    it counts a k-th if it wants another form. The least sum is that of a ``Space``. The weight of
    the highest bound is searched for by thirds, as least sums are concave in the weight.
    """
    # The backward of the last stage may not count, so nothing is known of it then.
    has_backward = backward != "none" and counts_last

    def bound(weight: float) -> float:
        return alpa_intra(_Weighed(problem, weight, has_backward).space()).bound_secs

    low, high, found = 0.0, 1.0, max(bound(0.0), bound(1.0))
    for _ in range(NUM_TURNS):
        third = (high - low) / 3
        ends = bound(low + third), bound(high - third)
        found = max(found, *ends)
        low, high = (low + third, high) if ends[0] < ends[1] else (low, high - third)
    return found


@dataclass(frozen=True, eq=False)
class _Weighed:
    """A problem as a space, by one weight of computing."""

    problem: FormProblem
    weight: float
    has_backward: bool

    def space(self) -> Space:
        """Calls are nodes; reads are edges."""
        nodes = tuple(
            SpaceNode.of(
                f"{number} {call.name}",
                [signature.name for signature in call.signatures],
                forward_secs=[self._secs(signature.work) for signature in call.signatures],
            )
            for number, call in enumerate(self.problem.calls)
        )
        return Space(nodes, tuple(self._edges()))

    def _secs(self, work: DuplexStage) -> float:
        comm, secs, back_comm, back_secs = work
        if self.has_backward:
            comm, secs = comm + back_comm, secs + back_secs
        return 2 * (self.weight * secs + (1 - self.weight) * comm)

    def _edges(self) -> Iterator[SpaceEdge]:
        calls = self.problem.calls
        readers = Counter(tensor for call in calls for tensor in set(call.reads))
        writer = {t: number for number, call in enumerate(calls) for t in call.writes}
        for number, call in enumerate(calls):
            for tensor in dict.fromkeys(call.reads):
                written = _forms(calls[writer[tensor]], tensor)
                table = [
                    [
                        sum(self._reform(tensor, before, after) for after in forms - {before})
                        / readers[tensor]
                        for forms in _forms(call, tensor)
                    ]
                    for (before,) in written
                ]
                yield SpaceEdge.of(writer[tensor], number, table)

    def _reform(self, tensor: int, before: Form, after: Form) -> float:
        found = self.problem.reforms.get(tensor, {}).get((before, after))
        return inf if found is None else self._secs(found)


def _forms(call: FormCall, tensor: int) -> list[set[Form]]:
    """For every signature the forms in which a call reads a tensor, or the one that it writes."""
    return [
        {
            form
            for tensors, forms in ((call.reads, each.reads), (call.writes, each.writes))
            for t, form in zip(tensors, forms, strict=True)
            if t == tensor
        }
        for each in call.signatures
    ]
