"""Known runs: caches the duration of runs of ops, across all simulated steps.

The key of a run is its acts, the differences of its devices' start times, and the busy times of
ports.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from superscaler_core.cost.wire import Port
from superscaler_core.known import Known
from superscaler_core.plan import Device
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.weights import Use
from superscaler_core.schedules import Action
from superscaler_core.simulator.ports import Background, Interval, Ports
from superscaler_core.simulator.runs import KnownStage, RunActs, StageActs
from superscaler_core.simulator.stage_run import StageRun, StageRuns, UnderWay, run_acts
from superscaler_core.simulator.timeline import Stepper
from superscaler_core.simulator.work import Act, Work

Times = Known[Hashable, StageRun]
"""Cached runs of ops and of stages, by their acts and the busy times when they began."""

Calls = Known[tuple[str, tuple[Use, ...]], tuple[Act, ...]]
"""Calls that move weights, by instruction kind and uses of weights."""


class StepWork(Work):
    """The work of devices in a step, with cached stages and calls.

    Args:
        stages: the stages of the plan.
        calls: calls that were computed before.
        given: arguments of ``Work``.
    """

    def __init__(self, stages: Sequence[KnownStage], calls: Calls, *given: Any) -> None:
        super().__init__(*given)
        self._known_stages, self._calls = stages, calls

    def stage(self, action: Action, *, is_first: bool = False) -> Sequence[Act]:
        """See ``Work``."""
        return self._known_stages[action.stage].acts(action, is_first=is_first)

    def fetch(self, uses: Iterable[Use]) -> Iterable[Act]:
        """See ``Work``."""
        key = "fetch", tuple(uses)
        if key not in self._calls:
            self._calls[key] = tuple(super().fetch(key[1]))
        return self._calls[key]

    def reduce(self, uses: Iterable[Use]) -> Iterable[Act]:
        """See ``Work``."""
        key = "reduce", tuple(uses)
        if key not in self._calls:
            self._calls[key] = tuple(super().reduce(key[1]))
        return self._calls[key]


class KnownStepper(Stepper):
    """Steps through time, and reuses runs that were simulated before."""

    def __init__(
        self,
        made: Materialized,
        work: StepWork,
        optimizer_secs: Mapping[Device, float],
        times: Times,
        *,
        carry_secs: float,
        wake_secs: float,
    ) -> None:
        super().__init__(made, work, optimizer_secs, carry_secs=carry_secs, wake_secs=wake_secs)
        self._runs = _KnownRuns(self._ports, times, self._wake_ticks)


class _KnownRuns(StageRuns):
    """Runs of stages, each made of runs of ops; equal ones are simulated once across steps."""

    def __init__(self, ports: Ports, times: Times, wake_ticks: int) -> None:
        super().__init__(ports, wake_ticks=wake_ticks)
        self._times = times

    def run(
        self,
        acts: Sequence[Act],
        devices: tuple[Device, ...],
        ready: Sequence[int],
        under_way: UnderWay,
    ) -> tuple[int, StageRun]:
        """See ``StageRuns``."""
        if isinstance(acts, StageActs):
            return self._remembered(acts, devices, ready, under_way, self._ports)
        return super().run(acts, devices, ready, under_way)

    def _remembered(
        self,
        acts: StageActs | RunActs,
        devices: tuple[Device, ...],
        ready: Sequence[int],
        under_way: UnderWay,
        ports: Ports,
    ) -> tuple[int, StageRun]:
        base = min(ready)
        late = tuple(tick - base for tick in ready)
        before = under_way.since(base, devices)
        background = ports.background(acts.shared, base) if acts.shared else ()
        key = acts, late, background, before.key
        known = self._times.get(key)
        if known is None:
            known = self._times[key] = self._find(acts, devices, late, background, before)
        ports.replay(known.taken, base)
        under_way.replace(devices, known.under_way, base)
        return base, known

    def _find(
        self,
        acts: StageActs | RunActs,
        devices: tuple[Device, ...],
        late: tuple[int, ...],
        background: Background,
        before: UnderWay,
    ) -> StageRun:
        ports = Ports(background)
        if isinstance(acts, RunActs):
            return run_acts(acts, devices, late, ports, 0, before, self._wake_ticks)
        clock: tuple[int, ...] = late
        taken: list[tuple[Port, Interval]] = []
        for one in acts.runs:
            base, inside = self._remembered(one, devices, clock, before, ports)
            clock = tuple(base + end for end in inside.ends)
            taken += [(port, (base + a, base + b)) for port, (a, b) in inside.taken]
        return StageRun(devices, clock, (), (), tuple(taken), before)
