"""Earliest finish: list scheduling by the critical path, as HEFT does.

The upward rank of an operation is the longest path from it to the end, with mean times of devices
and of links. In descending order of upward ranks, each operation goes to the device on which it
would end first, given what the ports have sent so far. The first operation of a group decides for
the group. Devices without memory for the whole group are left out. This is a heuristic: it does not
look ahead.

Complexity: operations and their results, times devices.

Differences from the published HEFT: an operation is put after all that its device has, never into
an earlier gap; and the time of the result is the problem's, whose devices run operations in its
order.

Source: Topcuoglu, Hariri, Wu, IEEE TPDS 2002.
"""

from __future__ import annotations

from math import inf

import numpy as np

from superscaler_core.published.placement.problem import PlacementProblem
from superscaler_core.space import Array, Solution


def earliest_finish(problem: PlacementProblem) -> Solution:
    """Place groups one by one where their first operation ends earliest.

    Raises:
        PlanError: for some group, no device both can run it and has memory left for it.
    """
    at = np.full(len(problem.groups), -1)
    left = np.array(problem.memory_bytes)
    lists = _Lists(problem)
    for number in np.argsort(-upward_ranks(problem), kind="stable").tolist():
        group = problem.group_of[number]
        if at[group] < 0:
            ends = [lists.end(number, device, at)[0] for device in range(problem.num_devices)]
            room = left >= problem.group_bytes[group]
            can = np.isfinite(problem.group_secs[group]) & room
            if not can.any():
                raise problem.none_fits("earliest finish")
            at[group] = int(np.where(can, ends, inf).argmin())
            left[at[group]] -= problem.group_bytes[group]
        lists.add(number, int(at[group]), at)
    return problem.solution(at, "earliest finish")


def upward_ranks(problem: PlacementProblem) -> Array:
    """The longest path from every operation to the end, in mean seconds, ``[operation]``."""
    num = problem.num_devices
    # A device sends nothing to itself, so these pairs are not in the mean.
    means = problem.message_secs.sum(axis=(1, 2)) - np.trace(problem.message_secs, axis1=1, axis2=2)
    sent = means / max(1, num * (num - 1))
    ranks = np.zeros(len(problem.operations))
    for number in reversed(range(len(ranks))):
        secs = problem.op_secs[number]
        after = [
            sent[i] + ranks[reader]
            for i in problem.writes[number]
            for reader in problem.results[i].readers
        ]
        ranks[number] = secs[np.isfinite(secs)].mean() + max(after, default=0.0)
    return ranks


class _Lists:
    """What devices and ports have done so far, in the order of the upward ranks."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self._free, self._out, self._in = np.zeros((3, problem.num_devices)).tolist()
        self._ends: dict[int, float] = {}
        self._arrived: dict[tuple[int, int], float] = {}

    def end(
        self, number: int, device: int, at: Array
    ) -> tuple[float, dict[tuple[int, int, int], float]]:
        """When an operation would end on a device, and the messages that it would need first."""
        problem, start = self._problem, self._free[device]
        busy, sent = self._in[device], dict[tuple[int, int, int], float]()
        out = list(self._out)
        for i in problem.reads[number]:
            writer = problem.results[i].writer
            src = int(at[problem.group_of[writer]])
            arrival = self._ends[writer] if src == device else self._arrived.get((i, device))
            if arrival is None:
                begin = max(self._ends[writer], out[src], busy)
                arrival = begin + float(problem.message_secs[i, src, device])
                busy = out[src] = sent[i, src, device] = arrival
            start = max(start, arrival)
        return start + problem.operations[number].secs[device], sent

    def add(self, number: int, device: int, at: Array) -> None:
        """Append an operation to what its device has."""
        end, sent = self.end(number, device, at)
        self._ends[number] = self._free[device] = end
        for (i, src, dst), arrival in sent.items():
            self._arrived[i, dst] = self._out[src] = self._in[dst] = arrival
