"""A lower bound on the time of all strategies, which shows how far a beam search may be off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from superscaler_core.published.alpa.alpa_intra import alpa_intra
from superscaler_core.published.hidup.problem import Form, FormCall, FormProblem
from superscaler_core.published.hidup.recurrence import DuplexStage
from superscaler_core.space import Space, SpaceEdge, SpaceNode

NUM_TURNS = 12
"""Turns of the search for the best weight; the interval that remains is shorter than a
hundredth."""


def least_secs(problem: FormProblem, *, backward: str = "woven", counts_last: bool = True) -> float:
    """A lower bound on the seconds of every strategy; the arguments are those of ``hidup``.

    For any weight w from 0 to 1, ``max(a, b) >= w a + (1 - w) b``. So both halves together take at
    least

        2 (w computing + (1 - w) communication)

    of all stages, however the calls are divided into stages. This is a sum over calls, and over
    pairs of calls of which the second reads tensors of the first. A tensor communicates at most
    once. So each of the k calls that read it counts a k-th of the communication if it wants another
    form. The least sum is that of a ``Space``. It is concave in the weight, so the weight of the
    highest bound is found by a ternary search.
    """
    # If the last stage's backward does not count, the bound counts no backward at all.
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
    """A problem as a space, with computing and communication added up by one weight."""

    problem: FormProblem
    weight: float
    has_backward: bool

    def space(self) -> Space:
        """The space: calls are nodes, and reads are edges."""
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
    """For every signature, the forms in which a call reads a tensor, or the form that it writes."""
    return [
        {
            form
            for tensors, forms in ((call.reads, each.reads), (call.writes, each.writes))
            for t, form in zip(tensors, forms, strict=True)
            if t == tensor
        }
        for each in call.signatures
    ]
