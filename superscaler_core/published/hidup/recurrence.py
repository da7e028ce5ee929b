"""Recurrence: the time of stages if one half of a microbatch computes, the other communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

BACKWARDS: Mapping[str, Callable[[float, float, float], float]] = {
    "none": lambda debt, comm, secs: 0.0,
    "committed": lambda debt, comm, secs: debt + comm + secs + comm,
    "woven": lambda debt, comm, secs: max(debt, comm) + max(secs, comm),
}
"""Rules for the seconds that a stage's backward adds. Their arguments are the computing that the
backward of the stage before left (``debt``), and the stage's own communication and computing.
``committed`` is the rule that the published code runs: nothing overlaps. ``overlapped`` is in a
comment
of that code, and is what ``Overlap(duplex=True)`` does."""


class DuplexStage(NamedTuple):
    """One stage, communication before computing: seconds of one half of a microbatch.

    Attributes:
        comm_secs, secs: communication and computing of the forward.
        backward_comm_secs, backward_secs: communication and computing of the backward.
    """

    comm_secs: float = 0.0
    secs: float = 0.0
    backward_comm_secs: float = 0.0
    backward_secs: float = 0.0

    def plus(self, more: DuplexStage) -> DuplexStage:
        """This stage with the work of another one."""
        return DuplexStage(
            self.comm_secs + more.comm_secs,
            self.secs + more.secs,
            self.backward_comm_secs + more.backward_comm_secs,
            self.backward_secs + more.backward_secs,
        )


class Duplexed(NamedTuple):
    """The costs of a strategy for a model's first stages: elapsed time, and computing still open.

    Take two strategies that reach the same state. The first is no better than the second if none of
    its costs is less, because later stages add a time that grows with each cost.

    Attributes:
        acc: seconds until the first half has left the last of these stages.
        debt: seconds of computing that the second half still has to do in that stage; it
            overlaps with the communication of the next stage.
        backward_debt: the same in the backward.
    """

    acc: float = 0.0
    debt: float = 0.0
    backward_debt: float = 0.0

    def then(self, stage: DuplexStage, backward: str) -> Duplexed:
        """The costs with one more stage; twice in it, one half computes and one communicates.

        >>> Duplexed(4, 4).then(DuplexStage(3, 5), "none")
        Duplexed(acc=13.0, debt=5, backward_debt=0)
        """
        comm, secs = stage.comm_secs, stage.secs
        acc = self.acc + max(self.debt, comm) + max(secs, comm)
        acc += BACKWARDS[backward](
            self.backward_debt, stage.backward_comm_secs, stage.backward_secs
        )
        return Duplexed(acc, secs, 0 if backward == "none" else stage.backward_secs)

    def secs(self, *, counts_last: bool = True) -> float:
        """Seconds of the step if no stage follows.

        Args:
            counts_last: whether the backward of the second half in the last stage counts; the
                published code leaves it out.
        """
        return self.acc + self.debt + (self.backward_debt if counts_last else 0.0)


def overlapped_secs(
    stages: Iterable[DuplexStage], backward: str = "none", *, counts_last: bool = True
) -> float:
    """Seconds of a step of two halves that overlap; ``backward`` is one of ``BACKWARDS``.

    >>> overlapped_secs([DuplexStage(0, 4), DuplexStage(3, 5), DuplexStage(6, 2)])
    27.0
    """
    cost = Duplexed()
    for stage in stages:
        cost = cost.then(stage, backward)
    return cost.secs(counts_last=counts_last)


def serial_secs(stages: Iterable[DuplexStage], backward: str = "none") -> float:
    """Seconds of a step of two halves if nothing overlaps.

    >>> serial_secs([DuplexStage(0, 4), DuplexStage(3, 5), DuplexStage(6, 2)])
    40
    """
    forward_only = backward == "none"
    return 2 * sum(sum(stage[:2]) if forward_only else sum(stage) for stage in stages)


class Prediction(NamedTuple):
    """Predicted seconds of a step of two halves.

    Attributes:
        wall_secs: with overlap.
        computing_secs, comm_secs: computing and communication of both halves.
    """

    wall_secs: float
    computing_secs: float
    comm_secs: float

    @classmethod
    def of(cls, stages: Sequence[DuplexStage], backward: str = "woven") -> Prediction:
        """The prediction of the recurrence."""
        computing = [DuplexStage(0, s.secs, 0, s.backward_secs) for s in stages]
        moving = [DuplexStage(s.comm_secs, 0, s.backward_comm_secs, 0) for s in stages]
        return cls(
            overlapped_secs(stages, backward),
            serial_secs(computing, backward),
            serial_secs(moving, backward),
        )

    @property
    def total_secs(self) -> float:
        """Seconds without overlap."""
        return self.computing_secs + self.comm_secs

    @property
    def overlap(self) -> float:
        """The hidden time, as a share of the most that could be hidden."""
        least = min(self.computing_secs, self.comm_secs)
        return (self.total_secs - self.wall_secs) / least if least else 0.0
