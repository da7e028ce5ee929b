"""Edges: data dependencies between parts that do not fit, or lie in different stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count

import rvdcomm as rv
from superscaler_core.graph.form import OpForm, PartForm
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import ACTIVATION, PARAMETER, PTensor
from superscaler_core.plan import Device, OpSplit, Plan
from superscaler_core.program.side import MAX_SIDES, Side, sides_of
from superscaler_core.program.transfer import Transfer, transfers

Reader = tuple[Op, int]
"""An op, and which of its inputs the tensor is."""


@dataclass(frozen=True, eq=False)
class Edge:
    """A tensor on its way from those who write it to some of its readers, and its gradient back.

    Attributes:
        index: unique in the plan.
        tensor: what moves.
        src_stage, dst_stage: where it is written and read.
        src, dst: both ends.
        readers: the ops that read it at the dst end.
        parent: the edge whose readers pass it on; None if it comes from those who compute it.
        recycles: the input that it fills in the next turn of its microbatch; None if it is read in
            the turn in which it is written.
    """

    index: int
    tensor: PTensor
    src_stage: int
    dst_stage: int
    src: Side
    dst: Side
    readers: tuple[Reader, ...]
    parent: Edge | None = None
    recycles: PTensor | None = None

    @property
    def name(self) -> str:
        """For people and for generated code."""
        return f"e{self.index}"

    @cached_property
    def forward(self) -> tuple[Transfer, ...]:
        """What takes the value there."""
        return transfers(self.src, self.dst.whole, self.tensor.shape, self.tensor.dtype)

    @cached_property
    def backward(self) -> tuple[Transfer, ...]:
        """What takes the gradient back; nothing if there is none."""
        if not self.has_grad:
            return ()
        return transfers(self.dst, self.src.whole, self.tensor.shape, self.tensor.dtype)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All that write or read."""
        return tuple(sorted({*self.src.shards, *self.dst.shards}))

    @property
    def has_grad(self) -> bool:
        """Whether a gradient comes back: turns before the last have none."""
        return self.tensor.requires_grad and self.recycles is None

    @property
    def crosses(self) -> bool:
        """Whether it leads to another stage, or to another turn."""
        return self.src_stage != self.dst_stage or self.recycles is not None


@dataclass(frozen=True, eq=False)
class Edges:
    """How every reader of every activation gets it."""

    all: tuple[Edge, ...]
    of_reader: Mapping[Reader, Edge]
    """The edge that a reader reads from; one that is not there reads from parts on its device."""
    deferred: Mapping[Op, Mapping[Device, int]]
    """Ops whose replicas pass on a share of the gradient each (``_shares``); which share."""

    @classmethod
    def of(cls, edges: Iterable[Edge], deferred: Mapping[Op, Mapping[Device, int]]) -> Edges:
        """These edges; what they do not bring is read from parts on the same device."""
        given = tuple(edges)
        return cls(given, {reader: e for e in given for reader in e.readers}, deferred)

    def read_directly(self, op: Op) -> tuple[tuple[int, PTensor], ...]:
        """The inputs that an op reads from parts on its device, with their positions."""
        found = self._direct.get(op)
        if found is None:
            inputs = enumerate(op.inputs)
            found = self._direct[op] = tuple(
                (i, t) for i, t in inputs if t.kind == ACTIVATION and (op, i) not in self.of_reader
            )
        return found

    @cached_property
    def _direct(self) -> dict[Op, tuple[tuple[int, PTensor], ...]]:
        return {}

    @property
    def stage_graph(self) -> tuple[tuple[int, int], ...]:
        """Pairs of stages of which one reads what the other makes, in the same turn."""
        inside = (edge for edge in self.all if edge.crosses and edge.recycles is None)
        return tuple(sorted({(edge.src_stage, edge.dst_stage) for edge in inside}))

    def of_stage(self, stage: int) -> tuple[Edge, ...]:
        """Edges inside a stage."""
        return tuple(e for e in self._from.get(stage, ()) if not e.crosses)

    def leaving(self, stage: int) -> tuple[Edge, ...]:
        """Edges from a stage to others, or to another turn."""
        return tuple(e for e in self._from.get(stage, ()) if e.crosses)

    @cached_property
    def _from(self) -> Mapping[int, list[Edge]]:
        found: dict[int, list[Edge]] = {}
        for edge in self.all:
            found.setdefault(edge.src_stage, []).append(edge)
        return found


