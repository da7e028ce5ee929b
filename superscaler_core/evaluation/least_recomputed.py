"""Least recomputed: the work that memory forces every plan to do twice, by a linear program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from superscaler_core.cost.op_memory import op_memory
from superscaler_core.graph.blocks import OpGroup, find_blocks
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import PTensor
from superscaler_core.integer_program import IntegerProgram
from superscaler_core.memory.held import VIEWS

TOLERANCE = 2e-7
"""Relative: the solver takes rows that are violated by 1e-7 as fulfilled."""


class Room(NamedTuple):
    """What all devices together have for the values of one sample.

    Attributes:
        num_bytes: their memory.
        copied_bytes_per_sec: between their memory and their hosts', one direction.
    """

    num_bytes: float
    copied_bytes_per_sec: float


def least_recomputed(
    graph: Graph, samples: int, secs_of: Callable[[Op], float], base_secs: float, room: Room
) -> float:
    """Seconds of a sample at least, if what its backward needs has only some room.

    When the forward of a sample has ended, each value that autograd saves is in the memory of a
    device, or in that of a host, or will be computed again; for this the op's inputs are needed,
    which are available in the same three ways. The program minimizes the time over shares of
    values. (Jain et al. 2020, Checkmate, have it for whole values in an order.)

    Args:
        graph: a microbatch.
        samples: its samples. A plan may run them one after another.
        secs_of: seconds in which all devices together compute an op again, for one sample.
        base_secs: seconds in which they compute a sample once; copies take time beside that.
        room: what they have.
    """
    saved = saved_values(graph)
    if sum(saved.values()) <= samples * room.num_bytes:
        return base_secs
    chosen = _distinct(graph, saved)
    makers = {t: op for op in chosen if op.kind not in VIEWS for t in op.outputs}
    program = IntegerProgram()
    kept, hosted = (
        dict(zip(makers, program.variables(len(makers), most=1.0).tolist(), strict=True))
        for _ in range(2)
    )
    ops = list(dict.fromkeys(makers.values()))
    again = dict(zip(ops, program.variables(len(ops), most=1.0).tolist(), strict=True))
    (secs,) = program.variables(1, cost=1.0).tolist()
    sizes = {t: t.num_bytes * (chosen[op].saved or chosen[op].num) for t, op in makers.items()}

    def available(value: PTensor) -> list[tuple[int, float]]:
        """Shares: of the layers that save the value, which have it; of all, which make it again."""
        share = chosen[makers[value]].share
        return [(kept[value], share), (hosted[value], share), (again[makers[value]], 1.0)]

    for value in (tensor for tensor in makers if tensor in saved):
        program.row(available(value), least=chosen[makers[value]].share)
    for op in ops:
        shown = dict.fromkeys(_viewed(graph, tensor) for tensor in op.inputs)
        for base in (tensor for tensor in shown if tensor in makers):
            rest = 1 - chosen[makers[base]].share  # layers that do not save it may have it
            program.row([*available(base), (again[op], -1.0)], least=-rest)
    program.row(
        [(kept[value], size / samples / room.num_bytes) for value, size in sizes.items()], most=1.0
    )
    program.row(
        [(secs, 1.0), *((again[op], -chosen[op].num * secs_of(op)) for op in ops)], least=base_secs
    )
    # Each copied value goes to the host and back.
    rate = room.copied_bytes_per_sec / 2
    program.row(
        [(secs, 1.0), *((hosted[v], -size / samples / rate) for v, size in sizes.items())],
        least=0.0,
    )
    found = program.solve(is_relaxed=True)
    return base_secs if found is None else max(base_secs, (1 - TOLERANCE) * found.bound)


class _Alike(NamedTuple):
    """Equal ops of equal layers: their number, and in how many autograd saves their results."""

    num: int
    saved: int

    @property
    def share(self) -> float:
        """The share of the ops whose results are saved; 1 if it is none, as any may be kept."""
        return self.saved / self.num if self.saved else 1.0


def _distinct(graph: Graph, saved: Collection[PTensor]) -> Mapping[Op, _Alike]:
    """Ops, of equal layers those of one, which stands for the mean of all.

    What an op reads of another layer is then taken to be available, which relaxes the program.
    """
    layers = find_blocks(graph).layers
    alike: dict[tuple[object, ...], list[OpGroup]] = {}
    for ops in layers:
        alike.setdefault(tuple(op.form for op in ops), []).append(ops)
    inside = {op for ops in layers for op in ops}
    alone: list[list[OpGroup]] = [[(op,)] for op in graph.ops if op not in inside]
    groups = [*alike.values(), *alone]
    found = {}
    for group in groups:
        for ops in zip(*group, strict=True):
            nums = [sum(op.outputs[i] in saved for op in ops) for i in range(len(ops[0].outputs))]
            # Where several results differ in this, the fewest count.
            found[ops[len(ops) // 2]] = _Alike(len(ops), min(filter(None, nums), default=0))
    return found


def saved_values(graph: Graph, ops: OpGroup | None = None) -> Mapping[PTensor, int]:
    """Bytes of the results that autograd saves for some ops, or all; of a view what it shows.

    Each op is run alone on the meta device (``op_memory``), because what an op may save by its rule
    is not saved where its gradients need none. Masks, which no op returns, are left out.
    """
    found: dict[PTensor, int] = {}
    for op in graph.ops if ops is None else ops:
        if not any(tensor.requires_grad for tensor in op.outputs):
            continue
        operands = (*op.inputs, *op.outputs)
        for number, _ in op_memory(Part(op)).saved:
            base = _viewed(graph, operands[number])
            if base in graph.producer:
                found[base] = base.num_bytes
    return found


def _viewed(graph: Graph, tensor: PTensor) -> PTensor:
    while tensor in graph.producer and graph.producer[tensor].kind in VIEWS:
        tensor = graph.producer[tensor].inputs[0]
    return tensor
