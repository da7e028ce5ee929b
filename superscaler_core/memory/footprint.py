"""Footprint: the memory of a stage's forward or backward on a device, step by step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import starmap
from weakref import WeakKeyDictionary

from superscaler_core.known import Known
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.sequence import Open
from superscaler_core.materialize.sharding import MAX_SHARDINGS, Sharding
from superscaler_core.memory.account import Moment, Peak
from superscaler_core.memory.effects import StageEffects
from superscaler_core.memory.fold import Fold
from superscaler_core.memory.lowering import Lowering
from superscaler_core.memory.outline import outline
from superscaler_core.memory.stored import StoredMemory
from superscaler_core.plan import Device
from superscaler_core.precision import Precision
from superscaler_core.run.tape import SegmentFunction
from superscaler_core.schedules import ActionKind

Devices = tuple[Device, ...]


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
        host_bytes: bytes added in host memory by the run: the values that a forward offloaded.
        offloaded_bytes: bytes in host memory of each offloaded segment, by its name; memory shared
            by several segments counts in each of them.
    """

    peaks: tuple[Peak, ...]
    first_peaks: tuple[Peak, ...]
    grads: Mapping[str, int]
    host_bytes: int = 0
    offloaded_bytes: Mapping[str, int] = field(default_factory=dict)

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
    made: Materialized, device: Device, precision: Precision = Precision()
) -> Mapping[tuple[ActionKind, int], Footprint]:
    """The footprints of all runs of stages on a device, by kind and stage.

    Args:
        made: the plan.
        device: one of its devices.
        precision: the dtypes of the training.
    """
    return _of_plan(made, precision).of(made, device)


def alike_devices(made: Materialized, precision: Precision = Precision()) -> Iterable[Devices]:
    """The devices of a plan in groups, ascending, whose parts and shards have equal shapes."""
    in_stages = _of_plan(made, precision).alike
    ends = {(use.sharding, use.storage) for use in made.weights.uses}
    ends |= {(sharding, sharding) for sharding in made.weights.storage.values()}
    shapes = list(starmap(_ends, ends))
    groups: dict[Hashable, list[Device]] = {}
    for device in sorted(made.plan.devices):
        mine = tuple(in_stages.get(device, {}).items())
        groups.setdefault((mine, *(each.get(device) for each in shapes)), []).append(device)
    return map(tuple, groups.values())


class _Footprints:
    """All footprints of a plan. Devices whose parts have equal shapes share one footprint.

    The plan itself is not stored here, because it is the weak key of the cache of these objects.

    Attributes:
        alike: for each device and stage, all devices whose parts have equal shapes.
    """

    def __init__(self, made: Materialized, precision: Precision) -> None:
        self._precision = precision
        self.alike = _alike_in_stages(made)
        self._found: dict[tuple[int, Devices], Mapping[ActionKind, Footprint]] = {}
        self._of: dict[Device, Mapping[tuple[ActionKind, int], Footprint]] = {}

    def of(self, made: Materialized, device: Device) -> Mapping[tuple[ActionKind, int], Footprint]:
        """The footprints of all runs on one device."""
        if device in self._of:
            return self._of[device]
        found: dict[tuple[ActionKind, int], Footprint] = {}
        for stage, alike in self.alike.get(device, {}).items():
            if (stage, alike) not in self._found:
                self._found[stage, alike] = _footprints_of(made, stage, alike, self._precision)
            found |= {(kind, stage): f for kind, f in self._found[stage, alike].items()}
        self._of[device] = found
        return found


_FOUND: WeakKeyDictionary[Materialized, dict[Precision, _Footprints]] = WeakKeyDictionary()


def _of_plan(made: Materialized, precision: Precision) -> _Footprints:
    found = _FOUND.setdefault(made, {})
    if precision not in found:
        found[precision] = _Footprints(made, precision)
    return found[precision]


def _footprints_of(
    made: Materialized, stage: int, devices: Devices, precision: Precision
) -> Mapping[ActionKind, Footprint]:
    """The footprints of a stage on devices, with the names of its gradients and segments."""
    stored = StoredMemory(made, precision)
    key = outline(made, stage, devices, stored)
    return _OUTLINES.of(key, lambda: _lowered(Lowering(made, stage, devices, stored)))


def _lowered(lowering: Lowering) -> Mapping[ActionKind, Footprint]:
    effects = lowering.effects()
    known = _KNOWN.of(effects, lambda: dict(_folded(effects, lowering.function)))
    grads, segments = list(lowering.grads), list(lowering.segments)
    return {
        kind: Footprint(
            ran.peaks,
            ran.first_peaks,
            {grads[number]: size for number, size in ran.grads.items()},
            ran.host_bytes,
            {segments[number].name: size for number, size in ran.offloaded_bytes.items()},
        )
        for kind, ran in known.items()
    }


