"""CostModel: the costs of single choices of a plan, before a plan exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import add

import rvdcomm as rv
from superscaler_core.checks import one_of
from superscaler_core.cost.comm_cost import CommCosts
from superscaler_core.cost.memory_cost import MemoryCost, counted_once
from superscaler_core.cost.move_times import MoveTimes
from superscaler_core.cost.neighbours import Neighbours, product_of
from superscaler_core.cost.op_memory import Kept
from superscaler_core.cost.op_time import OpTimes
from superscaler_core.cost.prices import MAX_PRICES, EdgeCost, OpCost, StageCost, SyncCost
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.cost.split_memory import SplitMemory, weights_of
from superscaler_core.errors import PlanError
from superscaler_core.graph.form import OpForm
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import ITEM_BYTES, PTensor
from superscaler_core.known import remembers
from superscaler_core.materialize.sharding import Sharding, shardings_of
from superscaler_core.materialize.transfer import transfers
from superscaler_core.materialize.weights import shared
from superscaler_core.memory import STATES
from superscaler_core.plan import Device, OpSplit
from superscaler_core.precision import Precision


@dataclass(frozen=True, eq=False)
class CostModel:
    """Costs of the choices for a model on a topology of equal devices.

    A step's time is nearly a sum of independent terms: one per op (by its split), one per edge (by
    the splits at its two ends), and one per parameter and step. The simulator uses the same
    formulas for ops (``OpTimes``) and communication (``CommCosts``).

    Its methods are pure functions with bounded caches; none needs a plan. Splits of ops are
    ``OpSplit`` values that do not refer to an op, so equal layers share splits and costs.

    Laws (tests/superscaler_core/cost): on chains whose devices have equal parts, the sums agree
    with ``simulate`` for a plan with the same choices (see ``stage_cost``). They differ where

    - devices have unequal parts: here an op costs as much as on its slowest device, but in a step,
      a device that is ahead in one op may be behind in the next, and devices wait for each other
      only where they communicate;
    - readers of one partial sum have different splits: a plan sums it once and forwards the sum,
      here every reader pays for a sum;
    - calls share a link between hosts: here each call has the link alone;
    - weights move in several buckets (``Overlap.bucket_bytes``): here a stage's weights are one
    call.

    >>> import superscaler_core as ss
    >>> from superscaler_core.cost import PROFILES
    >>> builder = ss.GraphBuilder("product")
    >>> x = builder.input("x", (8, 1024), "float32")
    >>> w = builder.parameter("w", (512, 1024), "float32")
    >>> (y,) = builder.op("linear", "b k+, n k+ -> b n", [x, w], [((8, 512), "float32")],
    ...     "F.linear({x0}, {x1})", flops=2.0)
    >>> (loss,) = builder.op("sum", "b+ n+ -> ()", [y], [((), "float32")], "{x0}.sum()")
    >>> graph = builder.build(loss)
    >>> costs = CostModel(graph, PROFILES["a100"], rv.Topology.single_host(2, 5e-6, 200e9))
    >>> product, total = graph.ops
    >>> by_rows = OpSplit.grid(product.sizes, [0, 1], [("n", 2)])
    >>> print(f"{1e6 * costs.op_cost(product, by_rows).forward_secs:.2f} us")
    5.78 us
    >>> whole = OpSplit.grid(total.sizes, [0, 1], [(None, 2)])
    >>> print(f"{1e6 * costs.edge_cost(y, by_rows, whole).forward_secs:.2f} us")
    5.04 us

    Attributes:
        graph: the model, for one microbatch.
        profile: the profile of every device.
        topology: a topology with the devices of all splits.
        communication: how tensors move, as in ``simulate``.
        optimizer: one of ``memory.STATES``.
        precision: the dtypes of the training.
    """

    graph: Graph
    profile: DeviceProfile
    topology: rv.Topology
    communication: str = "rvd"
    optimizer: str = "adam"
    precision: Precision = Precision()

    def __post_init__(self) -> None:
        one_of("optimizer", self.optimizer, STATES)
        Precision.of(self.precision)

    @cached_property
    def times(self) -> OpTimes:
        """The times of ops."""
        return OpTimes(self.profile)

    @cached_property
    def comm_costs(self) -> CommCosts:
        """The costs of communication."""
        return CommCosts(self.topology, self.profile.measured)

    @cached_property
    def _move_times(self) -> MoveTimes:
        update_secs = partial(self.times.update_secs, STATES[self.optimizer])
        move_secs, method = self.profile.move_secs, self.communication
        return MoveTimes(self.comm_costs, method, move_secs, update_secs, self.precision)

    # --- ops ------------------------------------------------------------------------------------

    def op_cost(self, op: Op, split: OpSplit) -> OpCost:
        """The time of an op with this split.

        Source: the roofline, or measured times (see ``op_time``).

        Raises:
            PlanError: the profile has no speed for a dtype.
        """
        return self._op_cost(op.form, split)

    @remembers(MAX_PRICES)
    def _op_cost(self, form: OpForm, split: OpSplit) -> OpCost:
        found: dict[Device | None, tuple[float, ...]] = {}
        for placed in split.parts:
            part = form.part(placed.pieces)
            grads = sum(
                part.inputs[i][0].num_elements * ITEM_BYTES[form.inputs[i].dtype]
                for i in form.trained
            )
            now = *self.times.of(part), self.times.sum_secs(grads)
            before = found.get(placed.device, (0.0, 0.0, 0.0))
            found[placed.device] = tuple(map(add, before, now))
        return OpCost(*map(max, zip(*found.values(), strict=True)))

    # --- edges ----------------------------------------------------------------------------------

    def edge_cost(
        self,
        tensor: PTensor,
        from_split: OpSplit,
        to_split: OpSplit,
        *,
        reader: tuple[Op, int] | None = None,
    ) -> EdgeCost:
        """The time of moving an activation from the op that writes it to an op that reads it.

        Args:
            tensor: the activation.
            from_split, to_split: splits of the op that writes it and of the one that reads it.
            reader: the op that reads, and the position of the input; the first reader if None.
                Readers with the same split that read the same boxes share one edge; count it once.

        Source: the rvdcomm plans of the transfers between these ends, as in a program.

        Raises:
            PlanError: no op writes or reads the tensor, or the partial sums do not add up to a
                value.
        """
        writer = self.graph.producer.get(tensor)
        readers = self.graph.readers.get(tensor, ())
        if writer is None or not readers:
            raise PlanError(
                f"edge_cost of {tensor}: it has to be what one op of {self.graph.name} writes and "
                "another reads; of parameters ask sync_cost."
            )
        op, position = reader or readers[0]
        src = shardings_of(writer.form, from_split).outputs[writer.outputs.index(tensor)]
        return self.move_cost(tensor, src, shardings_of(op.form, to_split).inputs[position])

    def move_cost(self, tensor: PTensor, src: Sharding, dst: Sharding) -> EdgeCost:
        """The time of moving an activation from one end to another, and its gradient back."""
        return self._move_times.between(src, dst, tensor.shape, tensor.dtype, tensor.requires_grad)

    # --- parameters -----------------------------------------------------------------------------

    def sync_cost(
        self,
        parameter: PTensor,
        split: OpSplit,
        *,
        storage: OpSplit | None = None,
        reader: tuple[Op, int] | None = None,
        shares: Mapping[Device, int] | None = None,
    ) -> SyncCost:
        """The time of a parameter once per step: fetch, reduction of its gradient, update.

        Args:
            parameter: a parameter of the graph.
            split: split of the op that reads it.
            storage: split of the op that updates it (``plan.update``); if None, every device stores
                what it reads.
            reader: that op, and the position of the input; the first reader if None.
            shares: for an op that reads only weights, the share of the gradient that each device
                computes (``program.edges.shares_of``).

        Raises:
            PlanError: no op reads the parameter.
        """
        readers = self.graph.readers.get(parameter, ())
        if parameter.name not in self.graph.parameters or not readers:
            raise PlanError(
                f"sync_cost of {parameter}: it has to be a parameter of {self.graph.name} that an "
                "op reads; of activations ask edge_cost."
            )
        op, position = reader or readers[0]
        sharding = shardings_of(op.form, split).inputs[position]
        if shares is not None:
            sharding = shared(sharding, shares)
        return self._move_times.sync(self.graph.updates[parameter.name].form, sharding, storage)

    # --- memory ---------------------------------------------------------------------------------

    def memory_cost(
        self,
        op: Op,
        split: OpSplit,
        keep: Kept = Kept.SAVED,
        *,
        storage: Mapping[PTensor, OpSplit] | None = None,
    ) -> MemoryCost:
        """The memory of an op on the device where it is largest.

        If only the op's inputs are kept, or nothing, the backward recomputes it. For a group of ops
        that is recomputed as one, use ``recomputed``.

        Args:
            op, split: an op of the graph, and its split.
            keep: what is kept from its forward to its backward.
            storage: as in ``sync_cost``, by parameter; a missing parameter is stored where it is
                read.

        Source: the part alone, run without data (``op_memory``).
        """
        stored = tuple((storage or {}).get(op.inputs[i]) for i in weights_of(op.form))
        return self._memory.of(op, split, keep, stored)

    @cached_property
    def _memory(self) -> SplitMemory:
        return SplitMemory(self.graph.updates, self.optimizer, self.precision)

    # --- stages ---------------------------------------------------------------------------------

    def stage_cost(
        self,
        ops: Sequence[Op],
        devices: Sequence[Device],
        splits: Mapping[Op, OpSplit],
        *,
        keep: Kept = Kept.SAVED,
        storage: Mapping[PTensor, OpSplit] | None = None,
    ) -> StageCost:
        """The cost of consecutive ops on the same devices.

        It is the sum of their single costs, corrected for effects between neighbours: a bias that
        its product adds in the same call takes no time in the forward; readers of the same shards
        share one edge; replicas of an op that reads only weights compute shares of its gradient;
        every call of communication ends a segment.

        Law (tests/superscaler_core/cost/test_cost_model.py): ``step_secs`` of all ops of a model
        agrees with ``simulate`` for a plan of one stage with these splits, to a relative 1e-9,
        except for the cases listed at ``CostModel`` and for moving the loss to all devices
        (``loss_secs``).

        Args:
            ops: in the graph's order.
            devices: the devices that replace those of the splits, in ascending order.
            splits: the split of every op.
            keep, storage: as in ``memory_cost``.
        """
        mine = {op: splits[op].on(devices) for op in ops}
        near = Neighbours(self.graph, mine)
        forward = backward = accumulate = 0.0
        shares: dict[Op, Mapping[Device, int]] = {}
        for op in ops:
            cost = self.op_cost(op, mine[op])
            forward += 0.0 if near.is_joined(op) else cost.forward_secs
            backward += cost.backward_secs
            accumulate += cost.accumulate_secs
            found = near.shares(op)
            if found is not None:
                shares[op] = found
                continue
            for tensor in op.outputs:
                there, back = self._moving_secs(near, tensor)
                forward, backward = forward + there, backward + back
        segment_secs = self.profile.segment_secs
        stored = storage or {}
        syncs = [sync for op in ops for sync in self._syncs(op, mine[op], shares.get(op), stored)]
        return StageCost(
            forward + segment_secs,
            backward + segment_secs,
            accumulate,
            tuple(call for sync in syncs for call in sync.fetch),
            tuple(call for sync in syncs for call in sync.reduce),
            sum(sync.update_secs for sync in syncs),
            counted_once(ops, [self.memory_cost(op, mine[op], keep, storage=stored) for op in ops]),
        )

    def moving_secs(
        self,
        tensor: PTensor,
        splits: Mapping[Op, OpSplit],
        *,
        storage: Mapping[PTensor, OpSplit] | None = None,
    ) -> tuple[float, float, float]:
        """The time that moving a result to its readers adds to a stage.

        Args:
            tensor: a result.
            splits: splits of the op that writes it, and of ops that read it.
            storage: as in ``memory_cost``.

        Returns:
            Seconds per microbatch, forward and backward: of all moves, of the segments that they
            end, and of an op that adds a bias if the product cannot do so in its own call. Third,
            seconds per step for summing weights' gradients, if replicas compute shares of them.

        Raises:
            PlanError: the partial sums do not add up to a value.
        """
        near = Neighbours(self.graph, splits)
        writer = self.graph.producer[tensor]
        found = near.shares(writer)
        forward, backward = self._moving_secs(near, tensor) if found is None else (0.0, 0.0)
        for op, _ in self.graph.readers[tensor]:
            if op in splits and product_of(self.graph, op) in splits and not near.is_joined(op):
                forward += self.op_cost(op, splits[op]).forward_secs
        if found is None:
            return forward, backward, 0.0
        # The seconds in which gradients move, without latency: of shares, and of all of them.
        summed, whole = (
            sum(call.bytes_secs for sync in syncs for call in sync.reduce)
            for syncs in (
                self._syncs(writer, splits[writer], shares, storage or {})
                for shares in (found, None)
            )
        )
        return forward, backward, summed - whole

    def _syncs(
        self,
        op: Op,
        split: OpSplit,
        shares: Mapping[Device, int] | None,
        storage: Mapping[PTensor, OpSplit],
    ) -> list[SyncCost]:
        return [
            self.sync_cost(of, split, reader=(op, i), shares=shares, storage=storage.get(of))
            for i, of in ((i, op.inputs[i]) for i in weights_of(op.form))
        ]

    def _moving_secs(self, near: Neighbours, tensor: PTensor) -> tuple[float, float]:
        forward = backward = 0.0
        segment_secs = self.profile.segment_secs
        for src, dst in near.ways(tensor):
            edge = self.move_cost(tensor, src, dst)
            forward += edge.forward_secs + segment_secs * (edge.forward_secs > 0)
            backward += edge.backward_secs + segment_secs * (edge.backward_secs > 0)
        return forward, backward

    def loss_secs(self, split: OpSplit) -> float:
        """Time of moving the loss to all devices, once per step, given the split of its op."""
        loss = self.graph.loss
        src = shardings_of(self.graph.producer[loss].form, split).outputs[0]
        dst = Sharding.everyone(split.devices, loss.shape)
        return self._move_times.secs(transfers(src, dst, loss.shape, loss.dtype))
