"""Edges: data dependencies that need communication, or that connect two stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import count

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.graph.form import OpForm, PartForm
from superscaler_core.graph.graph import Op
from superscaler_core.graph.once import known_of
from superscaler_core.graph.tensor import ACTIVATION, PARAMETER, PTensor
from superscaler_core.grouped import grouped
from superscaler_core.materialize.sharding import (
    MAX_SHARDINGS,
    Sharding,
    bounding,
    shardings_of,
)
from superscaler_core.materialize.transfer import Transfer, transfers
from superscaler_core.plan import Device, OpSplit, Plan

MAX_EDGES = 1 << 14
"""Bound on cached edges of a graph, by tensor and by the splits of its writer and readers."""

Reader = tuple[Op, int]
"""An op, and the position of the input at which it reads the tensor."""


@dataclass(frozen=True, eq=False)
class Edge:
    """A tensor that moves from its writers to some of its readers, and its gradient back.

    Plans of one graph share the edges that are equal in them, so edges are compared by identity.

    Attributes:
        index: the index of the op that computes the tensor.
        number: its number among the edges of the op's results.
        tensor: the tensor that moves.
        src_stage, dst_stage: the stages in which it is written and read.
        src, dst: the two ends.
        readers: the ops that read it at the dst end.
        parent: the edge whose result this edge forwards; None if the src end is the op that
            computes the tensor.
        recycles: the input that the tensor becomes in the next pass of its microbatch; None if it
            is read in the pass in which it is written.
        result: the name under which all devices return the tensor, which is read by no op here;
            "" if it is no result.
    """

    index: int
    number: int
    tensor: PTensor
    src_stage: int
    dst_stage: int
    src: Sharding
    dst: Sharding
    readers: tuple[Reader, ...]
    parent: Edge | None = None
    recycles: PTensor | None = None
    result: str = ""

    @property
    def name(self) -> str:
        """The name in texts and in generated code."""
        return f"e{self.index}" + (f".{self.number}" if self.number else "")

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the order of edges."""
        return self.index, self.number

    @cached_property
    def forward(self) -> tuple[Transfer, ...]:
        """The transfers of the value."""
        return transfers(self.src, self.dst.whole, self.tensor.shape, self.tensor.dtype)

    @cached_property
    def backward(self) -> tuple[Transfer, ...]:
        """The transfers of the gradient; empty if there is none."""
        if not self.has_grad:
            return ()
        return transfers(self.dst, self.src.whole, self.tensor.shape, self.tensor.dtype)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices that write or read the tensor."""
        return tuple(sorted({*self.src.shards, *self.dst.shards}))

    @property
    def has_grad(self) -> bool:
        """Whether a gradient comes back: not in passes before the last, and not of results."""
        return self.tensor.requires_grad and self.recycles is None and not self.result

    @property
    def crosses(self) -> bool:
        """Whether the edge leads to another stage, to another pass, or out of the program."""
        is_away = self.recycles is not None or bool(self.result)
        return self.src_stage != self.dst_stage or is_away


@dataclass(frozen=True, eq=False)
class Edges:
    """All edges of a plan, with the edge from which each reader of an activation reads."""

    all: tuple[Edge, ...]
    of_reader: Mapping[Reader, Edge]
    """The edge that each reader reads from; readers without an edge read from their own device."""
    deferred: Mapping[Op, Mapping[Device, int]]
    """Ops whose replicas each back-propagate only a share of the gradient (see ``shares_of``)."""

    @classmethod
    def of(cls, edges: Iterable[Edge], deferred: Mapping[Op, Mapping[Device, int]]) -> Edges:
        """Collect these edges; readers without an edge read from parts on their own device."""
        given = tuple(edges)
        return cls(given, {reader: e for e in given for reader in e.readers}, deferred)

    def read_directly(self, op: Op) -> tuple[tuple[int, PTensor], ...]:
        """The inputs that an op reads from parts on its own device, with their positions."""
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
        """Pairs of stages (src, dst): dst reads a result of src in the same pass."""
        return tuple(sorted({(e.src_stage, e.dst_stage) for e in self.all if _is_between(e)}))

    @property
    def move_inside_stages(self) -> bool:
        """Whether anything moves inside a stage."""
        inside = (edge for edge in self.all if not edge.crosses)
        return any(not move.is_idle for edge in inside for move in (*edge.forward, *edge.backward))

    def of_stage(self, stage: int) -> tuple[Edge, ...]:
        """The edges inside a stage."""
        return tuple(e for e in self._from.get(stage, ()) if not e.crosses)

    def leaving(self, stage: int) -> tuple[Edge, ...]:
        """The edges from a stage to others, to another pass, or out of the program."""
        return tuple(e for e in self._from.get(stage, ()) if e.crosses)

    def arriving(self, stage: int) -> tuple[Edge, ...]:
        """The edges to a stage from others, or from another pass."""
        return tuple(self._to.get(stage, ()))

    @cached_property
    def _to(self) -> Mapping[int, list[Edge]]:
        found: dict[int, list[Edge]] = {}
        for edge in self.all:
            if edge.crosses and not edge.result:
                found.setdefault(edge.dst_stage, []).append(edge)
        return found

    @cached_property
    def _from(self) -> Mapping[int, list[Edge]]:
        found: dict[int, list[Edge]] = {}
        for edge in self.all:
            found.setdefault(edge.src_stage, []).append(edge)
        return found


def find_edges(plan: Plan) -> Edges:
    """Compare the readers of every activation with its writers, and create the edges needed."""
    stage_of = stages_by_op(plan)
    known = known_of(plan.graph, "edges", MAX_EDGES)
    made: list[Edge] = []
    deferred: dict[Op, Mapping[Device, int]] = {}
    chosen = {op: (stage_of[op.index], plan.op_split(op)) for op in plan.graph.ops}
    readers = plan.graph.readers
    for tensor, op in plan.graph.producer.items():
        key = tensor, chosen[op], *(chosen[reader] for reader, _ in readers.get(tensor, ()))
        new, shares = known.of(key, partial(_edges_of, plan, tensor, stage_of))
        made += new
        if shares is not None:
            deferred[op] = shares
    made += _edges_beyond(plan, stage_of, Counter(edge.tensor for edge in made))
    return Edges.of(made, deferred)


def stages_by_op(plan: Plan) -> Mapping[int, int]:
    """For each op, by its index, the number of its stage."""
    return {op.index: stage.index for stage in plan.stages for op in stage.ops}


def _edges_of(
    plan: Plan, tensor: PTensor, stage_of: Mapping[int, int]
) -> tuple[list[Edge], Mapping[Device, int] | None]:
    """The edges of one activation, or the gradient shares that make an edge unnecessary.

    Args:
        plan: the decisions.
        tensor: an output of an op.
        stage_of: result of ``stages_by_op``.
    """
    op = plan.graph.producer[tensor]
    groups = _groups(plan, tensor, stage_of)
    if not groups:
        return [], None
    shares = _shares(plan, op, groups, stage_of[op.index])
    if shares is not None:
        return [], shares
    src = output_sharding(plan, op, op.outputs.index(tensor))
    return _edges_to(op, tensor, stage_of[op.index], src, groups), None


def _groups(
    plan: Plan, tensor: PTensor, stage_of: Mapping[int, int]
) -> dict[tuple[int, Sharding], list[Reader]]:
    """The readers of a tensor, by stage and end."""
    groups: dict[tuple[int, Sharding], list[Reader]] = {}
    for reader in plan.graph.readers.get(tensor, ()):
        end = stage_of[reader[0].index], input_sharding(plan, *reader)
        groups.setdefault(end, []).append(reader)
    return groups


def _numbers(op: Op, tensor: PTensor, taken: int = 0) -> Iterator[int]:
    """Numbers for the edges of one result of an op, of which some are taken."""
    step = len(op.outputs)
    return count(op.outputs.index(tensor) + taken * step, step)


def _edges_beyond(
    plan: Plan, stage_of: Mapping[int, int], taken: Counter[PTensor]
) -> Iterator[Edge]:
    """Edges to the next pass of a microbatch and out of the program.

    Args:
        plan: the decisions.
        stage_of: result of ``stages_by_op``.
        taken: how many edges each tensor has already.
    """
    known = known_of(plan.graph, "edges beyond", MAX_EDGES)
    for tensor, ends in (*_recycling(plan, stage_of), *_results(plan, stage_of)):
        op = plan.graph.producer[tensor]
        stage, src = stage_of[op.index], output_sharding(plan, op, op.outputs.index(tensor))
        number = next(_numbers(op, tensor, taken[tensor]))
        taken[tensor] += 1
        given = op.index, number, tensor, stage, ends[0], src, *ends[1:]
        yield known.of(given, partial(Edge, *given))


Ends = tuple[int, Sharding, tuple[Reader, ...], None, PTensor | None, str]
"""The attributes of an edge that are about its dst end, in their order."""


def _recycling(plan: Plan, stage_of: Mapping[int, int]) -> Iterator[tuple[PTensor, Ends]]:
    for given, tensor in plan.graph.recycled.items():
        for (stage, dst), readers in _groups(plan, given, stage_of).items():
            yield tensor, (stage, dst, tuple(readers), None, given, "")


def _results(plan: Plan, stage_of: Mapping[int, int]) -> Iterator[tuple[PTensor, Ends]]:
    """The edges that bring each result whole to all devices, or to where it is read as an input.

    Raises:
        PlanError: there are several microbatches, and a result with dims has no samples.
    """
    for tensor, names in plan.graph.results_of.items():
        if plan.num_microbatches > 1 and tensor.shape and plan.dims.samples_dim(tensor) is None:
            raise PlanError(
                f"result {names[0]!r} {list(tensor.shape)} has no samples of the batch along any "
                f"dim, so its {plan.num_microbatches} microbatches cannot be joined: return a sum "
                "or mean of it as a scalar, a value for each sample, or plan one microbatch."
            )
        stage = stage_of[plan.graph.producer[tensor].index]
        for name in names:
            end = Sharding.everyone(plan.devices, tensor.shape)
            if name in plan.graph.carried:
                given = plan.graph.carried[name]
                end = _made_at(plan, tensor) if given is None else _read_of(plan, given)
            yield tensor, (stage, end, (), None, None, name)


def _made_at(plan: Plan, tensor: PTensor) -> Sharding:
    """The end at which each device holds, summed, the box that it computes some of."""
    op = plan.graph.producer[tensor]
    made = output_sharding(plan, op, op.outputs.index(tensor))
    return Sharding.of((device, shard.box, ()) for device, shard in made.shards.items())


def _read_of(plan: Plan, given: PTensor) -> Sharding:
    """The end at which each device holds what it reads of an input."""
    reads = (input_sharding(plan, *reader) for reader in plan.graph.readers[given])
    boxes = grouped((d, shard.box) for read in reads for d, shard in read.shards.items())
    return Sharding.of((device, bounding(found), ()) for device, found in boxes.items())


def _is_between(edge: Edge) -> bool:
    """Whether an edge connects two stages within a pass."""
    return edge.crosses and edge.recycles is None and not edge.result


def _shares(
    plan: Plan, op: Op, groups: Iterable[tuple[int, Sharding]], stage: int
) -> Mapping[Device, int] | None:
    """The gradient share of each replica of an op, if shares make edges unnecessary."""
    if not reads_weights_alone(op) or any(dst_stage != stage for dst_stage, _ in groups):
        return None
    return shares_of(
        op.form, plan.op_split(op), Sharding.joined(sharding for _, sharding in groups)
    )


def reads_weights_alone(op: Op) -> bool:
    """Whether only the op's weights need gradients; for example a table of positions."""
    has_weights_alone = all(t.kind == PARAMETER for t in op.inputs if t.requires_grad)
    return bool(op.parameters) and has_weights_alone and len(op.outputs) == 1


