"""Pricing: the space of a captured model on a mesh of devices, from the cost functions alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, prod

import numpy as np

import rvdcomm as rv
from superscaler_core.cost import CostModel, DeviceProfile, StageCost, peak_bytes, product_of
from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import Blocks, find_blocks
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Device
from superscaler_core.planners.space.choices import Choice, choices_of
from superscaler_core.planners.space.groups import OpGroup, groups_of
from superscaler_core.planners.space.priced import PricedSpace
from superscaler_core.planners.space.space import Array, Space, SpaceEdge, SpaceNode


def price_space(
    graph: Graph,
    devices: Sequence[Device],
    topology: rv.Topology,
    profile: DeviceProfile,
    *,
    mesh: Sequence[int] | None = None,
    microbatches: int = 1,
    in_flight: int = 1,
    memory_bytes: float | None = None,
    optimizer: str = "adam",
    master_dtype: str | None = None,
    ops: Sequence[Op] | None = None,
    blocks: Blocks | None = None,
    same_blocks: bool = True,
) -> PricedSpace:
    """The space of a model: its groups of ops, each with all cuts on a mesh, and what they cost.

    Args:
        graph: of one microbatch, which all devices share.
        devices: all of the topology, or some.
        topology, profile: as in ``CostModel``.
        mesh: sizes of the axes, the last one innermost; hosts times devices of a host if None.
        microbatches: of a step.
        in_flight: microbatches between forward and backward at a time.
        memory_bytes: of a device; that of the profile if None.
        optimizer, master_dtype: as in ``compile``.
        ops: consecutive ops of the graph, such as a stage; all if None.
        blocks: of the graph; found by its structure if None.
        same_blocks: whether blocks whose ops are alike take the same decisions.

    Raises:
        PlanError: the mesh has another number of devices.
    """
    chosen = tuple(_mesh_of(devices, topology) if mesh is None else mesh)
    if prod(chosen) != len(devices):
        raise PlanError(
            f"a mesh of {' x '.join(map(str, chosen))} has {prod(chosen)} devices, but "
            f"{len(devices)} were given."
        )
    costs = CostModel(graph, profile, topology, optimizer=optimizer, master_dtype=master_dtype)
    made = _Pricing(
        costs, blocks or find_blocks(graph), tuple(graph.ops if ops is None else ops),
        tuple(devices), chosen, microbatches, same_blocks,
    )  # fmt: skip
    space = Space(
        made.nodes,
        made.edges,
        microbatches,
        in_flight,
        profile.memory_bytes if memory_bytes is None else memory_bytes,
    )
    return PricedSpace(space, costs, made.devices, made.groups, made.choices)


def _mesh_of(devices: Sequence[Device], topology: rv.Topology) -> tuple[int, ...]:
    """Hosts times devices of a host, or all devices if these are no whole hosts."""
    if len(topology.levels) > 1:
        per_host = len(topology.levels[1].groups[0])
        if len(devices) > per_host and len(devices) % per_host == 0:
            return len(devices) // per_host, per_host
    return (len(devices),)


@dataclass(frozen=True, eq=False)
class _Pricing:
    """Costs of a model's groups; the arguments are those of ``price_space``."""

    costs: CostModel
    blocks: Blocks
    ops: tuple[Op, ...]
    devices: tuple[Device, ...]
    mesh: tuple[int, ...]
    microbatches: int
    same_blocks: bool

    # --- groups ---------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> tuple[tuple[OpGroup, ...], ...]:
        """The groups of every node: one, or one of each of the blocks that are alike."""
        inside = set(self.ops)
        nodes: dict[object, list[OpGroup]] = {}
        for number, ops in enumerate(self.blocks.groups):
            groups = groups_of(self.costs.graph, [op for op in ops if op in inside])
            # Alike are blocks of equal ops in equal groups.
            run = tuple(tuple((op.index - ops[0].index, op.form) for op in g) for g in groups)
            for place, group in enumerate(groups):
                key = (run if self.same_blocks else number), place
                nodes.setdefault(key, []).append(group)
        return tuple(map(tuple, nodes.values()))

    @cached_property
    def places(self) -> Mapping[Op, tuple[int, int, int]]:
        """Of every op its node, the number of its group there, and its place in the group."""
        return {
            op: (node, number, place)
            for node, groups in enumerate(self.groups)
            for number, group in enumerate(groups)
            for place, op in enumerate(group)
        }

    # --- nodes ----------------------------------------------------------------------------------

    @cached_property
    def _priced(self) -> tuple[tuple[tuple[Choice, ...], tuple[StageCost, ...]], ...]:
        """The choices of every node that can be, with their costs; equal groups are priced once."""
        found: dict[object, tuple[tuple[Choice, ...], tuple[StageCost, ...]]] = {}
        priced = []
        for group, *_ in self.groups:
            key = tuple(op.form for op in group), self._wiring(group)
            if key not in found:
                pairs = []
                for choice in choices_of(self.blocks.dims, group, self.devices, self.mesh):
                    splits = dict(zip(group, choice.splits, strict=True))
                    try:
                        pairs.append((choice, self.costs.stage_cost(group, self.devices, splits)))
                    except PlanError:
                        continue
                found[key] = tuple(c for c, _ in pairs), tuple(c for _, c in pairs)
            priced.append(found[key])
        return tuple(priced)

    def _wiring(self, group: OpGroup) -> object:
        """Which inputs of a group are the same tensors, and which results are read outside."""
        numbers: dict[PTensor, int] = {}
        inputs = tuple(numbers.setdefault(t, len(numbers)) for op in group for t in op.inputs)
        outputs = tuple(
            (
                numbers.get(t, -1),
                any(r not in group for r, _ in self.costs.graph.readers.get(t, ())),
            )
            for op in group
            for t in op.outputs
        )
        classes: dict[object, int] = {}
        dims = self.blocks.dims
        loops = tuple(
            classes.setdefault(dims.of_loop(op, loop), len(classes))
            for op in group
            for loop in op.sizes
        )
        return inputs, outputs, loops

    @property
    def choices(self) -> tuple[tuple[Choice, ...], ...]:
        """The choices of every node."""
        return tuple(choices for choices, _ in self._priced)

    @cached_property
    def nodes(self) -> tuple[SpaceNode, ...]:
        """All nodes."""
        found = []
        for number, (groups, (choices, stages)) in enumerate(
            zip(self.groups, self._priced, strict=True)
        ):
            # Every node has a segment in its own stage cost; a step has one, and one a call.
            extra = self.costs.profile.segment_secs * (1 if number else 1 - 1 / len(groups))
            bytes_of = [_bytes(stage) for stage in stages]
            biases = [self._bias_secs(groups[0], choice) for choice in choices]
            found.append(
                SpaceNode.of(
                    groups[0][0].name,
                    [choice.name for choice in choices],
                    forward_secs=[
                        stage.forward_secs - extra - bias
                        for stage, bias in zip(stages, biases, strict=True)
                    ],
                    backward_secs=[s.backward_secs - extra for s in stages],
                    sync_secs=[self._sync_secs(s) for s in stages],
                    resting_bytes=[resting for resting, _, _ in bytes_of],
                    kept_bytes=[kept for _, kept, _ in bytes_of],
                    work_bytes=[work for _, _, work in bytes_of],
                    count=len(groups),
                )
            )
        return tuple(found)

    def _bias_secs(self, group: OpGroup, choice: Choice) -> float:
        """The forward of ops whose bias a product of another group may add; edges have it."""
        pairs = zip(group, choice.splits, strict=True)
        products = ((op, split, product_of(self.costs.graph, op)) for op, split in pairs)
        return sum(
            self.costs.op_cost(op, split).forward_secs
            for op, split, made in products
            if made in self.places and made not in group
        )

    def _sync_secs(self, stage: StageCost) -> float:
        """Time once a step, without the latency of calls, which all weights share."""
        calls = sum(call.bytes_secs for call in (*stage.fetch, *stage.reduce))
        return calls + stage.update_secs + (self.microbatches - 1) * stage.accumulate_secs

    # --- edges ----------------------------------------------------------------------------------

    @cached_property
    def edges(self) -> tuple[SpaceEdge, ...]:
        """All edges; several between two nodes that occur equally often are one."""
        found: dict[tuple[int, int, int], tuple[Array, Array]] = {}
        priced: dict[object, tuple[Array, Array]] = {}
        for key, reads in self._reads.items():
            src, dst = reads[0].src, reads[0].dst
            if key not in priced:
                priced[key] = self._edge(reads[0])
            forward, backward = priced[key]
            ends = src, dst, len(reads)
            before = found.get(ends, (0.0, 0.0))
            found[ends] = before[0] + forward, before[1] + backward
        return tuple(SpaceEdge(*ends[:2], *secs, ends[2]) for ends, secs in found.items())

    @cached_property
    def _reads(self) -> Mapping[object, Sequence[_Read]]:
        """All reads of another group's result; those that are alike together."""
        found: dict[object, list[_Read]] = {}
        for op in self.ops:
            src, mine, place = self.places[op]
            for number, tensor in enumerate(op.outputs):
                readers: dict[tuple[int, int], dict[Op, int]] = {}
                for reader, _ in self.costs.graph.readers.get(tensor, ()):
                    dst, other, at = self.places.get(reader, (src, mine, 0))
                    if (dst, other) != (src, mine):
                        readers.setdefault((dst, other), {})[reader] = at
                for (dst, _), ops in readers.items():
                    key = src, place, number, dst, tuple(ops.values())
                    found.setdefault(key, []).append(_Read(tensor, src, dst, place, ops))
        return found

    def _edge(self, read: _Read) -> tuple[Array, Array]:
        """Time of a microbatch from one group to another, ``[choice of src, choice of dst]``."""
        writer = self.costs.graph.producer[read.tensor]
        choices = self.choices[read.src], self.choices[read.dst]
        found = np.full((3, *map(len, choices)), inf)
        for (a, before), (b, after) in product(*map(enumerate, choices)):
            splits = {op: after.splits[at] for op, at in read.readers.items()}
            splits[writer] = before.splits[read.place]
            # Partial sums of parts that overlap are no value.
            with suppress(PlanError):
                found[:, a, b] = self.costs.moving_secs(read.tensor, splits)
        return found[0], found[1] + found[2] / self.microbatches


@dataclass(frozen=True, eq=False, slots=True)
class _Read:
    """A result of a group that ops of another group read.

    Attributes:
        tensor: the result.
        src, dst: the nodes of the groups.
        place: of its writer in the group.
        readers: each with its place in its group.
    """

    tensor: PTensor
    src: int
    dst: int
    place: int
    readers: Mapping[Op, int]


def _bytes(stage: StageCost) -> tuple[int, int, int]:
    """What a group holds at rest, for each microbatch in flight, and besides while it runs."""
    memory = stage.memory
    grads, kept = (
        sum(getattr(each, name) for each in memory) for name in ("grads_bytes", "kept_bytes")
    )
    rest = sum(each.resting_bytes for each in memory)
    return rest + grads, kept, max(0, peak_bytes(memory, microbatches=2) - grads - kept)
