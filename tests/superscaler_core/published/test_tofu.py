"""Tofu's halvings: one level is optimal, workers have equal shares, and training is unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.graph import Operand
from superscaler_core.published.tofu import NO_LOOP, halve, tofu
from tests.superscaler_core.cases import Case, check_trains

# --- one level is optimal ------------------------------------------------------------------------


def random_graph(seed: int) -> ss.Graph:
    """A few matrices with linear maps (some with a tied weight), sums, tanh and transposes."""
    random = np.random.default_rng(seed)
    builder = ss.GraphBuilder(f"random{seed}")
    rows, columns = (int(random.choice([2, 4, 6, 8])) for _ in range(2))
    tied = builder.parameter("tied", (columns, columns), "float64")
    tensors = [builder.input("x", (rows, columns), "float64")]
    for number in range(int(random.integers(2, 5))):
        x, y = (tensors[int(random.integers(len(tensors)))] for _ in range(2))
        (a, b), kind = x.shape, random.choice(["linear", "tied", "tanh", "add", "turn"])
        if kind == "linear" or (kind == "tied" and b != columns):
            out = int(random.choice([2, 4, 6, 8]))
            weight = builder.parameter(f"w{number}", (out, b), "float64")
            how = "b k+, n k+ -> b n", [x, weight], (a, out)
        elif kind == "tied":
            how = "b k+, n k+ -> b n", [x, tied], (a, columns)
        elif kind == "add" and x.shape == y.shape:
            how = "b n, b n -> b n", [x, y], (a, b)
        elif kind == "turn":
            how = "b n -> n b", [x], (b, a)
        else:
            how = "b n -> b n", [x], (a, b)
        annotation, reads, shape = how
        tensors += builder.op(str(kind), annotation, reads, [(shape, "float64")], "0")
    (loss,) = builder.op("sum", "b+ n+ -> ()", [tensors[-1]], [((), "float64")], "{x0}.sum()")
    return builder.build(loss)


def region(op: ss.Op, operand: Operand, tensor: ss.PTensor, loop: str, half: int) -> rv.Box:
    """The region of an operand that one half of an op reads or writes."""
    size = op.sizes.get(loop, 0)
    ranges = {loop: (half * (size // 2), size // 2 + half * (size - size // 2))} if loop else {}
    return op.annotation.box(operand, ranges, op.sizes, tensor.shape)


def received(held: Sequence[rv.Box], is_sum: bool, needed: Sequence[rv.Box]) -> int:
    """Elements that two workers receive from each other; for a sum, the summand of the other."""
    total = 0
    for have, want in zip(held, needed, strict=True):
        common = None if is_sum else have.intersect(want)
        total += want.num_elements - (common.num_elements if common else 0)
    return total


def least_bytes(graph: ss.Graph) -> float:
    """The least bytes by brute force over the loops of all ops and the dims of weights."""
    ways = []
    for op in graph.ops:
        can = {i: size for i, size in op.sizes.items() if op.is_splittable(i) and size > 1}
        even = [i for i, size in can.items() if size % 2 == 0]
        ways.append(even or list(can) or [NO_LOOP])
    return min(bytes_of(graph, dict(enumerate(loops))) for loops in product(*ways))


def bytes_of(graph: ss.Graph, loops: Mapping[int, str]) -> float:
    def ends(op: ss.Op, side: str, position: int) -> tuple[list[rv.Box], bool]:
        operand = getattr(op.annotation, side)[position]
        tensor = getattr(op, side)[position]
        boxes = [region(op, operand, tensor, loops[op.index], half) for half in (0, 1)]
        return boxes, boxes[0] == boxes[1] and loops[op.index] != NO_LOOP

    def both_ways(src: tuple[list[rv.Box], bool], dst: tuple[list[rv.Box], bool]) -> int:
        # A part that reads a tensor whole has a summand of its gradient.
        return received(src[0], src[1], dst[0]) + received(dst[0], dst[1], src[0])

    total = 0
    for tensor, uses in graph.readers.items():
        reads = [ends(op, "inputs", position) for op, position in uses]
        if tensor in graph.producer:
            op = graph.producer[tensor]
            wrote = ends(op, "outputs", op.outputs.index(tensor))
            if not tensor.requires_grad:
                total += sum(received(*wrote, read[0]) for read in reads)
            else:
                total += sum(both_ways(wrote, read) for read in reads)
        elif tensor.kind == "parameter":
            stored = []
            for dim, size in enumerate(tensor.shape):
                lo, hi, half = [0] * 2, list(tensor.shape), size // 2
                first, then = list(hi), list(lo)
                first[dim] = then[dim] = half
                boxes = [rv.Box(tuple(lo), tuple(first)), rv.Box(tuple(then), tuple(hi))]
                stored.append(sum(both_ways((boxes, False), read) for read in reads))
            total += min(stored)
    return 8.0 * total


@pytest.mark.parametrize("seed", range(6))
def test_one_halving_equals_the_optimum_of_brute_force(seed: int) -> None:
    graph = random_graph(seed)
    found = halve(graph, 1)
    assert found.moved_bytes == (least_bytes(graph),)
    assert bytes_of(graph, {i: loops[0] for i, loops in found.loops.items()}) == least_bytes(graph)


# --- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Halved(Case):
    """A model that is repeatedly cut in halves."""

    plan: str = "tofu"
    num_devices: int = 4

    def planned(self) -> ss.Plan:
        plan = ss.Plan(self._graph(), range(self.num_devices))
        tofu(plan, **self.options)
        return plan


CASES = [
    Halved(num_devices=2, optimizer="adamw"),
    Halved(sizes={"tied": True}),
    Halved(model="moe", optimizer="adamw"),
    Halved(model="mlp", options={"microbatches": 2}),
    Halved(model="wide_resnet"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_halved_models_train_as_one_device(case: Case, tmp_path: Path) -> None:
    check_trains(case, tmp_path)


@pytest.mark.parametrize("model, num", [("gpt", 2), ("moe", 4)])
def test_worker_stores_an_equal_share_of_every_weight(model: str, num: int) -> None:
    """Every weight, with its gradient and its states, is stored once, in equal pieces."""
    made = Halved(model=model, num_devices=num).compiled()
    for tensor, side in made.materialized.weights.storage.items():
        sizes = {shard.box.num_elements for shard in side.shards.values()}
        assert (len(side.shards), sizes) == (num, {tensor.box.num_elements // num})


@pytest.mark.parametrize("model, num", [("gpt", 4), ("moe", 2), ("swin", 4)])
def test_a_worker_keeps_its_share_of_activations(model: str, num: int) -> None:
    """Up to 30 % more is allowed: tensors that ops read whole, and gathered weights of a block."""
    one, made = (Halved(model=model, num_devices=n, batch=8).compiled() for n in (1, num))
    alone, own = (
        max(memory.activations_bytes for memory in compiled.memory.values())
        for compiled in (one, made)
    )
    assert own <= 1.3 * alone / num


def test_number_of_devices_that_is_not_a_power_of_two_is_rejected() -> None:
    with pytest.raises(ss.PlanError, match=r"tofu on 6 devices: .* use 4"):
        Halved(num_devices=6).planned()


def test_an_op_without_loops_runs_on_both_halves() -> None:
    builder = ss.GraphBuilder("scalar")
    x = builder.input("x", (4,), "float64")
    scale = builder.parameter("scale", (), "float64")
    (y,) = builder.op("mul", "b, () -> b", [x, scale], [((4,), "float64")], "{x0} * {x1}")
    (s,) = builder.op("sum", "b+ -> ()", [y], [((), "float64")], "{x0}.sum()")
    (loss,) = builder.op("half", "() -> ()", [s], [((), "float64")], "{x0} / 2")
    graph = builder.build(loss)
    assert halve(graph, 2).loops == {0: ("b", "b"), 1: ("b", "b"), 2: (NO_LOOP, NO_LOOP)}
