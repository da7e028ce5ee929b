"""Pricing: the space of a captured model on a mesh of devices, from the cost functions alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import rvdcomm as rv
from superscaler_core.cost import CostModel
from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import Blocks, find_blocks
from superscaler_core.graph.graph import Op
from superscaler_core.plan import Device, Keep
from superscaler_core.planners.space.edges import edges_of
from superscaler_core.planners.space.nodes import Nodes
from superscaler_core.planners.space.priced import PricedSpace
from superscaler_core.planners.space.space import Space


def price_space(
    costs: CostModel,
    devices: Sequence[Device],
    *,
    mesh: Sequence[int] | None = None,
    microbatches: int = 1,
    in_flight: int = 1,
    memory_bytes: float | None = None,
    ops: Sequence[Op] | None = None,
    blocks: Blocks | None = None,
    same_blocks: bool = True,
    keep: Keep = Keep.EVERYTHING,
    recompute_regions: bool = False,
    pieces: bool = False,
) -> PricedSpace:
    """The space of a model: its groups of ops, all cuts of each on a mesh, and their costs.

    Law (tests/superscaler_core/planners/space): if everything is kept for the backward,
    ``Space.secs`` of an assignment equals ``step_secs`` of ``CostModel.stage_cost`` with the same
    splits, except that

    - the latency of the calls that move weights is left out: all weights share one call each way;
    - a result that several groups read in one layout moves once, but counts for each of them;
    - a weight that several groups read is updated once, but counts for each of them; and replicas
      of an op that reads only weights compute shares of its gradient only where one group reads the
      op's result;
    - a recomputed group repeats bias additions that its first run does in the call of a product,
      and leaves out moves to other groups: a few per cent more or less.

    Apart from the first and the last point, ``Space.secs`` is therefore an upper bound. A tensor
    that two groups save counts twice in memory.

    Blocks with equal ops are priced once, so pricing takes as long as the distinct blocks need.

    Args:
        costs: the cost functions of the model, for one microbatch, which all devices share.
        devices: all devices of the topology, or some.
        mesh: sizes of the axes, the last one innermost; if None, hosts times devices of a host.
        microbatches: microbatches in a step.
        in_flight: microbatches between forward and backward at a time.
        memory_bytes: memory of a device; that of the profile if None.
        ops: consecutive ops of the graph, such as a stage; all if None.
        blocks: the blocks of the graph; found by its structure if None.
        same_blocks: whether blocks with equal ops take the same decisions.
        keep: ``EVERYTHING``, or ``BLOCK_INPUTS`` for blocks that keep only what they read.
        recompute_regions: whether each choice also has a variant with recomputation, in which the
            group keeps only what it reads and runs again before its backward; only for groups of
            consecutive ops.
        pieces: whether each choice that leaves copies of weights also has a variant in which the
            devices that read the same part of a weight store a piece of it each (ZeRO).

    Raises:
        PlanError: the mesh has another number of devices; ``keep`` is neither of the two; or
            ``recompute_regions`` is combined with ``BLOCK_INPUTS``.
    """
    if keep not in (Keep.EVERYTHING, Keep.BLOCK_INPUTS) or (
        recompute_regions and keep is Keep.BLOCK_INPUTS
    ):
        raise PlanError(
            f"keep={keep.value}, recompute_regions={recompute_regions}: a space has everything "
            "kept, or block_inputs, or groups that are recomputed."
        )
    chosen = tuple(_mesh_of(devices, costs.topology) if mesh is None else mesh)
    if prod(chosen) != len(devices):
        raise PlanError(
            f"a mesh of {' x '.join(map(str, chosen))} has {prod(chosen)} devices, but "
            f"{len(devices)} were given."
        )
    graph = costs.graph
    nodes = Nodes(
        costs, blocks or find_blocks(graph), tuple(graph.ops if ops is None else ops),
        tuple(devices), chosen, microbatches, same_blocks, keep, recompute_regions, pieces,
    )  # fmt: skip
    space = Space(
        nodes.priced,
        edges_of(nodes),
        microbatches,
        in_flight,
        costs.profile.memory_bytes if memory_bytes is None else memory_bytes,
    )
    return PricedSpace(space, costs, nodes.devices, nodes.groups, nodes.choices, keep)


def _mesh_of(devices: Sequence[Device], topology: rv.Topology) -> tuple[int, ...]:
    """Hosts times devices of a host; one axis if the devices are not several whole hosts."""
    if len(topology.levels) > 1:
        per_host = len(topology.levels[1].groups[0])
        if len(devices) > per_host and len(devices) % per_host == 0:
            return len(devices) // per_host, per_host
    return (len(devices),)
