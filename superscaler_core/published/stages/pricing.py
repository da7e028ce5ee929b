"""Pricing: the stage problem of a captured model on a cluster, from the cost functions alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

from superscaler_core.cost import (
    CostModel,
    MemoryCost,
    StageCost,
    peak_bytes,
    recomputed,
    together,
)
from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import Blocks, find_blocks
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Device, Keep, OpSplit, Plan
from superscaler_core.plans.pieces.tensor_parallel import tensor_parallel
from superscaler_core.published.stages.degrees import Degrees
from superscaler_core.published.stages.problem import Layer, LayerCost, StageProblem

OpGroup = tuple[Op, ...]


def layers_of(blocks: Blocks) -> tuple[OpGroup, ...]:
    """The layers of stages: the blocks; ops before and after all blocks join the ends."""
    ops, starts = blocks.graph.ops, [layer[0].index for layer in blocks.layers]
    ends = [0, *starts[1:], len(ops)]
    return tuple(ops[a:b] for a, b in pairwise(ends))


def price_stages(
    costs: CostModel,
    devices: Sequence[Device],
    microbatches: int,
    *,
    degrees: Sequence[Degrees] | None = None,
    memory_bytes: int | None = None,
    keep: Keep = Keep.EVERYTHING,
    has_changes: bool = False,
    vocabulary: bool = False,
    blocks: Blocks | None = None,
) -> StageProblem:
    """The stage problem of a model, whose layers are its blocks.

    Layers are cut as ``grid_stages`` cuts stages: along the batch, and along inner features. Layers
    with equal ops are priced once.

    Args:
        costs: the cost functions of the model, for one microbatch, which the replicas of a stage
            share; the two lowest levels of the topology give the bandwidths.
        devices: consecutive devices of the topology: whole hosts, or a part of one.
        microbatches: microbatches in a step.
        degrees: the degrees that a stage may have; all powers of two if None.
        memory_bytes: memory of a device; that of the profile if None.
        keep: ``EVERYTHING``, or ``BLOCK_INPUTS`` for layers that keep only what they read.
        has_changes: whether layers of one stage may have different degrees (``Layer.change_secs``).
        vocabulary: as in ``tensor_parallel``.
        blocks: the blocks of the graph; found by its structure if None.

    Raises:
        PlanError: ``keep`` is neither of the two.
    """
    if keep not in (Keep.EVERYTHING, Keep.BLOCK_INPUTS):
        raise PlanError(f"keep={keep}: stages are priced with everything or block_inputs.")
    chosen = tuple(degrees or Degrees.powers_of_two(len(devices)))
    topology = costs.topology
    known = blocks or find_blocks(costs.graph)
    prices = _Prices(costs, known, tuple(devices), chosen, microbatches, keep, vocabulary)
    layers = prices.layers(has_changes)
    inner, *outer = (level.link.bytes_per_sec for level in topology.levels)
    per_host = len(topology.levels[1].groups[0]) if outer else len(devices)
    return StageProblem(
        layers,
        prices.edges,
        chosen,
        tuple(devices),
        per_host,
        inner,
        outer[0] if outer else inner,
        microbatches,
        costs.profile.memory_bytes if memory_bytes is None else memory_bytes,
    )


@dataclass(frozen=True, eq=False)
class _Prices:
    """Costs of a model's layers.

    Attributes:
        costs: the cost functions.
        blocks: the blocks of the model.
        devices: the devices of the problem.
        degrees: the degrees that layers may have.
        microbatches, keep, vocabulary: as in ``price_stages``.
    """

    costs: CostModel
    blocks: Blocks
    devices: tuple[Device, ...]
    degrees: tuple[Degrees, ...]
    microbatches: int
    keep: Keep
    vocabulary: bool

    @property
    def graph(self) -> Graph:
        """The model."""
        return self.costs.graph

    @cached_property
    def groups(self) -> tuple[OpGroup, ...]:
        """The ops of every layer."""
        return layers_of(self.blocks)

    @cached_property
    def owner(self) -> Mapping[Op, int]:
        """The layer of every op."""
        return {op: number for number, ops in enumerate(self.groups) for op in ops}

    @cached_property
    def read(self) -> tuple[Mapping[PTensor, tuple[tuple[Op, int], ...]], ...]:
        """For each layer the results of other layers that it reads, with the ops and positions."""
        found: list[dict[PTensor, tuple[tuple[Op, int], ...]]] = []
        for ops in self.groups:
            mine: dict[PTensor, tuple[tuple[Op, int], ...]] = {}
            for op in ops:
                for position, tensor in enumerate(op.inputs):
                    writer = self.graph.producer.get(tensor)
                    if writer is not None and self.owner[writer] != self.owner[op]:
                        mine[tensor] = (*mine.get(tensor, ()), (op, position))
            found.append(mine)
        return tuple(found)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of layers (writer, reader)."""
        producer = self.graph.producer
        pairs = {
            (self.owner[producer[tensor]], number)
            for number, mine in enumerate(self.read)
            for tensor in mine
        }
        return tuple(sorted(pairs))

    def layers(self, has_changes: bool) -> tuple[Layer, ...]:
        """All layers with their costs."""
        priced: dict[object, Layer] = {}
        results = {tensor for mine in self.read for tensor in mine}
        found = []
        for number, ops in enumerate(self.groups):
            # Layers with equal ops, which read results of equal ops, cost the same.
            writers = [self.graph.producer[tensor].form for tensor in self.read[number]]
            key = tuple(op.form for op in ops), tuple(writers)
            if key not in priced:
                every = range(len(self.degrees))
                none = (0.0,) * len(self.degrees)
                changes = tuple(
                    tuple(self._change_secs(number, a, b) for b in every) if number else none
                    for a in every
                )
                costs = tuple(self._cost(number, each) for each in self.degrees)
                priced[key] = Layer("", costs, change_secs=changes if has_changes else ())
            weights = {tensor for op in ops for tensor in op.parameters}
            made = (tensor for op in ops for tensor in op.outputs if tensor in results)
            found.append(
                replace(
                    priced[key],
                    name=f"{number}: {ops[0].name}",
                    weight_bytes=float(sum(tensor.num_bytes for tensor in weights)),
                    out_bytes=float(sum(tensor.num_bytes for tensor in made)),
                )
            )
        return tuple(found)

    # --- one layer ------------------------------------------------------------------------------

    def _cost(self, number: int, degrees: Degrees) -> LayerCost | None:
        """The cost of a layer; None if it cannot be cut with these degrees."""
        ops = self.groups[number]
        devices = self.devices[: degrees.num_devices]
        try:
            splits = {op: self.split(op, degrees) for op in ops}
            stage = self.costs.stage_cost(ops, devices, splits)
            entering = self._edge_secs(number, degrees, degrees)
        except PlanError:
            return None
        memory, again = self._kept(number, stage)
        grads, kept = (
            sum(getattr(each, name) for each in memory) for name in ("grads_bytes", "kept_bytes")
        )
        rest = sum(each.resting_bytes for each in memory)
        sums = stage.accumulate_secs * (self.microbatches - 1) / self.microbatches
        return LayerCost(
            forward_secs=stage.forward_secs + entering[0],
            backward_secs=stage.backward_secs + entering[1] + again + sums,
            sync_secs=together(stage.fetch) + together(stage.reduce) + stage.update_secs,
            resting_bytes=float(rest + grads),
            kept_bytes=float(kept),
            work_bytes=float(max(0, peak_bytes(memory, microbatches=2) - grads - kept)),
        )

    def _kept(self, number: int, stage: StageCost) -> tuple[tuple[MemoryCost, ...], float]:
        """A layer's memory, and the time to recompute what it does not keep."""
        if self.keep is Keep.EVERYTHING:
            return stage.memory, 0.0
        # Ops around the blocks are not recomputed.
        block = set(self.blocks.layers[number])
        inside = [i for i, op in enumerate(self.groups[number]) if op in block]
        first, end = inside[0], inside[-1] + 1
        again = recomputed(stage.memory[first:end])
        return (*stage.memory[:first], again, *stage.memory[end:]), stage.forward_secs

    def _change_secs(self, number: int, before: int, after: int) -> float:
        """Extra seconds per microbatch if the layers before have other degrees than this layer."""
        a, b = self.degrees[before], self.degrees[after]
        if a == b or a.num_devices != b.num_devices:
            return 0.0
        try:
            return sum(self._edge_secs(number, a, b)) - sum(self._edge_secs(number, b, b))
        except PlanError:
            return 0.0

    def _edge_secs(self, number: int, before: Degrees, after: Degrees) -> tuple[float, float]:
        """Forward and backward seconds of what a layer reads of other layers in the same stage."""
        forward = backward = 0.0
        for tensor, readers in self.read[number].items():
            from_split = self.split(self.graph.producer[tensor], before)
            # Readers with the same split share an edge.
            ends = {self.split(op, after): (op, position) for op, position in readers}
            for to_split, reader in ends.items():
                edge = self.costs.edge_cost(tensor, from_split, to_split, reader=reader)
                forward, backward = forward + edge.forward_secs, backward + edge.backward_secs
        return forward, backward

    @cached_property
    def split(self) -> Callable[[Op, Degrees], OpSplit]:
        """The split of an op with given degrees.

        Raises:
            PlanError: the op cannot be cut with them.
        """
        return cache(self._split)

    def _split(self, op: Op, degrees: Degrees) -> OpSplit:
        plan = Plan(self.graph, self.devices[: degrees.num_devices])
        plan.blocks, plan.dims = self.blocks, self.blocks.dims
        tensor_parallel(plan, [op], plan.devices, degrees.tensor, vocabulary=self.vocabulary)
        return plan.op_split(op)
