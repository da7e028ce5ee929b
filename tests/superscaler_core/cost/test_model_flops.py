"""Model FLOPs: the operations that a model asks for, whatever a plan does."""

from __future__ import annotations

import superscaler_core as ss
from superscaler_core.cost.model_flops import model_flops
from tests.superscaler_core.small import branched, two_linears


def test_products_count_two_operations_per_term_in_each_direction() -> None:
    # Two products of [4, 6] x [6, 8] and [4, 8] x [8, 5], a tanh and a sum of one each.
    products = 2 * 4 * 6 * 8, 2 * 4 * 8 * 5
    others = 4 * 8 + 4 * 5
    found = model_flops(two_linears())
    assert found.forward == sum(products) + others
    # The first product needs no gradient of its input.
    assert found.backward == products[0] + 2 * products[1] + others
    assert found.dtype == "float64"


def test_plans_do_not_change_the_operations_of_a_model() -> None:
    graph = branched()
    plan = ss.Plan(graph, [0, 1])
    for op in graph.ops:
        plan.spread(op, plan.devices, [ss.Axis(2, (plan.dims.batch,))])
    assert model_flops(ss.compile(plan).plan.graph) == model_flops(graph)


def test_a_larger_batch_takes_proportionally_more() -> None:
    assert model_flops(two_linears(12)).forward == 3 * model_flops(two_linears(4)).forward
