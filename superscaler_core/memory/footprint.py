"""Footprint: the memory of a stage's forward or backward on a device, step by step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakKeyDictionary

from superscaler_core.known import Known
from superscaler_core.memory.dry_run import DryRun, window_step
from superscaler_core.memory.moments import Moment, Peak
from superscaler_core.memory.stage_form import StageForm
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment, Step
from superscaler_core.program.sequence import Close, Move, Open
from superscaler_core.schedules import ActionKind


@dataclass(frozen=True)
class Footprint:
    """The memory that one run of a stage for one microbatch adds to what a device held before.

    Laws (tests/superscaler_core/memory/test_footprint.py): the backward of a forward frees what the
    forward kept (or its recomputation and both halves of the backward do); the peak over all steps
    is within a tenth of a real step's peak.

    Attributes:
        peaks: for every step of ``StageProgram.steps``, in the order of the run (a backward runs
            them in reverse); accumulated gradients of weights are assumed to exist already.
        first_peaks: the same for the first backward of a step, which allocates these gradients.
        grads: bytes of these gradients, by weight.
        host_bytes: bytes added in host memory by the run: the values that a forward swapped.
        parcel_bytes: bytes in host memory of each swapped segment, by its name; memory shared by
            several segments counts in each of them.
    """

    peaks: tuple[Peak, ...]
    first_peaks: tuple[Peak, ...]
    grads: Mapping[str, int]
    host_bytes: int = 0
    parcel_bytes: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def most(self) -> Moment:
        """The peak over all steps."""
        return _worst(self.peaks)

    @cached_property
    def first_most(self) -> Moment:
        """The peak over all steps of the first backward."""
        return _worst(self.first_peaks)

    @property
    def kept(self) -> Moment:
        """The memory that remains after the run; a forward's remains until its backward."""
        return self.peaks[-1].after if self.peaks else Moment()


def footprints(
    made: Materialized, device: Device, master_dtype: str | None = None
) -> Mapping[tuple[ActionKind, int], Footprint]:
    """The footprints of all runs of stages on a device, by kind and stage.

    Args:
        made: the plan.
        device: one of its devices.
        master_dtype: dtype of stored parameters; the model's if None.
    """
    found = _FOUND.setdefault(made, {})
    if master_dtype not in found:
        found[master_dtype] = _Footprints(made, master_dtype)
    return found[master_dtype].of(made, device)


_RUNS = (
    (ActionKind.TURN,),
    (ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.BACKWARD),
    (ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.INPUTS, ActionKind.WEIGHTS),
    (ActionKind.FORWARD,),
)
"""Possible runs of a microbatch at a stage, in order, chosen by the last run of the schedule. A
stage has forwards alone if nothing needs a gradient."""


class _Footprints:
    """All footprints of a plan. Devices whose parts have equal shapes share one footprint.

    It is measured on the highest of these devices, whose causal attention sees the most keys. The
    plan itself is not stored here, because it is the weak key of the cache of these objects.
    """

    def __init__(self, made: Materialized, master_dtype: str | None) -> None:
        self._master = master_dtype
        self._speakers = _speakers(made)
        self._found: dict[tuple[int, Device], Mapping[ActionKind, Footprint]] = {}
        self._of: dict[Device, Mapping[tuple[ActionKind, int], Footprint]] = {}

    def of(self, made: Materialized, device: Device) -> Mapping[tuple[ActionKind, int], Footprint]:
        """The footprints of all runs on one device."""
        if device in self._of:
            return self._of[device]
        found: dict[tuple[ActionKind, int], Footprint] = {}
        for stage, speaker in self._speakers.get(device, {}).items():
            if (stage, speaker) not in self._found:
                self._found[stage, speaker] = self._looked_at(made, stage, speaker)
            found |= {(kind, stage): f for kind, f in self._found[stage, speaker].items()}
        self._of[device] = found
        return found

    def _looked_at(
        self, made: Materialized, stage: int, device: Device
    ) -> Mapping[ActionKind, Footprint]:
        """The footprints of a stage, which runs without data unless its form was run before."""
        form = StageForm(made, stage, device)
        key = form.key, self._master
        known = _KNOWN.get(key)
        if known is None:
            ran = self._run(made, stage, device)
            known = _KNOWN[key] = _renamed(ran, form.grads, form.segments)
        return _renamed(known, _turned(form.grads), _turned(form.segments))

    def _run(
        self, made: Materialized, stage: int, device: Device
    ) -> Mapping[ActionKind, Footprint]:
        """Run the turns without gradient, then a forward and its backward."""
        dry = DryRun(made, stage, device, self._master)
        names = [_name(step) for step in made.stages[stage].steps[device]]
        found: dict[ActionKind, Footprint] = {}
        kinds = made.stage_kinds[stage]
        for run in _RUNS:
            is_run = run[-1] in kinds and run[-1] not in found
            for kind in run if is_run else ():
                if kind in kinds:
                    order = names[::-1] if runs_in_reverse(kind) else names
                    footprint = _footprint(dry, kind, order)
                    found.setdefault(kind, footprint)
        return found


