"""Laws of balanced stages: comparison with all cuts of a row, and stages of models."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

from bench.cells.cluster import PAPER
from bench.cells.workload import Workload, captured
from superscaler_core import Graph
from superscaler_core.planners.auto.balance import balanced_sizes, partition


def sizes(graph: Graph, num: int) -> tuple[int, ...]:
    return balanced_sizes(graph, num, PAPER.profile)


@pytest.mark.parametrize("seed", range(6))
def test_partition_minimizes_the_most_expensive_run(seed: int) -> None:
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


def test_first_stages_get_fewer_blocks_if_the_maximum_stays_equal() -> None:
    assert partition([1.0] * 6, 4) == [1, 1, 2, 2]


def test_stage_of_decoder_blocks_has_fewer_blocks() -> None:
    model = {"layers": 6, "width": 64, "heads": 4, "sequence": 32, "vocabulary": 8, "classes": 4}
    graph = captured(Workload("mbart", model, "float32", 8), 1)
    encoder, decoder = sizes(graph, 2)
    assert encoder + decoder == 12
    assert encoder > decoder
    assert sizes(graph, 13) == ()


def test_ops_outside_the_blocks_count_in_the_balance() -> None:
    model = {"layers": 4, "width": 64, "heads": 4, "sequence": 128, "fused": False}
    few, many = (
        captured(Workload("gpt", {**model, "vocabulary": words}, "float16", 8), 4)
        for words in (64, 65536)
    )
    assert sizes(few, 2) == (2, 2)
    assert sizes(many, 2) == (3, 1)
