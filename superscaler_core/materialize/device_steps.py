"""Device steps: the forward of a stage on each device; alike devices share one structure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import rvdcomm as rv
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import PTensor
from superscaler_core.materialize.bias import ADDS_BIAS, adds_whole_product, products_of
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.segments import Segment, StageItems, Step, segment_name
from superscaler_core.materialize.sequence import Compute, Item, MoveStep
from superscaler_core.plan import Device


@dataclass(frozen=True, eq=False)
class Alike:
    """Devices that run the same steps of a stage, each with its own parts of the ops.

    Attributes:
        devices: ascending.
        steps: the steps of the first of them.
    """

    devices: tuple[Device, ...]
    steps: tuple[Step, ...]


class DeviceSteps(Mapping[Device, tuple[Step, ...]]):
    """For each device, its forward of a stage as segments and communication.

    Law (tests/superscaler_core/materialize/test_device_steps.py): the steps of every device are
    those that it would have if no other device was alike.

    Args:
        given: the items of the stage.
        crossing: the edges from the stage to others, and from others to it.
        inputs_of: names of the boxes of the batch that a part reads on its device.

    Attributes:
        alike: the devices, together if they do the same.
    """

    def __init__(
        self,
        given: StageItems,
        crossing: Sequence[Edge] = (),
        inputs_of: Callable[[Part, Device], Hashable] = lambda part, device: None,
    ) -> None:
        self._given = given
        self._rows: dict[Device, list[Item]] = defaultdict(list)
        together: dict[Hashable, list[Device]] = defaultdict(list)
        for device, key in self._keys(crossing, inputs_of).items():
            together[key].append(device)
        self.alike = tuple(
            Alike(tuple(sorted(devices)), self._built(min(devices)))
            for devices in together.values()
        )
        self._named: dict[Device, Mapping[str, Segment]] = {}
        self._steps = {alike.devices[0]: alike.steps for alike in self.alike}

    def __getitem__(self, device: Device) -> tuple[Step, ...]:
        if device not in self._steps:
            self._steps[device] = tuple(self._moved(self.like(device).steps, device))
        return self._steps[device]

    def __iter__(self) -> Iterator[Device]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, device: object) -> bool:
        return device in self._rows

    def segment(self, name: str, device: Device) -> Segment:
        """A segment of a device, by its name."""
        if device not in self._named:
            mine = (step for step in self[device] if isinstance(step, Segment))
            self._named[device] = {segment.name: segment for segment in mine}
        return self._named[device][name]

    def like(self, device: Device) -> Alike:
        """The devices that do the same as a device."""
        return self._of[device]

    @cached_property
    def _of(self) -> Mapping[Device, Alike]:
        return {device: alike for alike in self.alike for device in alike.devices}

    # --- alike devices --------------------------------------------------------------------------

    def _keys(
        self, crossing: Sequence[Edge], inputs_of: Callable[[Part, Device], Hashable]
    ) -> Mapping[Device, Hashable]:
        """For each device a key that is equal for devices that do the same with other boxes.

        With one part per op, which part it is does not change which segment reads which result. A
        device with several parts of an op is like no other one.
        """
        rows = self._rows
        keys: dict[Device, list[Hashable]] = defaultdict(list)
        found: dict[tuple[int, Device], Part] = {}
        has_groups = self._given.has_groups
        for number, item in enumerate(self._given.items):
            if isinstance(item, Compute):
                device, part = item.device, item.part
                alone = (part.op.index, device) in found
                found[part.op.index, device] = part
                rows[device].append(item)
                keys[device].append(part.op.index)
                if alone:
                    keys[device].append(device)
                if has_groups or part.op.reads_batch or part.op.kind == ADDS_BIAS:
                    keys[device] += self._more_of(item, inputs_of, found)
                continue
            for device in self._given.taking_part[item]:
                ends = _ends(item.edge, device) if isinstance(item, MoveStep) else None
                rows[device].append(item)
                keys[device].append((number, ends))
        return {
            device: (*key, *(_ends(edge, device) for edge in crossing))
            for device, key in keys.items()
        }

    def _more_of(
        self,
        item: Compute,
        inputs_of: Callable[[Part, Device], Hashable],
        found: Mapping[tuple[int, Device], Part],
    ) -> Iterator[Hashable]:
        """What may differ between devices that have one part of an op each."""
        given, part, device = self._given, item.part, item.device
        if given.has_groups:
            yield given.group(item)
        if part.op.reads_batch:
            yield inputs_of(part, device)
        if part.op.kind == ADDS_BIAS:
            # Whether the product on the device can add it.
            producer = given.plan.graph.producer.get(part.op.inputs[0])
            product = None if producer is None else found.get((producer.index, device))
            yield product is not None and adds_whole_product(part, product)

    def _built(self, device: Device) -> tuple[Step, ...]:
        """The steps of a device."""
        given, builder = self._given, _Builder(self._given.stage)
        on_device: dict[Op, list[Part]] = {}
        for item in self._rows[device]:
            if not isinstance(item, Compute):
                builder.close()
                builder.steps.append(item)
                continue
            part = item.part
            on_device.setdefault(part.op, []).append(part)
            if part.op in given.ends and not builder.is_at(part.op):
                builder.close()
            builder.add(part, given.group(item))
        builder.close()
        marks = _marks(given, device, builder.steps)
        return tuple(
            replace(
                step,
                products=products_of(given.plan.graph, given.edges, step.parts, on_device),
                has_backward=(mark := next(marks))[0],
                is_left_out=mark[1],
            )
            if isinstance(step, Segment) else step
            for step in builder.steps
        )  # fmt: skip

    def _moved(self, steps: Sequence[Step], device: Device) -> Iterator[Step]:
        """The steps of another device with the parts of this one."""
        row = iter(self._rows[device])
        for step in steps:
            if not isinstance(step, Segment):
                yield next(row)
                continue
            own = {
                part: item.part for part, item in zip(step.parts, row, strict=False)
                if isinstance(item, Compute)
            }  # fmt: skip
            products = {own[part]: own[product] for part, product in step.products.items()}
            yield replace(step, parts=tuple(own.values()), products=products)


def _ends(edge: Edge, device: Device) -> tuple[bool, bool]:
    """Whether a device writes an edge, and whether it reads it."""
    return device in edge.src.shards, device in edge.dst.shards


# --- segments -----------------------------------------------------------------------------------


@dataclass
class _Builder:
    """The steps of one device so far, and the parts of the segment that is still open."""

    stage: int
    steps: list[Step] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    group: tuple[int, int, int] = (0, 0, 0)
    num_segments: int = 0

    def add(self, part: Part, group: tuple[int, int, int]) -> None:
        if group != self.group:
            self.close()
        self.group = group
        self.parts.append(part)

    def is_at(self, op: Op) -> bool:
        """Whether the last part is of the same op."""
        return bool(self.parts) and self.parts[-1].op == op

    def close(self) -> None:
        if not self.parts:
            return
        name = segment_name(self.stage, self.num_segments)
        recompute, swap, region = self.group
        self.steps.append(Segment(name, tuple(self.parts), recompute > 0, swap > 0, region))
        self.parts, self.num_segments = [], self.num_segments + 1


# --- who reads what a segment makes -------------------------------------------------------------

_Reads = Mapping[PTensor, Sequence[tuple[Step | None, rv.Box]]]
"""For each tensor made on a device, the readers of its boxes there; None is another stage."""


def _marks(given: StageItems, device: Device, steps: Sequence[Step]) -> Iterator[tuple[bool, bool]]:
    """Whether each segment has a backward, and whether the recomputation of its region leaves it
    out.

    Both follow from the readers of its results.
    """
    reads = _reads(given, device, steps)
    for step in steps:
        if not isinstance(step, Segment):
            continue
        has_backward, is_read_again = False, False
        for part in step.parts:
            for tensor, (made, _) in zip(part.op.outputs, part.form.outputs, strict=True):
                for reader, box in reads.get(tensor, ()):
                    if reader is not step and box.overlaps(made):
                        has_backward |= tensor.requires_grad
                        is_read_again |= reader is not None and given.region(reader) == step.region
        yield has_backward, step.region > 0 and step.recompute and not is_read_again


def _reads(given: StageItems, device: Device, steps: Sequence[Step]) -> _Reads:
    found: dict[PTensor, list[tuple[Step | None, rv.Box]]] = {}

    def leave(edge: Edge, reader: Step | None) -> None:
        # An edge with a parent forwards the result of that parent, not of a segment here.
        if device in edge.src.shards and edge.parent is None:
            found.setdefault(edge.tensor, []).append((reader, edge.src.shards[device].box))

    for step in steps:
        if isinstance(step, Segment):
            for part in step.parts:
                boxes = part.form.inputs
                for position, tensor in given.edges.read_directly(part.op):
                    found.setdefault(tensor, []).append((step, boxes[position][0]))
        elif isinstance(step, MoveStep):
            leave(step.edge, step)
    for edge in given.edges.leaving(given.stage):
        leave(edge, None)
    for tensor in (*given.read_outside, *given.plan.graph.ends):
        found.setdefault(tensor, []).append((None, tensor.box))
    return found