# --- folds --------------------------------------------------------------------------------------

_RUNS = (
    (ActionKind.RECYCLE,),
    (ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.BACKWARD),
    (ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.INPUTS, ActionKind.WEIGHTS),
    (ActionKind.FORWARD,),
)
"""Possible runs of a microbatch at a stage, in order, chosen by the last run of the schedule. A
stage has forwards alone if nothing needs a gradient."""


@dataclass(frozen=True, slots=True)
class _Ran:
    """A footprint with numbers in place of names."""

    peaks: tuple[Peak, ...]
    first_peaks: tuple[Peak, ...]
    grads: Mapping[int, int]
    host_bytes: int
    offloaded_bytes: Mapping[int, int]


MAX_STAGES = 64
"""Bound on stages whose memory is known; each takes some hundred kilobytes with its keys."""

_KNOWN: Known[StageEffects, Mapping[ActionKind, _Ran]] = Known(MAX_STAGES)

_OUTLINES: Known[Hashable, Mapping[ActionKind, Footprint]] = Known(MAX_STAGES)


def _folded(
    stage: StageEffects, function: Callable[[int], SegmentFunction]
) -> Iterator[tuple[ActionKind, _Ran]]:
    """Fold the recycling passes, then a forward and its backward."""
    fold, runs, done = Fold(stage, function), dict(stage.runs), set()
    for last in _RUNS:
        if last[-1] not in runs or last[-1] in done:
            continue
        for kind in last:
            if kind in runs:
                before = fold.host.now_bytes
                fold.run(runs[kind])
                if kind not in done:
                    yield kind, _ran(fold, kind, stage.num_steps, before)
                done.add(kind)


def _ran(fold: Fold, kind: ActionKind, num_steps: int, host_bytes: int) -> _Ran:
    account = fold.account
    places = range(num_steps)[::-1] if in_reverse(kind) else range(num_steps)
    return _Ran(
        _in_order(account.peaks, places),
        _in_order(account.first_peaks, places),
        account.staying,
        fold.host.now_bytes - host_bytes,
        fold.host_bytes,
    )


def in_reverse(kind: ActionKind) -> bool:
    """Whether a run does a stage's steps from the last to the first."""
    return kind.goes_back or kind is ActionKind.WEIGHTS


def _in_order(peaks: Mapping[int, Peak], places: Sequence[int]) -> tuple[Peak, ...]:
    """The peaks of all steps; a step without work has the peak of no change."""
    found: list[Peak] = []
    now = Moment()
    for place in places:
        found.append(peaks.get(place) or Peak(now, now))
        now = found[-1].after
    return tuple(found)


def _worst(peaks: Sequence[Peak]) -> Moment:
    return max((peak.most for peak in peaks), key=lambda moment: moment.total, default=Moment())


# --- devices that are alike ---------------------------------------------------------------------


def _alike_in_stages(made: Materialized) -> Mapping[Device, Mapping[int, Devices]]:
    """For each device and stage, all devices whose parts have the same shapes, ascending."""
    found: dict[Device, dict[int, Devices]] = {}
    for stage, program in enumerate(made.stages):
        shapes = [program.shapes, *_shapes_of_ends(made, stage)]
        for alike in program.steps.alike:
            groups: dict[Hashable, list[Device]] = {}
            for device in alike.devices:
                groups.setdefault(tuple(each.get(device) for each in shapes), []).append(device)
            for devices in map(tuple, groups.values()):
                for device in devices:
                    found.setdefault(device, {})[stage] = devices
    return found


def _shapes_of_ends(made: Materialized, stage: int) -> Sequence[Mapping[Device, Hashable]]:
    """The shapes of what moves in a stage by device; layers have equal ones, which count once."""
    edges = (*made.edges.of_stage(stage), *made.edges.leaving(stage), *made.edges.arriving(stage))
    units = (s.unit for s in made.items[stage] if isinstance(s, Open))
    uses = (use for unit in units for use in made.uses_in(unit))
    ends = [(edge.src, edge.dst) for edge in edges] + [(use.sharding, use.storage) for use in uses]
    return [*starmap(_ends, dict.fromkeys(ends))]


@lru_cache(maxsize=MAX_SHARDINGS)
def _ends(src: Sharding, dst: Sharding) -> Mapping[Device, Hashable]:
    return {d: (src.shape_on(d), dst.shape_on(d)) for d in src.shards.keys() | dst.shards.keys()}
