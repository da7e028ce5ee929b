"""Laws of stages that take nearly as long: against all cuts of a row, and on models."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

from bench.cells.cluster import PAPER
from bench.cells.workload import Workload, captured
from superscaler_core.graph.graph import Graph
from superscaler_core.planners.auto.balance import balanced_sizes, partition


def sizes(graph: Graph, num: int) -> tuple[int, ...]:
    return balanced_sizes(graph, num, PAPER.profile)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cut_has_a_cheaper_dearest_run(seed: int) -> None:
    random = Random(seed)
    costs = [random.choice([0.5, 1, 2, 3.25, 7]) for _ in range(random.randint(1, 8))]
    num = random.randint(1, len(costs))
    found = partition(costs, num)
    assert len(found) == num
    assert sum(found) == len(costs)
    assert min(found) >= 1

    def dearest(cuts: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)]))

    cuts = tuple(sum(found[:i]) for i in range(1, num))
    assert dearest(cuts) == min(map(dearest, combinations(range(1, len(costs)), num - 1)))


def test_first_stages_have_least_where_it_costs_nothing() -> None:
    assert partition([1.0] * 6, 4) == [1, 1, 2, 2]


def test_a_decoders_blocks_make_stages_of_fewer() -> None:
    model = {"layers": 6, "width": 64, "heads": 4, "sequence": 32, "vocabulary": 8, "classes": 4}
    graph = captured(Workload("mbart", model, "float32", 8), 1)
    encoder, decoder = sizes(graph, 2)
    assert encoder + decoder == 12
    assert encoder > decoder
    assert sizes(graph, 13) == ()


def test_what_is_around_the_blocks_counts() -> None:
    model = {"layers": 4, "width": 64, "heads": 4, "sequence": 128, "fused": False}
    few, many = (
        captured(Workload("gpt", {**model, "vocabulary": words}, "float16", 8), 4)
        for words in (64, 65536)
    )
    assert sizes(few, 2) == (2, 2)
    assert sizes(many, 2) == (3, 1)
