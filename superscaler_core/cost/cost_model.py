"""CostModel: what the choices of a plan cost, one by one, before there is a plan.

A step's time is nearly a sum: of every op by how it is split, of every edge by how its two ends
are, and of every parameter once a step. The simulator reads the same formulas for ops
(``OpTimes``) and for communication (``Wires``), so on chains the sums are what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import rvdcomm as rv
from superscaler_core.cost.memory_cost import MemoryCost, counted_once, recomputed
from superscaler_core.cost.op_memory import Kept, op_memory
from superscaler_core.cost.op_time import OpTimes
from superscaler_core.cost.prices import EdgeCost, OpCost, StageCost, SyncCost
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.cost.wire import CallSecs, Wires
from superscaler_core.errors import PlanError
from superscaler_core.graph.form import OpForm
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import ITEM_BYTES, PARAMETER, PTensor
from superscaler_core.memory import STATES
from superscaler_core.plan import Device, OpSplit
from superscaler_core.program.bias import ADDS_BIAS, TAKES_BIAS
from superscaler_core.program.edges import is_inline, reads_weights_alone, shares_of
from superscaler_core.program.side import Side, sides_of
from superscaler_core.program.transfer import Transfer, transfers
from superscaler_core.program.weights import shared

MAX_PRICES = 1 << 18
"""Answers that a model remembers of each kind. Ops of a form share them, and so do edges: of a
GPT with a hundred ways to split every op, all pairs of neighbours are some 100,000."""


@dataclass(frozen=True, eq=False)
class CostModel:
    """Prices of the choices for a model on a topology of equal devices.

    Its methods are pure functions with bounded caches; none needs a plan. Splits of ops are
    ``OpSplit`` values, which know no op: layers that are alike share them, and their prices.

    Laws (tests/superscaler_core/cost): on chains whose devices have equal parts, the sums are what
    ``simulate`` finds for a plan with the same choices, as ``stage_cost`` says. They are not where

    - devices have unequal parts: an op costs what its slowest device takes, and devices that are
      ahead in one op and behind in the next only wait for each other where they communicate;
    - readers of one partial sum have different splits: a plan sums it once and passes it on, here
      every reader pays for the sum;
    - calls meet on a link that hosts share: here each has it alone;
    - weights move in several buckets (``Overlap.bucket_bytes``): here a stage's move in one call.

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
    5.67 us
    >>> whole = OpSplit.grid(total.sizes, [0, 1], [(None, 2)])
    >>> print(f"{1e6 * costs.edge_cost(y, by_rows, whole).forward_secs:.2f} us")
    5.04 us

    Attributes:
        graph: the model, one microbatch.
        profile: of every device.
        topology: that holds the devices of all splits.
        communication: how tensors move, as of ``simulate``.
        optimizer: one of ``memory.STATES``.
        master_dtype: of stored parameters; the model's if None.
    """

    graph: Graph
    profile: DeviceProfile
    topology: rv.Topology
    communication: str = "rvd"
    optimizer: str = "adam"
    master_dtype: str | None = None

    @cached_property
    def times(self) -> OpTimes:
        """Of ops."""
        return OpTimes(self.profile)

    @cached_property
    def wires(self) -> Wires:
        """Of communication."""
        return Wires(self.topology)

    # --- ops ------------------------------------------------------------------------------------

    def op_cost(self, op: Op, split: OpSplit) -> OpCost:
        """What an op takes that is split so.

        Source: the roofline, or measured times, as of ``op_time``.

        Raises:
            PlanError: the profile says nothing of a dtype.
        """
        return self._op_costs(op.form, split)

    @cached_property
    def _op_costs(self) -> Callable[[OpForm, OpSplit], OpCost]:
        return lru_cache(maxsize=MAX_PRICES)(self._op_cost)

    def _op_cost(self, form: OpForm, split: OpSplit) -> OpCost:
        found: dict[Device | None, tuple[float, float, float]] = {}
        for placed in split.parts:
            part = form.part(placed.pieces)
            before = found.get(placed.device, (0.0, 0.0, 0.0))
            forward, backward = self.times.of(part)
            grads = sum(
                part.inputs[i][0].num_elements * ITEM_BYTES[form.inputs[i].dtype]
                for i in form.trained
            )
            now = forward, backward, self.times.sum_secs(grads)
            found[placed.device] = (before[0] + now[0], before[1] + now[1], before[2] + now[2])
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
        """What an activation takes from the op that writes it to one that reads it.

        Args:
            tensor: what one op writes.
            from_split: of that op.
            to_split: of the op that reads it.
            reader: that op and which of its inputs the tensor is; the first reader if None. Readers
                of one split that read the same boxes share one edge: count it once.

        Source: the rvdcomm plans of the transfers that a program makes between such ends.

        Raises:
            PlanError: no op writes or reads the tensor, or the parts hold sums that do not make a
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
        number = writer.outputs.index(tensor)
        return self._edge_costs(writer.form, number, from_split, op.form, position, to_split)

    @cached_property
    def _edge_costs(self) -> Callable[[OpForm, int, OpSplit, OpForm, int, OpSplit], EdgeCost]:
        return lru_cache(maxsize=MAX_PRICES)(self._edge_cost)

    def _edge_cost(
        self,
        writer: OpForm,
        number: int,
        from_split: OpSplit,
        reader: OpForm,
        position: int,
        to_split: OpSplit,
    ) -> EdgeCost:
        src = sides_of(writer, from_split).outputs[number]
        dst = sides_of(reader, to_split).inputs[position]
        of = writer.outputs[number]
        return self._by_sides(src, dst, of.shape, of.dtype, of.requires_grad)

    @cached_property
    def _by_sides(self) -> Callable[[Side, Side, tuple[int, ...], str, bool], EdgeCost]:
        return lru_cache(maxsize=MAX_PRICES)(self._by_side)

    def _by_side(
        self, src: Side, dst: Side, shape: tuple[int, ...], dtype: str, has_grad: bool
    ) -> EdgeCost:
        if is_inline(src, dst, has_grad):
            return EdgeCost(0.0, 0.0, 0)
        forward = self._calls(transfers(src, dst.whole, shape, dtype))
        backward = self._calls(transfers(dst, src.whole, shape, dtype)) if has_grad else ()
        move_secs = self.profile.move_secs
        return EdgeCost(
            sum(call.secs + move_secs for call in forward),
            sum(call.secs + move_secs for call in backward),
            len(forward) + len(backward),
        )

    def _calls(self, legs: Iterable[Transfer]) -> tuple[CallSecs, ...]:
        moving = (leg for leg in legs if not leg.is_idle)
        return tuple(self.wires.secs(leg, self.communication) for leg in moving)

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
        """What a parameter takes once a step: fetch, reduction of its gradient, update.

        Args:
            parameter: of the graph.
            split: of the op that reads it.
            storage: of the op that updates it (``plan.update``); every device stores what it reads
                if None.
            reader: that op and which of its inputs the parameter is; the first reader if None.
            shares: of an op that reads weights alone, which share of the gradient each device
                gives back (``program.edges.shares_of``).

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
        side = sides_of(op.form, split).inputs[position]
        if shares is not None:
            side = shared(side, shares)
        return self._sync_costs(self.graph.updates[parameter.name].form, side, storage)

    @cached_property
    def _sync_costs(self) -> Callable[[OpForm, Side, OpSplit | None], SyncCost]:
        return lru_cache(maxsize=MAX_PRICES)(self._sync_cost)

    def _sync_cost(self, update: OpForm, side: Side, storage: OpSplit | None) -> SyncCost:
        (of,) = update.outputs
        stored = Side.joined([side]).resident if storage is None else _written(update, storage)
        is_stored = all(
            device in stored.shards and stored.shards[device].box == shard.box
            for device, shard in side.shards.items()
        )
        fetch = () if is_stored else transfers(stored, side.whole, of.shape, of.dtype)
        if not of.requires_grad:
            return SyncCost(self._calls(fetch), (), 0.0)
        dtype = self.master_dtype or of.dtype
        reduce = transfers(side, stored, of.shape, of.dtype)
        most = max(stored.num_elements.values()) * ITEM_BYTES[dtype]
        return SyncCost(
            self._calls(fetch),
            self._calls(leg.of_dtype(dtype) for leg in reduce),
            self.times.update_secs(STATES[self.optimizer], most),
        )

    # --- memory ---------------------------------------------------------------------------------

    def memory_cost(
        self,
        op: Op,
        split: OpSplit,
        keep: Kept = Kept.SAVED,
        *,
        storage: Mapping[PTensor, OpSplit] | None = None,
    ) -> MemoryCost:
        """What an op takes of the device on which it takes most.

        Of an op whose inputs alone are kept, or nothing, the backward computes it again; of a group
        of several that is recomputed as one ask ``recomputed``.

        Args:
            op: one of the graph.
            split: of it.
            keep: what is there from its forward to its backward.
            storage: as of ``sync_cost``, by parameter; those that are missing are stored where they
                are read.

        Source: the part alone, run without data (``op_memory``).
        """
        stored = tuple((storage or {}).get(op.inputs[i]) for i in _weights(op.form))
        return self._memory_costs(_OpOfForm(op), split, keep, stored)

    @cached_property
    def _memory_costs(
        self,
    ) -> Callable[[_OpOfForm, OpSplit, Kept, tuple[OpSplit | None, ...]], MemoryCost]:
        return lru_cache(maxsize=MAX_PRICES)(self._memory_cost)

    def _memory_cost(
        self, of: _OpOfForm, split: OpSplit, keep: Kept, storage: tuple[OpSplit | None, ...]
    ) -> MemoryCost:
        op, parts = of.op, dict[Device, list[Part]]()
        for placed in split.parts:
            assert placed.device is not None, f"{split}: every part has a device"
            parts.setdefault(placed.device, []).append(Part(op, placed.pieces, placed.replica))
        found = [self._on_device(mine, device, storage) for device, mine in parts.items()]
        most = max(found, key=lambda cost: (cost.resting_bytes + cost.grads_bytes + cost.kept_bytes,
                                            cost.first_backward_bytes))  # fmt: skip
        if keep is Kept.SAVED:
            return most
        again = replace(recomputed([most]), views=most.views)
        return again if keep is Kept.INPUTS else replace(again, kept_bytes=0)

    def _on_device(
        self, parts: Sequence[Part], device: Device, storage: Sequence[OpSplit | None]
    ) -> MemoryCost:
        """Of the parts of one op on one device, one after another."""
        op = parts[0].op
        ran = [op_memory(part) for part in parts]
        weights = grads = stored_bytes = 0
        for i, where in zip(_weights(op.form), storage, strict=True):
            of = op.inputs[i]
            item_bytes = ITEM_BYTES[self.master_dtype or of.dtype]
            read = Side.of((0, *part.form.inputs[i]) for part in parts).num_elements[0]
            mine = read if where is None else self._stored(of, where).get(device, 0)
            is_own = mine == read and item_bytes == ITEM_BYTES[of.dtype]
            weights += mine * item_bytes + (0 if is_own else read * ITEM_BYTES[of.dtype])
            if of.requires_grad:
                grads += read * item_bytes
                stored_bytes += mine * item_bytes
        kept = sum(each.saved_bytes for each in ran)
        others = [kept - each.saved_bytes for each in ran]
        pairs = list(zip(ran, others, strict=True))
        return MemoryCost(
            weights, grads, STATES[self.optimizer] * stored_bytes, kept,
            sum(each.input_bytes for each in ran),
            max(each.forward_bytes + other for each, other in pairs),
            max(each.backward_bytes + other for each, other in pairs),
            max(each.first_backward_bytes + other for each, other in pairs),
            ran[0].saved if len(ran) == 1 else (),
            ran[0].views if len(ran) == 1 else (None,) * len(op.outputs),
        )  # fmt: skip

    def _stored(self, parameter: PTensor, where: OpSplit) -> Mapping[Device, int]:
        return _written(self.graph.updates[parameter.name].form, where).num_elements

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
        """What ops take that follow each other on the same devices.

        The sum of what they cost one by one, with what only their neighbourhood shows: a bias that
        its product adds in the same call takes no time forward; readers that want the same share
        one edge; replicas of an op that reads weights alone give back shares of its gradient; every
        call of communication ends a segment.

        Law (tests/superscaler_core/cost/test_stage_cost.py): ``step_secs`` of all ops of a model is
        what ``simulate`` finds for a plan of one stage with these splits, relative 1e-9, but for
        what is said at ``CostModel`` and for the loss's way to all devices (``loss_secs``).

        Args:
            ops: in the graph's order.
            devices: in the places of those of the splits, ascending.
            splits: of every op.
            keep: as of ``memory_cost``.
            storage: as of ``memory_cost``.
        """
        mine = {op: splits[op].on(devices) for op in ops}
        forward = backward = accumulate = 0.0
        shares: dict[Op, Mapping[Device, int]] = {}
        num_calls = [0, 0]
        for op in ops:
            cost = self.op_cost(op, mine[op])
            forward += 0.0 if self._is_joined(op, mine) else cost.forward_secs
            backward += cost.backward_secs
            accumulate += cost.accumulate_secs
            found = self._shares(op, mine)
            if found is not None:
                shares[op] = found
                continue
            for edge in self._edges_from(op, mine):
                forward += edge.forward_secs
                backward += edge.backward_secs
                num_calls[0] += edge.forward_secs > 0
                num_calls[1] += edge.backward_secs > 0
        segment_secs = self.profile.segment_secs
        syncs = [
            self.sync_cost(
                op.inputs[i], mine[op], reader=(op, i), shares=shares.get(op),
                storage=(storage or {}).get(op.inputs[i]),
            )
            for op in ops for i in _weights(op.form)
        ]  # fmt: skip
        return StageCost(
            forward + segment_secs * (1 + num_calls[0]),
            backward + segment_secs * (1 + num_calls[1]),
            accumulate,
            tuple(call for sync in syncs for call in sync.fetch),
            tuple(call for sync in syncs for call in sync.reduce),
            sum(sync.update_secs for sync in syncs),
            counted_once(
                ops, [self.memory_cost(op, mine[op], keep, storage=storage) for op in ops]
            ),
        )

    def loss_secs(self, split: OpSplit) -> float:
        """Of the loss on its way to all devices, once a step; by the split of the op it is of."""
        loss = self.graph.loss
        src = sides_of(self.graph.producer[loss].form, split).outputs[0]
        dst = Side.everyone(split.devices, loss.shape)
        calls = self._calls(transfers(src, dst, loss.shape, loss.dtype))
        return sum(call.secs + self.profile.move_secs for call in calls)

    def _edges_from(self, op: Op, splits: Mapping[Op, OpSplit]) -> Iterable[EdgeCost]:
        """What leaves an op for others of the stage, by the end at which it is read."""
        for number, tensor in enumerate(op.outputs):
            src = sides_of(op.form, splits[op]).outputs[number]
            readers = (r for r in self.graph.readers.get(tensor, ()) if r[0] in splits)
            ends = dict.fromkeys(
                sides_of(reader.form, splits[reader]).inputs[i] for reader, i in readers
            )
            for dst in ends:
                yield self._between(src, dst, tensor)

    def _between(self, src: Side, dst: Side, tensor: PTensor) -> EdgeCost:
        return self._by_sides(src, dst, tensor.shape, tensor.dtype, tensor.requires_grad)

    def _shares(self, op: Op, splits: Mapping[Op, OpSplit]) -> Mapping[Device, int] | None:
        if not reads_weights_alone(op):
            return None
        readers = self.graph.readers.get(op.outputs[0], ())
        if any(reader not in splits for reader, _ in readers):
            return None
        ends = dict.fromkeys(
            sides_of(reader.form, splits[reader]).inputs[i] for reader, i in readers
        )
        return shares_of(op.form, splits[op], Side.joined(ends))

    def _is_joined(self, op: Op, splits: Mapping[Op, OpSplit]) -> bool:
        """Whether a product adds the bias of an op in its own call, on every device."""
        product = self.graph.producer.get(op.inputs[0]) if op.inputs else None
        if op.kind != ADDS_BIAS or product is None or product not in splits:
            return False
        if product.kind not in TAKES_BIAS or len(product.inputs) != 2:
            return False
        src = sides_of(product.form, splits[product]).outputs[0]
        dst = sides_of(op.form, splits[op]).inputs[0]
        is_alone = len(self.graph.readers[op.inputs[0]]) == 1
        return is_alone and src.num_summands == 1 and src.views == dst.views


@dataclass(frozen=True, eq=False, slots=True)
class _OpOfForm:
    """An op that stands for all of its form."""

    op: Op

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OpOfForm) and self.op.form == other.op.form

    def __hash__(self) -> int:
        return hash(self.op.form)


def _weights(form: OpForm) -> list[int]:
    return [i for i, of in enumerate(form.inputs) if of.kind == PARAMETER]


def _written(update: OpForm, storage: OpSplit) -> Side:
    """The end at which a parameter is stored."""
    (side,) = sides_of(update, storage).outputs
    return side