@lru_cache(maxsize=MAX_SHARDINGS)
def shares_of(form: OpForm, split: OpSplit, reading: Sharding) -> Mapping[Device, int] | None:
    """The share of the gradient that each replica takes, for an op that only reads weights.

    The backward of an op is linear. So each replica of such an op, for example a table of
    positions, may use only the gradient that is on its own device. The partial sums are then
    added with the gradients of the weights, once per step instead of once per microbatch.

    Args:
        form: form of the op.
        split: its parts.
        reading: all reads of its output, on the same devices.
    """
    (src,) = shardings_of(form, split).outputs
    if reading.shards.keys() != src.shards.keys() or not _holds(src, reading):
        return None
    # For each piece of a cut op: the sets that its replicas on different devices read.
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
    """The pieces of an op that each device computes, without the replica numbers."""
    found: dict[Device, set[PartForm]] = {}
    for part in split.parts:
        if part.device is not None:
            found.setdefault(part.device, set()).add(form.part(part.pieces))
    return {device: frozenset(parts) for device, parts in found.items()}


def _are_apart(kinds: Iterable[frozenset[PartForm]]) -> bool:
    """Whether any two devices compute the same pieces of an op or disjoint ones, without sums."""
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


def _edges_to(
    op: Op,
    tensor: PTensor,
    stage: int,
    src: Sharding,
    groups: Mapping[tuple[int, Sharding], list[Reader]],
) -> list[Edge]:
    """The edges of one result of an op in a stage to groups of readers."""
    numbers = _numbers(op, tensor)
    left = {
        end: readers
        for end, readers in groups.items()
        if end[0] != stage or not is_inline(src, end[1], tensor.requires_grad)
    }
    made: list[Edge] = []
    parent = None
    if src.num_summands > 1 and len(left) > 1:
        # The tensor is summed once, for a reader in this stage if there is one, with the fewest
        # summands. The other readers start from the result.
        whole = min(left, key=lambda end: (end[0] != stage, end[1].num_summands, end[0]))
        sharding = whole[1].whole
        direct = tuple(left.pop((whole[0], sharding), []))
        parent = Edge(op.index, next(numbers), tensor, stage, whole[0], src, sharding, direct)
        made.append(parent)
        src, stage = sharding, whole[0]
    for (dst_stage, dst), readers in left.items():
        ends = tensor, stage, dst_stage, src, dst
        made.append(Edge(op.index, next(numbers), *ends, tuple(readers), parent))
    return made