def find_edges(plan: Plan) -> Edges:
    """Compare all readers of all activations with those who write them."""
    stage_of = stages_by_op(plan)
    made: list[Edge] = []
    deferred: dict[Op, Mapping[Device, int]] = {}
    for tensor, op in plan.graph.producer.items():
        new, shares = edges_of(plan, tensor, stage_of, len(made))
        made += new
        if shares is not None:
            deferred[op] = shares
    made += recycling_edges(plan, stage_of, len(made))
    return Edges.of(made, deferred)


def stages_by_op(plan: Plan) -> Mapping[int, int]:
    """The number of the stage of every op, by its index."""
    return {op.index: stage.index for stage in plan.stages for op in stage.ops}


def edges_of(
    plan: Plan, tensor: PTensor, stage_of: Mapping[int, int], first: int
) -> tuple[list[Edge], Mapping[Device, int] | None]:
    """The edges of one activation, or the shares of its gradient that spare them.

    Args:
        plan: the decisions.
        tensor: what one op writes.
        stage_of: as of ``stages_by_op``.
        first: number of the first edge.
    """
    op = plan.graph.producer[tensor]
    readers = plan.graph.readers.get(tensor, ())
    if not readers:
        return [], None
    groups: dict[tuple[int, Side], list[Reader]] = {}
    for reader in readers:
        end = stage_of[reader[0].index], input_side(plan, *reader)
        groups.setdefault(end, []).append(reader)
    shares = _shares(plan, op, groups, stage_of[op.index])
    if shares is not None:
        return [], shares
    src = output_side(plan, op, op.outputs.index(tensor))
    return _edges_of(tensor, stage_of[op.index], src, groups, first), None


def recycling_edges(plan: Plan, stage_of: Mapping[int, int], first: int) -> Iterator[Edge]:
    """Edges, numbered from ``first``, that lead from a turn of a microbatch to the next."""
    numbers = count(first)
    for given, tensor in plan.graph.recycled.items():
        op = plan.graph.producer[tensor]
        src = output_side(plan, op, op.outputs.index(tensor))
        groups: dict[tuple[int, Side], list[Reader]] = {}
        for reader in plan.graph.readers.get(given, ()):
            end = stage_of[reader[0].index], input_side(plan, *reader)
            groups.setdefault(end, []).append(reader)
        for (stage, dst), readers in groups.items():
            yield Edge(
                next(numbers), tensor, stage_of[op.index], stage, src, dst, tuple(readers),
                recycles=given,
            )  # fmt: skip


def _shares(
    plan: Plan, op: Op, groups: Iterable[tuple[int, Side]], stage: int
) -> Mapping[Device, int] | None:
    """Which share of the gradient each replica of an op gets, if that is all it needs."""
    if not reads_weights_alone(op) or any(dst_stage != stage for dst_stage, _ in groups):
        return None
    return shares_of(op.form, plan.op_split(op), Side.joined(side for _, side in groups))


def reads_weights_alone(op: Op) -> bool:
    """Whether nothing but weights gives an op a gradient to pass on, as a table of positions."""
    has_weights_alone = all(t.kind == PARAMETER for t in op.inputs if t.requires_grad)
    return bool(op.parameters) and has_weights_alone and len(op.outputs) == 1


