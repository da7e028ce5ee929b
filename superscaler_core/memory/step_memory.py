"""Step memory: the peak memory of a device in a step, over all its runs of stages."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import rvdcomm as rv
from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.moved_home import moved_home
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.memory.account import Moment
from superscaler_core.memory.footprint import Footprint, footprints, in_reverse
from superscaler_core.memory.step_peaks import Run, StepPeak, StepPeaks, step_form
from superscaler_core.memory.stored import StoredMemory
from superscaler_core.plan import Device
from superscaler_core.precision import Precision
from superscaler_core.program.event import OverlappedPair, P2PSend, actions_in
from superscaler_core.schedules import GRADS, Action, ActionKind

Letter = tuple[Edge, int, bool]
"""What a P2P send brings: the edge, the microbatch, and whether it is the gradient."""


@dataclass(frozen=True, slots=True)
class Worst:
    """The peak memory of one device in a step.

    Attributes:
        moment: the memory at the peak.
        staging_bytes: bytes that ``rvdcomm`` keeps all the time to stage communication; included in
            the buffers.
        host_bytes: the peak of offloaded values on the host.
    """

    moment: Moment
    staging_bytes: int
    host_bytes: int


class StepMemory:
    """Places the footprints of stages in the order of a step.

    Args:
        made: the plan.
        stored: its parameters.
    """

    def __init__(self, made: Materialized, stored: StoredMemory) -> None:
        self._made, self._stored = made, stored
        constants = {t for op in made.plan.graph.ops for t in op.inputs if t.kind == "constant"}
        self._constant_bytes = sum(tensor.num_bytes for tensor in constants)

    def worst(self, device: Device) -> Worst:
        """The peak of a step on a device, without optimizer states."""
        walk, resting = self.walked(device, Walk), self.resting(device)
        return Worst(resting + walk.worst, self._staging.get(device, 0), walk.most_host_bytes)

    def peaks(self, device: Device, states_bytes: int) -> StepPeaks:
        """The peaks of all steps on a device, including the given bytes of optimizer states."""
        walk = self.walked(device, Walk)
        resting = self.resting(device).total + states_bytes
        found: dict[Run, tuple[StepPeak, ...]] = {}
        for (kind, stage, is_first), held_bytes in walk.held_bytes.items():
            forms = self._forms(device, stage, kind)
            footprint = walk.footprints[kind, stage]
            peaks = footprint.first_peaks if is_first else footprint.peaks
            found[kind, stage, is_first] = tuple(
                StepPeak(form, resting + held_bytes + peak.most_bytes)
                for form, peak in zip(forms, peaks, strict=True)
            )
        return StepPeaks(found, resting + walk.between_bytes)

    def _forms(self, device: Device, stage: int, kind: ActionKind) -> Sequence[Hashable]:
        """The forms of the steps of a run, in the order of the run."""
        steps = self._made.stages[stage].steps[device]
        forms = [step_form(self._made, device, step) for step in steps]
        return forms[::-1] if in_reverse(kind) else forms

    def resting(self, device: Device) -> Moment:
        """The memory that exists all the time."""
        buffers = self._constant_bytes + self._staging.get(device, 0)
        return Moment(weights=self._stored.resting_bytes(device), buffers=buffers)

    def walked(self, device: Device, kind: type[W]) -> W:
        """A walk of this kind over all events of a step."""
        stored = self._stored
        walk = kind(footprints(self._made, device, stored.precision))
        # All weights arrive at the start; all gradients leave at the end.
        walk.begin(stored.fetched_bytes(device))
        for event in self._made.events_on[device]:
            if isinstance(event, OverlappedPair):
                walk.look_at_both(event)
            if isinstance(event, P2PSend):
                walk.p2p_send(
                    (self._made.edge(event.name), event.microbatch, event.is_back), device
                )
            elif isinstance(event, Action) and event.kind is ActionKind.UPDATE:
                handed = stored.handed_bytes(device, event.stage)
                copies, arriving = self._reduced(event.stage), stored.arriving_bytes(device)
                walk.update(event, copies, arriving, handed)
            for run in actions_in(event):
                if run.kind is not ActionKind.UPDATE:
                    walk.run(run, self._read(run))
        walk.end(stored.arriving_bytes(device))
        return walk

    def _reduced(self, stage: int) -> Collection[str]:
        """The copies whose gradients an update of a stage frees, by name."""
        made, mine = self._made, self._made.updated_in(stage)
        uses = [use for use in made.weights.uses if use.tensor in mine and use.owner is None]
        return {use.name for use in (*uses, *made.borrowers.get(stage, ()))}

    @cached_property
    def _staging(self) -> Mapping[Device, int]:
        return staging_by_device(self._made, self._stored.precision)

    def _read(self, run: Action) -> Iterable[Letter]:
        """The results of edges that a run reads."""
        made, is_back = self._made, run.kind.goes_back
        if run.kind in (ActionKind.RECOMPUTE, ActionKind.WEIGHTS):
            return ()
        edges = made.edges.leaving(run.stage) if is_back else made.edges.arriving(run.stage)
        mbs = made.microbatches_of(run)
        return ((edge, mb, is_back) for edge in edges for mb in mbs)


class Walk:
    """Adds up the memory of one device over its runs in a step, in order.

    Attributes:
        footprints: footprints of its runs, by kind and stage.
        worst: the peak so far.
        held_bytes: for every kind of run, the most memory that was held before such a run.
        between_bytes: the peak so far outside runs, and in two runs that are woven.
        grads: bytes of the accumulated gradients, by weight.
        mail: bytes of each value that has arrived and waits for its reader.
        most_host_bytes: the peak on the host so far.
    """

    def __init__(self, footprints: Mapping[tuple[ActionKind, int], Footprint]) -> None:
        self.footprints = footprints
        self._kept = self.worst = Moment()
        self.held_bytes: dict[Run, int] = {}
        self.between_bytes = 0
        self.mail: dict[Letter, int] = {}
        self.grads: dict[str, int] = {}
        self._host_bytes = 0
        self.most_host_bytes = 0

    @property
    def now_bytes(self) -> int:
        """The present memory."""
        return self._kept.total + sum(self.grads.values()) + sum(self.mail.values())

    def begin(self, arriving_bytes: int) -> None:
        """Begin the step: the weights that it fetches arrive."""
        self.see(Moment(buffers=arriving_bytes))

    def run(self, run: Action, read: Iterable[Letter]) -> None:
        """Add a run of a stage for a microbatch."""
        footprint, most, is_first = self.about(run)
        for letter in read:
            self.mail.pop(letter, None)
        key = run.kind, run.stage, is_first
        held_bytes = self._seen_bytes(most) - most.total
        self.held_bytes[key] = max(self.held_bytes.get(key, held_bytes), held_bytes)
        self._kept += footprint.kept
        self._host_bytes += footprint.host_bytes
        self.most_host_bytes = max(self.most_host_bytes, self._host_bytes)
        if is_first:
            self.grads |= footprint.grads

    def about(self, run: Action) -> tuple[Footprint, Moment, bool]:
        """The footprint of a run, its peak now, and whether it allocates gradients of weights."""
        footprint = self.footprints[run.kind, run.stage]
        # A copy of the stage on this device may have allocated all of these gradients before.
        is_first = run.kind in GRADS and not footprint.grads.keys() <= self.grads.keys()
        return footprint, footprint.first_most if is_first else footprint.most, is_first

    def look_at_both(self, pair: OverlappedPair) -> None:
        """Bound two runs that are woven: both may be at their peaks at one time."""
        self.see(self.about(pair.first)[1] + self.about(pair.second)[1])

    def update(
        self, event: Action, copies: Collection[str], arriving_bytes: int, handed_bytes: int
    ) -> None:
        """Add an update between microbatches, which frees the gradients of its copies."""
        self.see(Moment(buffers=arriving_bytes))
        self._kept += Moment(grads=handed_bytes)
        self.grads = {name: size for name, size in self.grads.items() if name not in copies}

    def p2p_send(self, letter: Letter, device: Device) -> None:
        """Add a value that arrives and waits for its reader."""
        edge, _, is_back = letter
        src, dst = (edge.dst, edge.src) if is_back else (edge.src, edge.dst)
        sub_transfers = edge.backward if is_back else edge.forward
        shard = dst.shards.get(device)
        # A value that a device sends to itself is already counted.
        if shard is None or (
            device in src.shards and all(sub_transfer.is_idle for sub_transfer in sub_transfers)
        ):
            return
        self.mail[letter] = shard.box.num_elements * ITEM_BYTES[edge.tensor.dtype]
        self.see(Moment())

    def end(self, arriving_bytes: int) -> None:
        """End the step: nothing is kept but gradients."""
        self._kept = Moment()
        self.mail.clear()
        self.see(Moment(buffers=arriving_bytes))

    def see(self, more: Moment) -> None:
        """Update the peaks outside runs with the present memory plus ``more``."""
        self.between_bytes = max(self.between_bytes, self._seen_bytes(more))

    def _seen_bytes(self, more: Moment) -> int:
        here = Moment(grads=sum(self.grads.values()), buffers=sum(self.mail.values()))
        now = self._kept + here + more
        if now.total > self.worst.total:
            self.worst = now
        return now.total


W = TypeVar("W", bound=Walk)


# --- staging ------------------------------------------------------------------------------------

MAX_STAGED = 1 << 14
"""Bound on cached transfers; equal layers, and devices that look alike, have equal transfers."""

Moves = tuple[tuple[Transfer, ...], str, Iterable[Device]]
"""Transfers, the dtype of what moves, and the devices that take part."""


def staging_by_device(made: Materialized, precision: Precision) -> Mapping[Device, int]:
    """For each device, what its largest transfer of a step takes besides the shards at both ends.

    Args:
        made: the plan.
        precision: the dtypes of the training.
    """
    # Equal ends have one tuple of transfers.
    known: dict[tuple[int, str], int] = {}
    found: dict[Device, int] = {}
    for sub_transfers, dtype, devices in _moves(made, precision):
        key = id(sub_transfers), dtype
        if key not in known:
            sizes = (
                _staged(sub_transfer.of_dtype(dtype), made.topology)
                for sub_transfer in sub_transfers
            )
            known[key] = max(sizes, default=0)
        for device in devices if known[key] else ():
            found[device] = max(found.get(device, 0), known[key])
    return found


def _moves(made: Materialized, precision: Precision) -> Iterable[Moves]:
    for edge in made.edges.all:
        for sub_transfers in (edge.forward, edge.backward):
            yield sub_transfers, edge.tensor.dtype, edge.devices
    for use in made.weights.uses:
        devices = {*use.sharding.shards, *use.storage.shards}
        yield use.fetch, use.tensor.dtype, devices
        yield use.reduce, precision.stored(use.tensor.dtype), devices


@lru_cache(maxsize=MAX_STAGED)
def _staged(sub_transfer: Transfer, topology: rv.Topology | None) -> int:
    if sub_transfer.is_idle:
        return 0
    src, dst = moved_home(sub_transfer.src, sub_transfer.dst, topology)[:2]
    plan = rv.plan(src, dst, sub_transfer.dtype, topology, executor="dist", trees=False)
    # Only this cost is read, because the others take longer to compute.
    peak_bytes = plan.peak_bytes if plan.is_counted else plan.cost.peak_bytes
    # Any plan needs at least its shards.
    return max(0, peak_bytes - plan.bound.peak_bytes)
