"""Least recomputed: the work that memory forces every plan to do twice, by a linear program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from superscaler_core.graph.blocks import OpGroup, find_blocks
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.integer_program import IntegerProgram
from superscaler_core.memory.held import SAVED_ITEM_BYTES, VIEWS

Value = PTensor | tuple[Op, int]
"""What a backward may need: a tensor that is no view, or the mask of an op."""


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
    saved, chosen = saved_values(graph), _distinct(graph)
    if sum(saved.values()) <= samples * room.num_bytes:
        return base_secs
    makers: dict[Value, Op] = {}
    for op in chosen:
        makers |= dict.fromkeys(op.outputs if op.kind not in VIEWS else (), op)
    makers |= {
        value: value[0] for value in saved if isinstance(value, tuple) and value[0] in chosen
    }
    sizes = {
        value: chosen[op] * (value.num_bytes if isinstance(value, PTensor) else saved[value])
        for value, op in makers.items()
    }
    program = IntegerProgram()
    kept, hosted = (
        dict(zip(sizes, program.variables(len(sizes), most=1.0).tolist(), strict=True))
        for _ in range(2)
    )
    ops = list(dict.fromkeys(makers.values()))
    again = dict(zip(ops, program.variables(len(ops), most=1.0).tolist(), strict=True))
    (secs,) = program.variables(1, cost=1.0).tolist()

    def available(value: Value) -> list[tuple[int, float]]:
        return [(kept[value], 1.0), (hosted[value], 1.0), (again[makers[value]], 1.0)]

    for value in saved.keys() & sizes.keys():
        program.row(available(value), least=1.0)
    for op in ops:
        for base in {_viewed(graph, tensor) for tensor in op.inputs} & sizes.keys():
            program.row([*available(base), (again[op], -1.0)], least=0.0)
    program.row(
        [(kept[value], size / samples / room.num_bytes) for value, size in sizes.items()], most=1.0
    )
    program.row(
        [(secs, 1.0), *((again[op], -chosen[op] * secs_of(op)) for op in ops)], least=base_secs
    )
    # Each copied value goes to the host and back.
    rate = room.copied_bytes_per_sec / 2
    program.row(
        [(secs, 1.0), *((hosted[v], -size / samples / rate) for v, size in sizes.items())],
        least=0.0,
    )
    found = program.solve(is_relaxed=True)
    return base_secs if found is None else max(base_secs, found.bound)


def _distinct(graph: Graph) -> Mapping[Op, int]:
    """Ops, of equal layers those of one, with the number of layers that it stands for.

    What an op reads of another layer is then taken to be available, which relaxes the program.
    """
    layers = find_blocks(graph).layers
    alike: dict[tuple[object, ...], list[OpGroup]] = {}
    for ops in layers:
        alike.setdefault(tuple(op.form for op in ops), []).append(ops)
    inside = {op for ops in layers for op in ops}
    found = {op: 1 for op in graph.ops if op not in inside}
    for mine in alike.values():
        found |= dict.fromkeys(mine[len(mine) // 2], len(mine))
    return found


def saved_values(graph: Graph, ops: OpGroup | None = None) -> Mapping[Value, int]:
    """Bytes of each value that autograd saves for some ops, or all; of a view what it shows."""
    found: dict[Value, int] = {}
    for op in graph.ops if ops is None else ops:
        if not any(tensor.requires_grad for tensor in op.outputs):
            continue
        for number in op.saves:
            tensor = (*op.inputs, *op.outputs)[number]
            if number >= len(op.inputs) and op.kind in SAVED_ITEM_BYTES:
                found[op, number] = tensor.box.num_elements * SAVED_ITEM_BYTES[op.kind]
            elif (base := _viewed(graph, tensor)) in graph.producer:
                found[base] = base.num_bytes
    return found


def _viewed(graph: Graph, tensor: PTensor) -> PTensor:
    while tensor in graph.producer and graph.producer[tensor].kind in VIEWS:
        tensor = graph.producer[tensor].inputs[0]
    return tensor