@lru_cache(maxsize=MAX_SIDES)
def shares_of(form: OpForm, split: OpSplit, reading: Side) -> Mapping[Device, int] | None:
    """Which share of the gradient each replica gets of an op that reads weights alone.

    The backward of an op is linear: the replicas of one that reads weights alone, such as a table
    of positions, may each take the gradient that is on their device, and what they make of it is
    summed with the gradients of the weights, once a step, not once a microbatch.

    Args:
        form: of the op.
        split: its parts.
        reading: all that read its output, on the same devices.
    """
    (src,) = sides_of(form, split).outputs
    if reading.shards.keys() != src.shards.keys() or not _holds(src, reading):
        return None
    # By the pieces of the op, if it is cut: what its replicas on different devices read of them.
    kinds: dict[frozenset[PartForm], list[frozenset[tuple[rv.Box, int]]]] = {}
    shares: dict[Device, int] = {}
    for device, pieces in _pieces_on(form, split).items():
        held = reading.shards[device].held
        known = kinds.setdefault(pieces, [])
        known += [held] if held not in known else []
        shares[device] = known.index(held)
    if not _are_apart(kinds) or sum(len(h) for k in kinds.values() for h in k) != len(reading.held):
        return None
    return shares


def _pieces_on(form: OpForm, split: OpSplit) -> Mapping[Device, frozenset[PartForm]]:
    """What every device does of an op, which replica aside."""
    found: dict[Device, set[PartForm]] = {}
    for part in split.parts:
        if part.device is not None:
            found.setdefault(part.device, set()).add(form.part(part.pieces))
    return {device: frozenset(parts) for device, parts in found.items()}


def _are_apart(kinds: Iterable[frozenset[PartForm]]) -> bool:
    """Whether devices do the same pieces of an op or none in common, with nothing summed."""
    parts = [part for pieces in kinds for part in pieces]
    is_summed = any(
        summand
        for part in parts
        for of, (_, summand) in zip(
            (*part.op.inputs, *part.op.outputs), (*part.inputs, *part.outputs), strict=True
        )
        if of.requires_grad
    )
    return not is_summed and len(set(parts)) == len(parts)


def _edges_of(
    tensor: PTensor,
    stage: int,
    src: Side,
    groups: Mapping[tuple[int, Side], list[Reader]],
    first: int,
) -> list[Edge]:
    """The edges of one tensor, numbered from ``first``."""
    left = {
        end: readers
        for end, readers in groups.items()
        if end[0] != stage or not is_inline(src, end[1], tensor.requires_grad)
    }
    made: list[Edge] = []
    parent = None
    if src.num_summands > 1 and len(left) > 1:
        # It is summed once, for the reader that wants it simplest; the others start from there.
        whole = min(left, key=lambda end: (end[0] != stage, end[1].num_summands, end[0]))
        side = whole[1].whole
        direct = left.pop((whole[0], side), [])
        parent = Edge(first, tensor, stage, whole[0], src, side, tuple(direct))
        made.append(parent)
        src, stage = side, whole[0]
    for (dst_stage, dst), readers in left.items():
        made.append(
            Edge(first + len(made), tensor, stage, dst_stage, src, dst, tuple(readers), parent)
        )
    return made


def output_side(plan: Plan, op: Op, position: int) -> Side:
    """The end at which an op writes its output ``position``."""
    return sides_of(op.form, plan.op_split(op)).outputs[position]


def input_side(plan: Plan, op: Op, position: int) -> Side:
    """The end at which an op reads its input ``position``."""
    return sides_of(op.form, plan.op_split(op)).inputs[position]


@lru_cache(maxsize=MAX_SIDES)
def is_inline(src: Side, dst: Side, has_grad: bool) -> bool:
    """Whether every device can compute what it reads, and its gradients, from what it wrote.

    Values have to be there with all summands, and so have the gradients of what was written.
    Several summands on one device are added once, for all who read the sum, by an edge.
    """
    if any(len(shard.summands) > 1 for shard in src.shards.values()):
        return False
    if src.num_summands == dst.num_summands == 1 and src.views == dst.views:
        return True
    return _holds(src, dst) and (not has_grad or _holds(dst, src))


def _holds(there: Side, wanted: Side) -> bool:
    """Whether every device holds all summands of what is ``wanted`` of it."""
    for device, shard in wanted.shards.items():
        held = there.shards[device].held if device in there.shards else frozenset()
        for want in {box for box, _ in shard.held}:
            if any(pair not in held and pair[0].intersect(want) for pair in there.held):
                return False
    return True
