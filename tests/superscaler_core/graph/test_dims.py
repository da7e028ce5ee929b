from __future__ import annotations

from dataclasses import replace

import pytest

import superscaler_core as ss
from tests.superscaler_core.small import two_linears


def test_a_dim_is_followed_through_ops_and_parameters() -> None:
    dims = ss.Plan(two_linears(), [0]).dims
    assert dims.of("up.weight", 0) == dims.of("down.weight", 1)
    assert dims.of("up.weight", 1) == dims.of("x", 1)
    assert len({dims.of("x", 0), dims.of("x", 1), dims.of("up.weight", 0)}) == 3


def test_dim_class_is_named_after_its_first_dim() -> None:
    dims = ss.Plan(two_linears(), [0]).dims
    assert str(dims.of("down.weight", 1)) == "up.weight.0"
    assert dims.batch == ss.DimClass("x", 0)


def test_loops_of_every_op_in_a_dim_class_are_found() -> None:
    plan = ss.Plan(two_linears(), [0])
    hidden = plan.dims.of("up.weight", 0)
    assert [plan.dims.ids(op, hidden) for op in plan.graph.ops] == [("n",), ("n",), ("k",), ()]


def view_of(shape: tuple[int, ...], outer: str) -> ss.Plan:
    builder = ss.GraphBuilder("view")
    x = builder.input("x", (6,), "float64")
    (y,) = builder.op("view", outer, [x], [(shape, "float64")], "{x0}.reshape({out0.shape})")
    dims = " ".join(f"d{i}+" for i in range(len(shape)))
    (loss,) = builder.op("sum", f"{dims} -> ()", [y], [((), "float64")], "{x0}.sum()")
    return ss.Plan(builder.build(loss), [0])


def test_outer_loop_of_a_composed_dim_belongs_to_its_dim_class() -> None:
    plan = view_of((3, 2), "(h d) -> h d")
    of_x = plan.dims.of("x", 0)
    assert plan.dims.ids(plan.graph.ops[1], of_x) == ("d0",)


def test_outer_loop_of_size_one_is_skipped() -> None:
    plan = view_of((1, 6), "(h d) -> h d")
    assert plan.dims.ids(plan.graph.ops[1], plan.dims.of("x", 0)) == ("d1",)


def test_fixed_loop_does_not_belong_to_a_dim_class() -> None:
    builder = ss.GraphBuilder("softmax")
    x = builder.input("x", (2, 3), "float64")
    (y,) = builder.op("softmax", "b v^ -> b v^", [x], [((2, 3), "float64")], "{x0}.softmax(-1)")
    (loss,) = builder.op("sum", "b+ v+ -> ()", [y], [((), "float64")], "{x0}.sum()")
    plan = ss.Plan(builder.build(loss), [0])
    assert [plan.dims.ids(op, plan.dims.of("x", 1)) for op in plan.graph.ops] == [(), ("v",)]


def test_image_rows_are_followed_through_strided_windows() -> None:
    builder = ss.GraphBuilder("image")
    x = builder.input("x", (2, 9), "float64")
    (y,) = builder.op("pool", "b y*2-1+1 -> b y", [x], [((2, 5), "float64")], "{x0}")
    (z,) = builder.op("point", "b y*3 -> b y", [y], [((2, 2), "float64")], "{x0}[:, ::3]")
    (loss,) = builder.op("sum", "b+ s+ -> ()", [z], [((), "float64")], "{x0}.sum()")
    plan = ss.Plan(builder.build(loss), [0])
    rows = plan.dims.of("x", 1)
    assert [plan.dims.ids(op, rows) for op in plan.graph.ops] == [("y",), ("y",), ("s",)]
    assert [op.sizes[plan.dims.ids(op, rows)[0]] for op in plan.graph.ops] == [5, 2, 2]


def test_unknown_dims_and_parameters_raise_plan_error() -> None:
    dims = ss.Plan(two_linears(), [0]).dims
    with pytest.raises(ss.PlanError, match="no dim 2 of a tensor 'x'"):
        dims.of("x", 2)
    with pytest.raises(ss.PlanError, match=r"no parameter that fits 'layers\.\*'"):
        dims.of_params(("layers.*", 0))


@pytest.mark.parametrize(
    "annotation, shape, dim",
    [
        ("b s f -> s b f", (5, 6, 4), 1),  # time first
        ("b s f -> b s f", (6, 5, 4), 0),
        ("b s+ f+ -> b", (6,), 0),
        ("b+ s f -> s f", (5, 4), None),  # a sum over samples
        ("b+ s+ f+ -> x y", (7, 4), 0),  # nothing is said of its dims, as of an opaque op's
        ("b+ s+ f -> f x", (4, 6), 1),  # only one dim can have the samples
    ],
)
def test_samples_are_along_the_dim_that_is_tied_to_the_batch(
    annotation: str, shape: tuple[int, ...], dim: int | None
) -> None:
    builder = ss.GraphBuilder("results")
    x = builder.input("x", (6, 5, 4), "float64")
    (y,) = builder.op("any", annotation, [x], [(shape, "float64")], "{x0}")
    dims = " ".join(f"d{i}+" for i in range(len(shape)))
    (loss,) = builder.op("sum", f"{dims} -> ()", [y], [((), "float64")], "{x0}.sum()")
    assert ss.Plan(builder.build(loss), [0]).dims.samples_dim(y) == dim


def test_batch_is_the_dim_of_the_samples_of_the_first_input_that_has_some() -> None:
    graph = replace(two_linears(), samples={"x": 1})
    dims = ss.Plan(graph, [0]).dims
    assert dims.batch == ss.DimClass("x", 1)
    assert dims.samples_dim(graph.ops[0].inputs[0]) == 1