def runs_in_reverse(kind: ActionKind) -> bool:
    """Whether a run does a stage's steps from the last to the first."""
    return kind.goes_back or kind is ActionKind.WEIGHTS


MAX_STAGE_FORMS = 256
"""Bound on cached footprints of stages; each takes some tens of kilobytes with its key."""

_KNOWN: Known[Hashable, Mapping[ActionKind, Footprint]] = Known(MAX_STAGE_FORMS)
"""Footprints by form; gradients and segments have the names that the form gives them."""


def _renamed(
    found: Mapping[ActionKind, Footprint], grads: Mapping[str, str], segments: Mapping[str, str]
) -> Mapping[ActionKind, Footprint]:
    """The same footprints with other names of gradients and segments."""
    return {
        kind: replace(
            footprint,
            grads={grads[name]: size for name, size in footprint.grads.items()},
            parcel_bytes={segments[name]: size for name, size in footprint.parcel_bytes.items()},
        )
        for kind, footprint in found.items()
    }


def _turned(names: Mapping[str, str]) -> Mapping[str, str]:
    return {number: name for name, number in names.items()}


def _speakers(made: Materialized) -> Mapping[Device, Mapping[int, Device]]:
    """For each device and stage, the device on which its footprint is measured."""
    found: dict[Device, dict[int, Device]] = {}
    for stage, program in enumerate(made.stages):
        alike: dict[Hashable, list[Device]] = {}
        for device, mine in program.steps.items():
            alike.setdefault(_form(made, stage, device, mine), []).append(device)
        for devices in alike.values():
            for device in devices:
                found.setdefault(device, {})[stage] = max(devices)
    return found


_FOUND: WeakKeyDictionary[Materialized, dict[str | None, _Footprints]] = WeakKeyDictionary()


def _worst(peaks: Sequence[Peak]) -> Moment:
    return max((peak.most for peak in peaks), key=lambda moment: moment.total, default=Moment())


def _footprint(dry: DryRun, kind: ActionKind, names: Sequence[str]) -> Footprint:
    host_bytes = dry.meter.host.now_bytes
    meter = dry.run(kind)
    return Footprint(
        _in_order(meter.peaks, names),
        _in_order(meter.first_peaks, names),
        dict(meter.staying),
        meter.host.now_bytes - host_bytes,
        dry.parcel_bytes,
    )


def _in_order(peaks: Mapping[str, Peak], names: Sequence[str]) -> tuple[Peak, ...]:
    """The peaks of all steps; a step without work has the peak of no change."""
    found: list[Peak] = []
    now = Moment()
    for name in names:
        found.append(peaks.get(name) or Peak(now, now))
        now = found[-1].after
    return tuple(found)


def _name(step: Step) -> str:
    """The name of a step in a dry run."""
    if isinstance(step, Segment):
        return step.name
    if isinstance(step, Move):
        return step.edge.name
    assert isinstance(step, Open | Close)
    return window_step(step.window, opens=isinstance(step, Open))


# --- forms --------------------------------------------------------------------------------------


def _form(made: Materialized, stage: int, device: Device, steps: Sequence[Step]) -> Hashable:
    """A key that is equal for devices with equal memory: ops and shapes, not positions of boxes."""
    crossing = [*made.crossing_to(stage), *made.crossing_from(stage)]
    return (
        tuple(_step_form(made, device, step) for step in steps),
        tuple(_edge_form(edge, device) for edge in crossing if device in edge.devices),
    )


def _step_form(made: Materialized, device: Device, step: Step) -> Hashable:
    if isinstance(step, Segment):
        parts = tuple((part.op.index, part.form.extents) for part in step.parts)
        return step.recompute, step.swap, parts
    if isinstance(step, Move):
        return _edge_form(step.edge, device)
    assert isinstance(step, Open | Close)
    uses = made.uses_in(step.window)
    ends = [(u.name, u.side.shape_on(device), u.storage.shape_on(device)) for u in uses]
    return isinstance(step, Open), tuple(ends)


def _edge_form(edge: Edge, device: Device) -> Hashable:
    return edge.index, edge.src.shape_on(device), edge.dst.shape_on(device)
