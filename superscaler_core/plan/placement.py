"""Placement: which devices act as which workers of a schedule."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from superscaler_core.errors import PlanError
from superscaler_core.schedules import Schedule

_WORKER = re.compile(r"([0-9]{1,9}):([0-9]{1,9}(?:,[0-9]{1,9})*)")


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of every worker of a schedule: one device, or a group that shares its stages.

    Laws (tests/superscaler_core/plan/test_placement.py): ``Placement.parse(str(x)) == x``; the
    order of a worker's devices does not matter; a device belongs to one worker.

    >>> print(Placement.even(range(4), 2))
    0:0,1 1:2,3

    Attributes:
        workers: the devices of each worker, ascending.
    """

    workers: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        workers = tuple(tuple(sorted(devices)) for devices in self.workers)
        object.__setattr__(self, "workers", workers)
        every = [device for devices in workers for device in devices]
        if not all(workers) or not workers or len(set(every)) != len(every):
            raise PlanError(
                f"placement {list(map(list, workers))}: every worker has a device at least, and "
                "every device is of one worker."
            )

    @classmethod
    def even(cls, devices: Sequence[int], num_workers: int) -> Placement:
        """Divide the devices evenly: every worker gets a run of consecutive devices.

        Raises:
            PlanError: the number of workers does not divide the number of devices.
        """
        num = len(devices) // max(num_workers, 1)
        if num_workers < 1 or num * num_workers != len(devices):
            raise PlanError(
                f"placement of {len(devices)} devices on {num_workers} workers: the workers have "
                "to divide the devices."
            )
        return cls(tuple(tuple(devices[i * num : (i + 1) * num]) for i in range(num_workers)))

    def devices(self, workers: Iterable[int]) -> frozenset[int]:
        """The devices of several workers together."""
        return frozenset(device for worker in workers for device in self.workers[worker])

    def devices_of(
        self, schedule: Schedule, stage: int, microbatch: int | None = None
    ) -> frozenset[int]:
        """The devices on which a schedule runs a stage, for one microbatch or for all of them."""
        return self.devices(schedule.workers_of(stage, microbatch))

    def standing_in(self, schedule: Schedule, stage: int, route: int) -> Mapping[int, int]:
        """For each device of a stage on the first route, the device that replaces it on ``route``.

        Devices of a stage are paired in ascending order, worker by worker.

        Raises:
            PlanError: the stage has different numbers of devices on the two routes.
        """
        ends = [schedule.routes[number][stage] for number in (0, route)]
        first, other = ([d for w in workers for d in self.workers[w]] for workers in ends)
        if len(first) != len(other):
            raise PlanError(
                f"schedule {schedule.name} has stage {stage} on workers {list(ends[0])}, which are "
                f"devices {first} by placement {self}, and for other microbatches on workers "
                f"{list(ends[1])}, which are devices {other}: a stage is cut alike on all its "
                f"workers, so {len(other)} and {len(first)} devices do not fit."
            )
        return dict(zip(first, other, strict=True))

    def __str__(self) -> str:
        return " ".join(f"{w}:{','.join(map(str, own))}" for w, own in enumerate(self.workers))

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: the text has another form, or workers are not numbered from 0.
        """
        found = [_WORKER.fullmatch(word) for word in text.split()]
        if not found or any(
            one is None or int(one[1]) != worker for worker, one in enumerate(found)
        ):
            raise PlanError(
                f"{text[:60]!r} is no placement: it is WORKER:DEVICE,DEVICE,... for every worker "
                "from 0 on, such as '0:0,1 1:2,3'."
            )
        return cls(tuple(tuple(map(int, one[2].split(","))) for one in found if one is not None))
