"""Step memory: what is on a device at the worst moment of a step, over all its runs of stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.memory.footprint import Footprint, footprints
from superscaler_core.memory.moments import Moment
from superscaler_core.memory.staging import staging_bytes
from superscaler_core.memory.stored import StoredMemory
from superscaler_core.plan import Device
from superscaler_core.program.buckets import GRADS
from superscaler_core.program.edges import Edge
from superscaler_core.program.materialized import Materialized
from superscaler_core.schedules import Action, ActionKind


@dataclass(frozen=True, slots=True)
class Worst:
    """What a step takes on one device.

    Attributes:
        moment: the one at which most is there.
        staging_bytes: what ``rvdcomm`` keeps all the time to stage communication; of the buffers.
        host_bytes: the most on the host of what is swapped.
    """

    moment: Moment
    staging_bytes: int
    host_bytes: int


class StepMemory:
    """Lays the footprints of stages over the order of a step.

    Args:
        made: the plan.
        stored: its parameters.
    """

    def __init__(self, made: Materialized, stored: StoredMemory) -> None:
        self._made, self._stored = made, stored
        constants = {t for op in made.plan.graph.ops for t in op.inputs if t.kind == "constant"}
        self._constant_bytes = sum(tensor.num_bytes for tensor in constants)

    def worst(self, device: Device) -> Worst:
        """The moment of a step at which most is on a device; optimizer states come on top."""
        stored = self._stored
        walk = _Walk(footprints(self._made, device, stored.master_dtype))
        for event in self._made.events_on[device]:
            if isinstance(event, Action):
                walk.run(event, self._read(event))
            else:
                walk.carry((event.edge, event.microbatch, event.is_back), device)
        # Weights come all at once, and so do gradients go.
        at_start = Moment(buffers=stored.fetched_bytes(device))
        at_end = Moment(grads=sum(walk.grads.values()), buffers=stored.arriving_bytes(device))
        moment = max(walk.worst, at_start, at_end, key=lambda moment: moment.total)
        staging = self._staging.get(device, 0)
        buffers = self._constant_bytes + staging
        resting = Moment(weights=stored.resting_bytes(device), buffers=buffers)
        return Worst(resting + moment, staging, walk.most_host_bytes)

    @cached_property
    def _staging(self) -> Mapping[Device, int]:
        """Of all communication of a step in which a device takes part, the most that is staged."""
        topology = self._made.topology
        found: dict[Device, int] = {}
        for edge in self._made.edges.all:
            size = staging_bytes((*edge.forward, *edge.backward), topology)
            for device in edge.devices if size else ():
                found[device] = max(found.get(device, 0), size)
        for use, legs in self._stored.legs.items():
            size = staging_bytes(legs, topology)
            for device in {*use.side.shards, *use.storage.shards} if size else ():
                found[device] = max(found.get(device, 0), size)
        return found

    def _read(self, run: Action) -> Iterable[tuple[Edge, int, bool]]:
        """What a run takes of what edges have brought."""
        made, is_back = self._made, run.kind.goes_back
        if run.kind in (ActionKind.RECOMPUTE, ActionKind.WEIGHTS):
            return ()
        edges = made.crossing_from(run.stage) if is_back else made.crossing_to(run.stage)
        return ((edge, run.microbatch, is_back) for edge in edges)


class _Walk:
    """One device's way through a step.

    Attributes:
        worst: the moment at which most was there.
        grads: bytes of the gradients that stay, by weight.
        most_host_bytes: the most that was on the host.
    """

    def __init__(self, footprints: Mapping[tuple[ActionKind, int], Footprint]) -> None:
        self._footprints = footprints
        self._kept = self.worst = Moment()
        self._mail: dict[tuple[Edge, int, bool], int] = {}
        self.grads: dict[str, int] = {}
        self._host_bytes = 0
        self.most_host_bytes = 0

    def run(self, run: Action, read: Iterable[tuple[Edge, int, bool]]) -> None:
        """A stage runs for a microbatch."""
        footprint = self._footprints[run.kind, run.stage]
        for letter in read:
            self._mail.pop(letter, None)
        # Another stage here may have begun all of them: a copy of the stage.
        is_first = run.kind in GRADS and not footprint.grads.keys() <= self.grads.keys()
        self._look(footprint.first_most if is_first else footprint.most)
        self._kept += footprint.kept
        self._host_bytes += footprint.host_bytes
        self.most_host_bytes = max(self.most_host_bytes, self._host_bytes)
        if is_first:
            self.grads |= footprint.grads

    def carry(self, letter: tuple[Edge, int, bool], device: Device) -> None:
        """Something arrives, and waits for who reads it."""
        edge, _, is_back = letter
        src, dst = (edge.dst, edge.src) if is_back else (edge.src, edge.dst)
        legs = edge.backward if is_back else edge.forward
        shard = dst.shards.get(device)
        # What a device sends to itself is there already.
        if shard is None or (device in src.shards and all(leg.is_idle for leg in legs)):
            return
        self._mail[letter] = shard.box.num_elements * ITEM_BYTES[edge.tensor.dtype]
        self._look(Moment())

    def _look(self, more: Moment) -> None:
        here = Moment(grads=sum(self.grads.values()), buffers=sum(self._mail.values()))
        now = self._kept + here + more
        if now.total > self.worst.total:
            self.worst = now
