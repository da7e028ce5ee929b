"""Edges: the transitions between layouts that a plan needs."""

from __future__ import annotations

import pytest

import superscaler_core as ss
from superscaler_core.materialize import Materialized, materialize
from superscaler_core.materialize.edges import Edge
from tests.superscaler_core.small import branched, on_one, two_linears


def planned(**loops: str) -> ss.Plan:
    """``two_linears`` on two devices, each op cut along one loop, or replicated."""
    plan = ss.Plan(two_linears(), [0, 1])
    for op in plan.graph.ops:
        loop = loops.get(op.module)
        how = ss.split(loop, 2) if loop else ss.replicate(2)
        plan.op_assign(plan.op_trans(op, how), plan.devices)
    return plan


def routes(made: Materialized) -> list[tuple[str, str, str]]:
    """Every edge: its tensor, and its layouts in both directions."""
    return [(edge.tensor.name, route(edge), route_back(edge)) for edge in made.edges.all]


def route(edge: Edge) -> str:
    (sub_transfer,) = edge.forward
    return "" if sub_transfer.is_idle else f"{sub_transfer.src.rvd} -> {sub_transfer.dst.rvd}"


def route_back(edge: Edge) -> str:
    (sub_transfer,) = edge.backward
    return "" if sub_transfer.is_idle else f"{sub_transfer.src.rvd} -> {sub_transfer.dst.rvd}"


def test_change_of_the_split_dim_is_an_all_to_all_in_both_directions() -> None:
    made = materialize(planned(up="n", act="n", down="b", loss="b"))
    there, back = "R(1)V(1)D(1,2) -> R(1)V(1)D(2,1)", "R(1)V(1)D(2,1) -> R(1)V(1)D(1,2)"
    assert routes(made) == [("act.tanh", there, back)]


def test_summands_with_several_readers_are_summed_once() -> None:
    plan = ss.Plan(branched(), [0, 1])
    for op in plan.graph.ops:
        loop = "k" if op.kind == "up" else "n" if op.kind == "select" else None
        how = ss.split(loop, 2) if loop else ss.replicate(2)
        plan.op_assign(plan.op_trans(op, how), plan.devices)
    edges = [e for e in materialize(plan).edges.all if e.tensor.name == "up.up"]
    sums = [e for e in edges if e.src.num_summands > 1]
    assert len(sums) == 1
    assert all(e.parent is sums[0] for e in edges if e is not sums[0])


def test_edge_without_a_gradient_has_no_backward_transfer() -> None:
    plan = ss.Plan(branched(), [0, 1])
    on_one(plan)
    mask = next(op for op in plan.graph.ops if op.kind == "mask")
    plan.op_assign(mask, 1)
    edge = next(e for e in materialize(plan).edges.all if e.tensor.name == "mask.mask")
    assert edge.backward == ()


def table_model() -> ss.Graph:
    """``sum((x + rows) w)``: the rows are a table that is read for all of a batch."""
    builder = ss.GraphBuilder("table")
    table = builder.parameter("table", (3,), "float64")
    x = builder.input("x", (4, 3), "float64")
    (rows,) = builder.op("rows", "n -> n", [table], [((3,), "float64")], "{x0} * 1", module="rows")
    (y,) = builder.op("add", "b n, n -> b n", [x, rows], [((4, 3), "float64")], "{x0} + {x1}")
    (loss,) = builder.op("sum", "b+ n+ -> ()", [y], [((), "float64")], "{x0}.square().sum()")
    return builder.build(loss)


def test_gradients_of_ops_that_read_only_weights_are_reduced_at_the_weight() -> None:
    plan = ss.Plan(table_model(), [0, 1])
    for op in plan.graph.ops:
        plan.spread(op, plan.devices, [ss.Axis(2, (plan.dims.batch,))])
    made = materialize(plan)
    assert made.edges.all == ()
    (sub_transfer,) = made.weights.uses[0].reduce
    assert str(sub_transfer.src) == "R(1)V(2)D(1) shape(3) ranks(0,1)"


@pytest.mark.parametrize(("module", "loop"), [("down", "k"), ("up", "b")])
def test_overlapping_partial_sums_raise_plan_error_at_compile(module: str, loop: str) -> None:
    """Both devices have the second of three summands of a result or of a weight gradient."""
    plan = ss.Plan(two_linears(), [0, 1])
    for op in plan.graph.ops:
        if op.module == module:
            first, middle, last = plan.op_trans(op, ss.split(loop, 3))
            plan.op_assign((first, *plan.op_trans(middle, ss.replicate(2)), last), (0, 0, 1, 1))
        else:
            plan.op_assign(plan.op_trans(op, ss.replicate(2)), plan.devices)
    with pytest.raises(ss.PlanError, match=r"0\+1 on \[0\], 1\+2 on \[1\]; put parts of one sum"):
        ss.compile(plan)
