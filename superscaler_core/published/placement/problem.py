"""PlacementProblem: whole operations on devices that may differ, and how long a placement takes.

This is the exact model of a step. Operations are given in an order that follows the data flow. Each
device runs its operations in this order, one at a time. As soon as a result exists, it is sent once
to every other device that has a reader. A message takes latency + bytes / bandwidth. For this time
it occupies the outgoing port of its sender and the incoming port of its receiver. A port serves one
message at a time, in the order of the writers, then of their results, then of the receivers.
Computation and messages overlap. For an operation v, and a message m from device a to device b,

    start(v)  = max(end of the operation before v on its device, arrival of all that v reads)
    start(m)  = max(end(writer of m), end of the message before m at a's outgoing port,
                    end of the message before m at b's incoming port)

A step ends with its last operation. Buffers of messages are not counted as memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rvdcomm.units import bytes_text
from superscaler_core.errors import PlanError
from superscaler_core.space import Array, Assignment, Solution

MAX_AT_ONCE = 4096
"""Placements that are simulated together; more would only take memory."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that runs whole on one device.

    Attributes:
        name: for people and rules; distinct in a problem.
        secs: seconds on each device; infinite where it cannot run.
        held_bytes: memory that it occupies on its device.
        group: operations of one group are on one device; if empty, the operation is a group alone.
    """

    name: str
    secs: tuple[float, ...]
    held_bytes: float = 0.0
    group: str = ""


@dataclass(frozen=True, slots=True)
class OperationResult:
    """A result of one operation that later ones read; operations are given by number."""

    writer: int
    readers: tuple[int, ...]
    num_bytes: float


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """Operations, their results, and devices: the problem that all placement planners solve.

    An assignment is the device of every group.

    Laws (tests/superscaler_core/published/placement): ``secs`` equals a simulation event by event;
    no assignment takes less than ``bound_secs``, or less than the work of any of its devices.

    Attributes:
        operations: in an order that follows the data flow.
        results: in any order; those of one writer are sent in this order.
        latency_secs, bytes_per_sec: of the link between two devices, ``[sender, receiver]``.
        memory_bytes: memory of every device.

    >>> pair = Operation("a", (1.0, 2.0)), Operation("b", (1.0, 2.0))
    >>> link = np.full((2, 2), 0.5), np.full((2, 2), 10.0)
    >>> problem = PlacementProblem(pair, (OperationResult(0, (1,), 5.0),), *link)
    >>> problem.secs([[0, 0], [0, 1]]).tolist()
    [2.0, 4.0]
    """

    operations: tuple[Operation, ...]
    results: tuple[OperationResult, ...]
    latency_secs: Array
    bytes_per_sec: Array
    memory_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        num = len(self.latency_secs)
        if not self.memory_bytes:
            object.__setattr__(self, "memory_bytes", (inf,) * num)
        shapes = {np.shape(self.latency_secs), np.shape(self.bytes_per_sec)}
        if shapes != {(num, num)} or len(self.memory_bytes) != num:
            raise PlanError(
                f"links {shapes} and {len(self.memory_bytes)} memories of {num} devices: give "
                f"[{num}, {num}] of each link's numbers, and one memory for each device."
            )
        wrong = [op.name for op in self.operations if len(op.secs) != num]
        if wrong or len({op.name for op in self.operations}) < max(1, len(self.operations)):
            raise PlanError(
                f"{len(self.operations)} operations on {num} devices: there is at least one, names "
                f"are distinct, and each has {num} times; wrong: {wrong[:5]}."
            )
        for result in self.results:
            if not all(result.writer < reader < len(self.operations) for reader in result.readers):
                raise PlanError(f"{result}: its readers have to come behind its writer.")

    @classmethod
    def of(
        cls,
        operations: Sequence[Operation],
        results: Sequence[OperationResult],
        *,
        latency_secs: ArrayLike = 0.0,
        bytes_per_sec: ArrayLike = inf,
        memory_bytes: float = inf,
    ) -> PlacementProblem:
        """A problem from one latency and bandwidth, or one for each link, and one memory size."""
        num = len(operations[0].secs) if operations else 0
        latency, speed = (
            np.broadcast_to(np.asarray(given, dtype=float), (num, num))
            for given in (latency_secs, bytes_per_sec)
        )
        return cls(tuple(operations), tuple(results), latency, speed, (memory_bytes,) * num)

    # --- structure ------------------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return len(self.memory_bytes)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The operations of every group, by number; groups in the order of their first ones."""
        found: dict[tuple[str, str], list[int]] = {}
        for number, op in enumerate(self.operations):
            found.setdefault(("group", op.group) if op.group else ("", op.name), []).append(number)
        return tuple(map(tuple, found.values()))

    @cached_property
    def group_of(self) -> NDArray[np.int64]:
        """The group of every operation, ``[operation]``."""
        found = np.empty(len(self.operations), dtype=np.int64)
        for number, members in enumerate(self.groups):
            found[list(members)] = number
        return found

    @cached_property
    def writes(self) -> tuple[tuple[int, ...], ...]:
        """The results that every operation writes, by number."""
        return self._by_operation([(result.writer,) for result in self.results])

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """The results that every operation reads, by number."""
        return self._by_operation([result.readers for result in self.results])

    def _by_operation(self, ends: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.operations]
        for number, operations in enumerate(ends):
            for each in dict.fromkeys(operations):
                found[each].append(number)
        return tuple(map(tuple, found))

    # --- costs ----------------------------------------------------------------------------------

    @cached_property
    def op_secs(self) -> Array:
        """Seconds of operations, ``[operation, device]``."""
        return np.array([op.secs for op in self.operations])

    @cached_property
    def group_secs(self) -> Array:
        """Seconds of groups, ``[group, device]``."""
        return np.array([self.op_secs[list(members)].sum(axis=0) for members in self.groups])

    @cached_property
    def group_bytes(self) -> Array:
        """Bytes that groups hold, ``[group]``."""
        held = [op.held_bytes for op in self.operations]
        return np.array([sum(held[i] for i in members) for members in self.groups])

    @cached_property
    def message_secs(self) -> Array:
        """Seconds of messages, ``[result, sender, receiver]``."""
        sizes = np.array([result.num_bytes for result in self.results]).reshape(-1, 1, 1)
        return self.latency_secs + sizes / self.bytes_per_sec

    @cached_property
    def traffic(self) -> Array:
        """Bytes between groups, both ways together, ``[group, group]``."""
        found = np.zeros((len(self.groups),) * 2)
        for result in self.results:
            src = self.group_of[result.writer]
            for dst in {self.group_of[reader] for reader in result.readers} - {src}:
                found[src, dst] += result.num_bytes
                found[dst, src] += result.num_bytes
        return found

    def fits(self, assignments: ArrayLike) -> NDArray[np.bool_]:
        """Whether every device has memory for its groups, ``[..., group] -> [...]``."""
        chosen = np.asarray(assignments)
        held = [
            np.where(chosen == d, self.group_bytes, 0.0).sum(-1) for d in range(self.num_devices)
        ]
        held_bytes, room = np.stack(held, axis=-1), np.array(self.memory_bytes)
        return np.asarray((held_bytes <= room).all(axis=-1))

    def secs(self, assignments: ArrayLike) -> Array:
        """Seconds of a step, ``[..., group] -> [...]``; infinite where memory does not suffice."""
        chosen = np.asarray(assignments, dtype=np.int64)
        rows = chosen.reshape(-1, len(self.groups))
        parts = [self.ends(rows[i : i + MAX_AT_ONCE]) for i in range(0, len(rows), MAX_AT_ONCE)]
        secs = np.concatenate([part.max(axis=1) for part in parts]).reshape(chosen.shape[:-1])
        return np.where(self.fits(chosen), secs, inf)

    def ends(self, assignments: ArrayLike) -> Array:
        """The end of every operation in seconds, ``[placement, group] -> [placement, operation]``.

        Complexity: linear in operations and their readers, and in results times devices; each step
        is done for all placements together.
        """
        at = np.asarray(assignments, dtype=np.int64)[:, self.group_of]
        each, devices = np.arange(len(at)), range(self.num_devices)
        free, outgoing, incoming = np.zeros((3, len(at), self.num_devices))
        arrived = np.zeros((len(self.results), len(at), self.num_devices))
        ends = np.zeros(at.shape)
        for number, mine in enumerate(at.T):
            ready = [arrived[i, each, mine] for i in self.reads[number]]
            start = np.max([free[each, mine], *ready], axis=0)
            end = free[each, mine] = ends[:, number] = start + self.op_secs[number, mine]
            for i in self.writes[number]:
                arrived[i] = end[:, None]
                is_read = np.zeros((len(at), self.num_devices), dtype=bool)
                is_read[each[:, None], at[:, list(self.results[i].readers)]] = True
                is_read[each, mine] = False
                for dst in devices:
                    some = np.flatnonzero(is_read[:, dst])
                    if some.size:
                        src = mine[some]
                        ports = outgoing[some, src], incoming[some, dst]
                        done = np.max([end[some], *ports], axis=0) + self.message_secs[i, src, dst]
                        outgoing[some, src] = incoming[some, dst] = arrived[i, some, dst] = done
        return ends

    # --- bounds ---------------------------------------------------------------------------------

    @cached_property
    def critical_secs(self) -> float:
        """Seconds of the longest path of operations on their fastest devices, without messages."""
        ends = np.zeros(len(self.operations))
        fastest = self.op_secs.min(axis=1)
        for number, read in enumerate(self.reads):
            before = [ends[self.results[i].writer] for i in read]
            ends[number] = max(before, default=0.0) + fastest[number]
        return float(ends.max())

    @cached_property
    def bound_secs(self) -> float:
        """A lower bound: the longest path, the longest group, or all work shared equally."""
        fastest = self.group_secs.min(axis=1)
        shared = self.op_secs.min(axis=1).sum() / self.num_devices
        return float(max(self.critical_secs, fastest.max(), shared))

    # --- answers --------------------------------------------------------------------------------

    def solution(self, assignment: ArrayLike, planner: str, bound_secs: float = 0.0) -> Solution:
        """An assignment with its time, and the higher lower bound, the planner's or the problem's.

        Raises:
            PlanError: it does not fit in memory, or an operation cannot run where it is.
        """
        chosen: Assignment = tuple(int(device) for device in np.asarray(assignment))
        secs = float(self.secs(chosen))
        if secs == inf:
            raise self.none_fits(planner)
        # The rounding of sums in another order may lift a bound above the time itself.
        return Solution(chosen, secs, min(secs, max(bound_secs, self.bound_secs)))

    def none_fits(self, planner: str) -> PlanError:
        """The error of a planner whose placement is not possible."""
        return PlanError(
            f"{planner}: {len(self.groups)} groups of {bytes_text(self.group_bytes.sum())} do not "
            f"fit on devices of {', '.join(map(bytes_text, self.memory_bytes))}, or cannot run "
            "there; use more devices or another planner."
        )


def with_backward(
    operations: Sequence[Operation],
    results: Sequence[OperationResult],
    backward_secs: Sequence[Sequence[float]],
) -> tuple[tuple[Operation, ...], tuple[OperationResult, ...]]:
    """Operations followed by their backwards in reverse order, each in the group of its forward.

    The gradient of a result is as large as the result. Every reader sends a gradient of its own to
    the writer.

    Args:
        operations, results: of the forward.
        backward_secs: for every operation the seconds of its backward on each device.
    """
    last = 2 * len(operations) - 1
    groups = [op.group or op.name for op in operations]
    forward = [replace(op, group=group) for op, group in zip(operations, groups, strict=True)]
    backward = [
        Operation(f"{op.name}:backward", tuple(secs), 0.0, group)
        for op, secs, group in zip(operations, backward_secs, groups, strict=True)
    ]
    grads = [
        OperationResult(last - reader, (last - result.writer,), result.num_bytes)
        for result in results
        for reader in result.readers
    ]
    return (*forward, *reversed(backward)), (*results, *grads)
