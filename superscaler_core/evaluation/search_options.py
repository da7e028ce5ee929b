"""Search: everything that a search is asked for besides the model, as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import rvdcomm as rv
from superscaler_core.checks import at_least, one_of
from superscaler_core.cost import PROFILES, DeviceProfile
from superscaler_core.cost.presets import profile_of
from superscaler_core.errors import PlanError
from superscaler_core.evaluation.request import SearchPlanner, Trial
from superscaler_core.levels import levels_of
from superscaler_core.memory import STATES
from superscaler_core.plan import Device
from superscaler_core.precision import Precision, former_precision

Progress = Callable[[int, int, Trial | None], None]
"""Called after every trial.

Its arguments are the number of trials, the number of waiting candidates, and the fastest trial so
far, which may be an estimate.
"""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched for, on which cluster, and for how long.

    Attributes:
        topology: hosts and links of the devices; of a network, the levels that resemble it.
        batch: samples per step.
        memory_bytes: memory of a device; that of the profile if None.
        planner: a name of ``PLANNERS``, or a function that proposes candidates.
        budget_secs: seconds of the whole search. They include capturing the model, the full
            evaluation at the best estimate, and the capture of the graph on which the chosen plan
            is checked: no other evaluation begins when less time is left than these may take. An
            evaluation in another process that is under way in the end is abandoned. The search goes
            on beyond the budget until one plan was evaluated in full and fits, or no candidate is
            left, and no estimate is 3 % faster than it, and if this plan's graph differs from the
            captured one.
        max_tried: the largest number of trials, besides the full evaluations of the best estimates
            in the end; 0 is no limit. With one process, and if the budget suffices, two searches
            with the same arguments find the same plan.
        profile: profile of every device, or the name of a preset.
        devices: devices that may be used; all of the topology if None.
        samples: microbatch sizes to try; all divisors of the batch if empty.
        recycled: as in ``capture``, for a model.
        recycle: forwards without gradient per microbatch, for a model that recycles its results.
        optimizer, precision: as in ``compile``.
        num_processes: processes that evaluate candidates side by side. More than one needs a main
            module that can be imported, as ``multiprocessing`` does.
        progress: called after every trial.

    Raises:
        PlanError: a value is none of those that it can have; the message has them.
    """

    topology: rv.Topology | rv.Network
    batch: int
    memory_bytes: int | None = None
    planner: str | SearchPlanner = "auto"
    budget_secs: float = 60.0
    max_tried: int = 0
    profile: DeviceProfile | str = field(default_factory=lambda: PROFILES["v100"])
    devices: Sequence[Device] | None = None
    samples: Sequence[int] = ()
    recycled: Mapping[str, int] | None = None
    recycle: int = 0
    optimizer: str = "adam"
    precision: Precision = Precision()
    num_processes: int = 1
    progress: Progress | None = None

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch, num_processes=self.num_processes)
        at_least(0, max_tried=self.max_tried, recycle=self.recycle)
        at_least(0.0, budget_secs=self.budget_secs)
        for size in self.samples:
            at_least(1, samples=size)
        if self.memory_bytes is not None:
            at_least(1.0, memory_bytes=self.memory_bytes)
        if levels_of(self.topology) is None:
            raise PlanError("topology=None: a search needs the devices and their links.")
        one_of("optimizer", self.optimizer, STATES)
        Precision.of(self.precision)
        _ = self.device_profile

    @property
    def levels(self) -> rv.Topology:
        """The topology, or the levels of the network."""
        found = levels_of(self.topology)
        assert found is not None, "a search has a topology"
        return found

    @classmethod
    def of(cls, asked: Search | None, options: Mapping[str, Any]) -> Search:
        """A search with some attributes by name.

        Raises:
            PlanError: a name or a value is not known, or ``topology`` or ``batch`` is missing.
        """
        options = dict(options)
        if "master_dtype" in options:
            options["precision"] = former_precision(options.pop("master_dtype"))
        names = [each.name for each in fields(cls)]
        for name in options:
            one_of("option of search", name, names)
        if asked is not None and not isinstance(asked, cls):
            raise PlanError(f"search takes a {cls.__name__}, and was given {asked!r}.")
        if asked is not None:
            return replace(asked, **options)
        if missing := [name for name in ("topology", "batch") if name not in options]:
            raise PlanError(f"search takes {' and '.join(missing)}: see {cls.__name__}.")
        return cls(**options)

    @property
    def device_profile(self) -> DeviceProfile:
        """The profile of every device."""
        given = self.profile
        return given if isinstance(given, DeviceProfile) else profile_of(given)

    @property
    def chosen_devices(self) -> tuple[Device, ...]:
        """The devices that may be used."""
        return tuple(sorted(self.levels.ranks) if self.devices is None else self.devices)