def output_sharding(plan: Plan, op: Op, position: int) -> Sharding:
    """The end at which an op writes its output ``position``."""
    return shardings_of(op.form, plan.op_split(op)).outputs[position]


def input_sharding(plan: Plan, op: Op, position: int) -> Sharding:
    """The end at which an op reads its input ``position``."""
    return shardings_of(op.form, plan.op_split(op)).inputs[position]


@lru_cache(maxsize=MAX_SHARDINGS)
def is_inline(src: Sharding, dst: Sharding, has_grad: bool) -> bool:
    """Whether no communication is needed: each device reads only what it wrote itself.

    A device must hold all summands of the values it reads, and of the gradients of the values it
    wrote. If one device holds several summands, an edge adds them once for all readers.
    """
    if any(len(shard.summands) > 1 for shard in src.shards.values()):
        return False
    if src.num_summands == dst.num_summands == 1 and src.views == dst.views:
        return True
    return _holds(src, dst) and (not has_grad or _holds(dst, src))


def _holds(there: Sharding, wanted: Sharding) -> bool:
    """Whether every device holds all summands of the boxes that it reads."""
    for device, shard in wanted.shards.items():
        held = there.shards[device].held if device in there.shards else frozenset()
        for want in {box for box, _ in shard.held}:
            if any(pair not in held and pair[0].overlaps(want) for pair in there.held):
                return False
    return True
