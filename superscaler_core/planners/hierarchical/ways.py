"""Ways: how a run of blocks may run on a submesh, with the time and memory of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import rvdcomm as rv
from superscaler_core.cost import DeviceProfile, MemoryCost, peak_bytes, recomputed
from superscaler_core.graph.blocks import Blocks, find_blocks
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Device, Keep, OpSplit
from superscaler_core.planners.hierarchical.runs import Runs
from superscaler_core.planners.space import Assignment, Space, price_space
from superscaler_core.planners.space.alpa_intra import alpa_intra
from superscaler_core.planners.space.elimination import Core
from superscaler_core.planners.stages.pricing import layers_of

Mesh = tuple[int, ...]

LEVELS = (Keep.EVERYTHING, Keep.BLOCK_INPUTS)

PRICES = (0.1, 1.0, 10.0)
"""Of memory: the time of the fastest way for so many times the memory of a device."""


@dataclass(frozen=True)
class MeshWay:
    """How a stage may run.

    Attributes:
        keep: what its blocks keep.
        secs: forward and backward of a microbatch, with its share of what is done once a step.
        resting_bytes, kept_bytes, work_bytes: as in ``SpaceNode``, of the whole stage.
        assignment: the choice of every node that the stage has, by the node.
    """

    keep: Keep
    secs: float
    resting_bytes: float
    kept_bytes: float
    work_bytes: float
    assignment: Mapping[int, int] = field(repr=False)


@dataclass(frozen=True, eq=False)
class StagePrices:
    """Ways of all stages of a model on one mesh.

    Attributes:
        runs: of its blocks, each with what is around it at the ends.
        blocks: of the model.
        mesh: sizes of the axes.
        in_flight: microbatches that a stage of its size has to hold, or nearly.
    """

    runs: Runs
    blocks: Blocks
    mesh: Mesh
    in_flight: int
    _ways: dict[tuple[int, ...], tuple[MeshWay, ...]] = field(default_factory=dict)
    _layers: dict[object, Mapping[Keep, _Held]] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        """Of the mesh."""
        return len(self.runs.priced.devices)

    def ways(self, first: int, end: int) -> tuple[MeshWay, ...]:
        """The ways of blocks ``first`` to ``end - 1``; runs of equal blocks are solved once."""
        key = self.runs.key(first, end)
        if key not in self._ways:
            self._ways[key] = tuple(self._found(first, end))
        return self._ways[key]

    def splits(self, first: int, end: int, way: MeshWay) -> tuple[tuple[str, OpSplit], ...]:
        """The split of every op of a run, with its name."""
        priced = self.runs.priced
        inside = {op for ops in self.runs.layers[first:end] for op in ops}
        return tuple(
            (op.name, split)
            for node, choice in way.assignment.items()
            for group in priced.groups[node]
            for op, split in zip(group, priced.choices[node][choice].splits, strict=True)
            if op in inside
        )

    def _found(self, first: int, end: int) -> Iterator[MeshWay]:
        space, numbers = self.runs.space(first, end)
        seen = set()
        for assignment in self._assignments(space):
            if assignment in seen:
                continue
            seen.add(assignment)
            chosen = dict(zip(numbers, assignment, strict=True))
            held = [self._layer(layer, chosen) for layer in range(first, end)]
            secs = space.secs(assignment) / space.microbatches
            for keep in LEVELS:
                parts = [each[keep] for each in held]
                yield MeshWay(
                    keep,
                    secs + sum(part.again_secs for part in parts),
                    sum(part.resting_bytes for part in parts),
                    sum(part.kept_bytes for part in parts),
                    max(part.work_bytes for part in parts),
                    chosen,
                )

    def _assignments(self, space: Space) -> Iterator[Assignment]:
        """The fastest one; and where it needs much memory, the fastest at prices of memory.

        Those are the best for some limit of memory each (Everett, 1963).
        """
        fastest = alpa_intra(Space(space.nodes, space.edges, space.microbatches))
        yield fastest.assignment
        for in_flight in (0, self.in_flight):
            held = [
                node.count * (node.resting_bytes + in_flight * node.kept_bytes)
                for node in space.nodes
            ]
            need = sum(size[i] for size, i in zip(held, fastest.assignment, strict=True))
            if 2 * need < space.memory_bytes:
                continue
            for price in PRICES:
                per_byte = price * fastest.secs / space.memory_bytes
                priced = zip(space.node_secs, held, strict=True)
                core = Core.of(space, [secs + per_byte * size for secs, size in priced])
                core.eliminate()
                if not core.node_secs:
                    yield core.assignment({})

    def _layer(self, layer: int, chosen: Mapping[int, int]) -> Mapping[Keep, _Held]:
        """What a block holds, with what is around it, by what it keeps."""
        nodes = self.runs.nodes[:, layer].nonzero()[0].tolist()
        key = tuple((node, chosen[node]) for node in nodes)
        if key not in self._layers:
            self._layers[key] = self._held(layer, chosen)
        return self._layers[key]

    def _held(self, layer: int, chosen: Mapping[int, int]) -> Mapping[Keep, _Held]:
        priced, ops, block = self.runs.priced, self.runs.layers[layer], self.blocks.layers[layer]
        in_layer, in_block = set(ops), set(block)
        splits: dict[Op, OpSplit] = {}
        storage: dict[PTensor, OpSplit] = {}
        for node, choice in chosen.items():
            taken = replace(priced.choices[node][choice], has_pieces=True)
            for group in priced.groups[node]:
                if group[0] in in_layer:
                    splits.update(taken.split_of(group))
                    storage.update(taken.storage(priced.costs.graph, group))
        memory = priced.costs.stage_cost(ops, priced.devices, splits, storage=storage).memory
        again_secs = priced.costs.stage_cost(block, priced.devices, splits).forward_secs
        places = [place for place, op in enumerate(ops) if op in in_block]
        first, end = places[0], places[-1] + 1
        again = (*memory[:first], recomputed(memory[first:end]), *memory[end:])
        return {
            Keep.EVERYTHING: _Held.of(memory, 0.0),
            Keep.BLOCK_INPUTS: _Held.of(again, again_secs),
        }


@dataclass(frozen=True)
class _Held:
    """Memory of a block, and the time to recompute it."""

    resting_bytes: float
    kept_bytes: float
    work_bytes: float
    again_secs: float

    @classmethod
    def of(cls, memory: Sequence[MemoryCost], again_secs: float) -> _Held:
        grads, kept = (
            sum(getattr(each, name) for each in memory) for name in ("grads_bytes", "kept_bytes")
        )
        rest = sum(each.resting_bytes for each in memory) + grads
        work = max(0, peak_bytes(memory, microbatches=2) - grads - kept)
        return cls(rest, kept, work, again_secs)


def price_ways(
    graph: Graph,
    devices: Sequence[Device],
    topology: rv.Topology,
    profile: DeviceProfile,
    meshes: Sequence[Mesh],
    microbatches: int,
    *,
    memory_bytes: float | None = None,
    optimizer: str = "adam",
    master_dtype: str | None = None,
    blocks: Blocks | None = None,
) -> tuple[StagePrices, ...]:
    """The prices of stages on every mesh.

    Args:
        graph: of one microbatch.
        devices: of the cluster; a mesh is priced on the first ones.
        topology, profile, optimizer, master_dtype: as in ``CostModel``.
        meshes: sizes of the axes of each, the last one innermost.
        microbatches: of a step.
        memory_bytes: of a device; that of the profile if None.
        blocks: of the graph; found by its structure if None.
    """
    known = blocks or find_blocks(graph)
    found = []
    for mesh in meshes:
        num = prod(mesh)
        in_flight = min(microbatches, len(known.layers), len(devices) // num)
        priced = price_space(
            graph, devices[:num], topology, profile, mesh=mesh, microbatches=microbatches,
            memory_bytes=memory_bytes, optimizer=optimizer, master_dtype=master_dtype,
            blocks=known,
        )  # fmt: skip
        found.append(StagePrices(Runs(priced, layers_of(known)), known, mesh, in_flight))
    return tuple(found)
