"""Known runs: how long runs of ops take, remembered in all steps that are simulated.

A run is known by its acts, by how far apart its devices begin, and by what ports are busy then.
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
"""Of runs of ops and of stages, by their acts and by what was busy when they began."""

Calls = Known[tuple[str, tuple[Use, ...]], tuple[Act, ...]]
"""What moves weights, by what is done and by the copies of weights."""


class StepWork(Work):
    """What devices do in a step, with stages and calls that are known.

    Args:
        stages: of the plan.
        calls: that were made before.
        given: as of ``Work``.
    """

    def __init__(self, stages: Sequence[KnownStage], calls: Calls, *given: Any) -> None:
        super().__init__(*given)
        self._known_stages, self._calls = stages, calls

    def stage(self, action: Action, *, is_first: bool = False) -> Sequence[Act]:
        """As of ``Work``."""
        return self._known_stages[action.stage].acts(action, is_first=is_first)

    def fetch(self, uses: Iterable[Use]) -> Iterable[Act]:
        """As of ``Work``."""
        key = "fetch", tuple(uses)
        if key not in self._calls:
            self._calls[key] = tuple(super().fetch(key[1]))
        return self._calls[key]

    def reduce(self, uses: Iterable[Use]) -> Iterable[Act]:
        """As of ``Work``."""
        key = "reduce", tuple(uses)
        if key not in self._calls:
            self._calls[key] = tuple(super().reduce(key[1]))
        return self._calls[key]


class KnownStepper(Stepper):
    """Lets time pass, with runs that were simulated before."""

    def __init__(
        self,
        made: Materialized,
        work: StepWork,
        optimizer_secs: Mapping[Device, float],
        move_secs: float,
        times: Times,
    ) -> None:
        super().__init__(made, work, optimizer_secs, move_secs=move_secs)
        self._runs = _KnownRuns(self._ports, times)


class _KnownRuns(StageRuns):
    """Runs of stages, each made of runs of ops; equal ones are simulated once, in all steps."""

    def __init__(self, ports: Ports, times: Times) -> None:
        super().__init__(ports)
        self._times = times

    def run(
        self,
        acts: Sequence[Act],
        devices: tuple[Device, ...],
        ready: Sequence[int],
        under_way: UnderWay,
    ) -> tuple[int, StageRun]:
        """As of ``StageRuns``."""
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
            return run_acts(acts, devices, late, ports, 0, before)
        clock: tuple[int, ...] = late
        taken: list[tuple[Port, Interval]] = []
        for one in acts.runs:
            base, inside = self._remembered(one, devices, clock, before, ports)
            clock = tuple(base + end for end in inside.ends)
            taken += [(port, (base + a, base + b)) for port, (a, b) in inside.taken]
        return StageRun(devices, clock, (), (), tuple(taken), before)
