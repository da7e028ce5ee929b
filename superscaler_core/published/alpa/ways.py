"""Ways: how a run of blocks may run as a stage on a submesh, with its time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from superscaler_core.cost import CostModel, MemoryCost, peak_bytes, recomputed
from superscaler_core.graph.blocks import Blocks, find_blocks
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Device, Keep, OpSplit
from superscaler_core.published.alpa.assignments import assignments
from superscaler_core.published.alpa.runs import Run, Runs
from superscaler_core.published.stages.pricing import layers_of
from superscaler_core.space import Space, price_space
from superscaler_core.space.choices import MeshSizes
from superscaler_core.space.elimination import Choices

LEVELS = (Keep.EVERYTHING, Keep.BLOCK_INPUTS)


@dataclass(frozen=True)
class MeshWay:
    """One way to run a stage.

    Attributes:
        keep: what its blocks keep for the backward.
        secs: seconds of forward and backward per microbatch, with its share of what is done once
            per step.
        resting_bytes, kept_bytes, work_bytes: as in ``SpaceNode``, for the whole stage.
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
    """The ways of all possible stages of a model on one mesh.

    Attributes:
        runs: runs of its blocks; ops before and after all blocks belong to the blocks at the ends.
        blocks: the blocks of the model.
        mesh: sizes of the axes.
        in_flight: microbatches that a stage on this mesh keeps at a time, approximately.
        recycle: recycling passes of every microbatch; the times of forwards include them.
    """

    runs: Runs
    blocks: Blocks
    mesh: MeshSizes
    in_flight: int
    recycle: int = 0
    _ways: dict[bytes, tuple[MeshWay, ...]] = field(default_factory=dict)
    _layers: dict[object, Mapping[Keep, _Held]] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return len(self.runs.priced.devices)

    def ways(self, first: int, end: int) -> tuple[MeshWay, ...]:
        """The ways of blocks ``first`` to ``end - 1``."""
        return self.ways_of([(first, end)])[0]

    def ways_of(self, wanted: Sequence[Run]) -> list[tuple[MeshWay, ...]]:
        """The ways of runs of blocks; runs of equal blocks are solved once."""
        keys = self.runs.keys(wanted)
        missing = {key: run for key, run in zip(keys, wanted, strict=True) if key not in self._ways}
        solved = assignments(self.runs, list(missing.values()), self.in_flight)
        for (key, run), found in zip(missing.items(), solved, strict=True):
            self._ways[key] = tuple(self._found(run, found))
        return [self._ways[key] for key in keys]

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

    def _found(self, run: Run, found: Sequence[tuple[float, Choices]]) -> Iterator[MeshWay]:
        """A way for every assignment and every value of ``LEVELS``."""
        (counts,) = self.runs.node_counts([run])
        nodes = counts.nonzero()[0]
        alike = Counter(self._alike[layer] for layer in range(*run))
        for secs, choices in found:
            chosen = dict(zip(nodes.tolist(), choices[nodes].tolist(), strict=True))
            held = [(self._layer(layer, chosen), times) for layer, times in alike.items()]
            for keep in LEVELS:
                parts = [(each[keep], times) for each, times in held]
                yield MeshWay(
                    keep,
                    secs / self.runs.priced.space.microbatches
                    + sum(times * part.again_secs for part, times in parts),
                    sum(times * part.resting_bytes for part, times in parts),
                    sum(times * part.kept_bytes for part, times in parts),
                    max(part.work_bytes for part, _ in parts),
                    chosen,
                )

    @cached_property
    def _alike(self) -> tuple[int, ...]:
        """For every layer the first layer with the same nodes."""
        first: dict[bytes, int] = {}
        nodes = (self.runs.nodes > 0).T
        return tuple(first.setdefault(mine.tobytes(), layer) for layer, mine in enumerate(nodes))

    def _layer(self, layer: int, chosen: Mapping[int, int]) -> Mapping[Keep, _Held]:
        """What a layer holds with the chosen cuts, by what its block keeps."""
        nodes = self.runs.nodes[:, layer].nonzero()[0].tolist()
        key = tuple((node, chosen[node]) for node in nodes)
        if key not in self._layers:
            mine = {node: chosen[node] for node in nodes}
            self._layers[key] = self._held(layer, mine)
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
    costs: CostModel,
    devices: Sequence[Device],
    meshes: Sequence[MeshSizes],
    microbatches: int,
    *,
    memory_bytes: float | None = None,
    blocks: Blocks | None = None,
    recycle: int = 0,
) -> tuple[StagePrices, ...]:
    """The prices of stages on every mesh.

    Args:
        costs: the cost functions of the model, for one microbatch.
        devices: the devices of the cluster; a mesh is priced on the first ones.
        meshes: sizes of the axes of each, the last one innermost.
        microbatches: microbatches in a step.
        memory_bytes: memory of a device; that of the profile if None.
        blocks: the blocks of the graph; found by its structure if None.
        recycle: recycling passes of every microbatch.
    """
    known = blocks or find_blocks(costs.graph)
    found = []
    for mesh in meshes:
        num = prod(mesh)
        in_flight = min(microbatches, len(known.layers), len(devices) // num)
        priced = price_space(
            costs, devices[:num], mesh=mesh, microbatches=microbatches,
            memory_bytes=memory_bytes, blocks=known,
        )  # fmt: skip
        runs = Runs(replace(priced, space=_with_passes(priced.space, recycle)), layers_of(known))
        found.append(StagePrices(runs, known, mesh, in_flight, recycle))
    return tuple(found)


def _with_passes(space: Space, recycle: int) -> Space:
    """The space of a model whose microbatches run forward ``recycle`` times more."""
    times = 1 + recycle
    nodes = (replace(node, forward_secs=times * node.forward_secs) for node in space.nodes)
    edges = (replace(edge, forward_secs=times * edge.forward_secs) for edge in space.edges)
    return replace(space, nodes=tuple(nodes), edges=tuple(edges))
