"""Token slices: their order follows the data flow, and no slice reads a later one."""

from __future__ import annotations

from itertools import accumulate

import pytest

import superscaler_core as ss
from superscaler_core.graph.token_slices import token_slices
from tests.superscaler_core.cases import Case


def sliced(lengths: tuple[int, ...], num_stages: int) -> tuple[ss.Graph, tuple[int, ...]]:
    plan = ss.Plan(Case("terapipe", 1, sizes={"layers": 2})._graph(), range(1))
    cuts = [plan.blocks.layers[i][0] for i in range(1, num_stages)]
    (tokens,) = plan.blocks.tokens
    ends = tuple(accumulate(lengths))
    stages = [stage.ops for stage in plan.pipeline(cuts)]
    return token_slices(plan.graph, lambda op: plan.dims.ids(op, tokens), ends, stages)


@pytest.mark.parametrize("lengths", [(8,), (4, 4), (5, 1, 2), (1,) * 8])
def test_ops_of_a_sliced_graph_read_only_earlier_results(lengths: tuple[int, ...]) -> None:
    graph, firsts = sliced(lengths, 2)
    assert [op.index for op in graph.ops] == [*range(len(graph.ops))]
    assert len({op.name for op in graph.ops}) == len(graph.ops)
    assert len(firsts) == 2 * len(lengths)
    seen = {*graph.inputs, *graph.parameters.values()}
    for op in graph.ops:
        assert {t for t in op.inputs if t.kind == "activation"} <= seen
        seen.update(op.outputs)
    assert graph.loss in seen


@pytest.mark.parametrize("lengths", [(4, 4), (5, 1, 2)])
def test_slices_read_only_earlier_slices_and_the_same_slice_of_the_previous_stage(
    lengths: tuple[int, ...],
) -> None:
    graph, firsts = sliced(lengths, 2)
    num = len(lengths)
    stage_of = {op: sum(first <= op.index for first in firsts) - 1 for op in graph.ops}
    edges = {
        (stage_of[graph.producer[t]], stage_of[op])
        for op in graph.ops
        for t in op.inputs
        if t in graph.producer
    }
    crossing = {(a, b) for a, b in edges if a != b}
    # Ops before the blocks and sums after the blocks read other slices of their stage.
    allowed = {(a, b) for a, b in crossing if a // num == b // num and a < b}
    assert crossing - allowed == {(i, num + i) for i in range(num)}


def test_slices_have_the_same_total_flops_as_the_whole() -> None:
    whole = Case("terapipe", 1, sizes={"layers": 2})._graph()
    graph, _ = sliced((5, 1, 2), 1)

    def work(ops: tuple[ss.Op, ...], kind: str) -> float:
        found = 0.0
        for op in ops:
            if op.kind == kind:
                count = op.flops
                for size in op.sizes.values():
                    count *= size
                found += count
        return found

    assert work(graph.ops, "linear") == work(whole.ops, "linear")
    # Queries count the mean number of keys that they see: (lo + hi) / 2 in a slice, half of all
    # keys in the whole.
    assert work(graph.ops, "attention") == pytest.approx(work(whole.ops, "attention"))
