"""Mesh-TensorFlow's layout optimizer: the results of its published tests, and brute force."""

from __future__ import annotations

from itertools import cycle, product

import numpy as np
import pytest

import superscaler_core as ss
from superscaler_core.plan import Mesh
from superscaler_core.published.mesh_tf import (
    LayoutProblem,
    MeshOp,
    MeshTensor,
    assignments,
    auto_mtf,
    layout_problem,
    list_schedule,
)
from superscaler_core.published.mesh_tf.plan import mesh_tf
from tests.superscaler_core.cases import Case

SIZES = {"a": 10, "b": 5, "c": 20}


def einsum(mesh: str, uncut: str = "", times: int = 1) -> LayoutProblem:
    """``x1[a, b] x2[b, c] -> [a, c]``, computed ``times`` times, as in the published tests."""
    shapes = {"x1": "ab", "x2": "bc", **{f"y{i}": "ac" for i in range(times)}}
    tensors = {
        name: MeshTensor(frozenset(dims) - {*uncut}, 4.0 * np.prod([SIZES[d] for d in dims]))
        for name, dims in shapes.items()
    }
    ops = [MeshOp((), ("x1",)), MeshOp((), ("x2",))]
    ops += [MeshOp(("x1", "x2"), (f"y{i}",)) for i in range(times)]
    sizes = {dim: frozenset({size}) for dim, size in SIZES.items() if dim not in uncut}
    return LayoutProblem(Mesh.parse(mesh), sizes, tensors, tuple(ops))


@pytest.mark.parametrize(
    ("problem", "answer"),
    [
        (einsum("m1:4,m2:2"), "a:m2;c:m1"),
        (einsum("m1:4,m2:2", times=100), "a:m2;c:m1"),
        (einsum("m1:4,m2:2", uncut="ac"), ""),
        (einsum("m1:4,m2:2,m3:1"), "a:m2;b:m3;c:m1"),
    ],
)
def test_layouts_equal_those_of_the_published_optimizer(
    problem: LayoutProblem, answer: str
) -> None:
    assert str(auto_mtf(problem)) == answer


def test_three_dims_have_thirteen_assignments_to_two_sides() -> None:
    found = list(assignments({"s1", "s2", "s3"}, ["m1", "m2"]))
    assert len(found) == 13
    assert {} in found
    assert {"s1": "m2", "s2": "m1"} in found
    assert all(len(set(each.values())) == len(each) for each in found)


def random_problem(seed: int) -> LayoutProblem:
    random = np.random.default_rng(seed)
    dims = list("abcd")[: int(random.integers(2, 5))]
    sizes = {dim: int(random.choice([4, 6, 8, 12])) for dim in dims}
    tensors: dict[str, MeshTensor] = {}
    ops: list[MeshOp] = []
    for number in range(int(random.integers(2, 8))):
        own = [dim for dim in dims if random.random() < 0.5]
        num_bytes = float(np.prod([sizes[dim] for dim in own]) * random.integers(1, 4))
        tensors[f"t{number}"] = MeshTensor(frozenset(own), num_bytes, bool(random.random() < 0.2))
        reads = tuple(f"t{i}" for i in range(number) if random.random() < 0.4)
        ops.append(MeshOp(reads, (f"t{number}",)))
    mesh = Mesh.parse(str(random.choice(["x:2", "x:2,y:2", "x:2,y:4", "x:3,y:2"])))
    return LayoutProblem(mesh, {d: frozenset({s}) for d, s in sizes.items()}, tensors, tuple(ops))


@pytest.mark.parametrize("seed", range(8))
def test_layout_equals_the_optimum_of_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    num = len(problem.sizes)

    def objective(layout: dict[str, str]) -> float:
        # 24 times the bytes is a whole number, as sizes are cut into 2, 3, 4, 6 or 8 parts.
        return (num + 1) * 24 * problem.peak_bytes(layout) - len(layout)

    every = product([None, *problem.mesh.sizes], repeat=num)
    layouts = [{d: s for d, s in zip(problem.sizes, each, strict=True) if s} for each in every]
    best = min(objective(layout) for layout in layouts if problem.allows(layout))
    found = dict(auto_mtf(problem).dims)
    assert problem.allows(found)
    assert objective(found) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_list_schedule_runs_every_op_once_after_its_inputs(seed: int) -> None:
    problem = random_problem(seed)
    order = list_schedule(problem)
    assert sorted(order) == list(range(len(problem.ops)))
    ready: set[str] = set()
    for number in order:
        assert ready >= {*problem.ops[number].reads}
        ready |= {*problem.ops[number].writes}


@pytest.mark.parametrize(
    "model, mesh",
    [*zip(["gpt", "moe", "mlp", "wide_resnet", "mbart"], cycle(["rows:2,cols:2", "all:4"]))],
)
def test_layout_of_a_model_reduces_memory_and_fills_a_plan(model: str, mesh: str) -> None:
    graph = Case("data_parallel", 1, model=model).planned().graph
    plan = ss.Plan(graph, range(4))
    problem = layout_problem(plan, Mesh.parse(mesh))
    layout = auto_mtf(problem)
    assert problem.peak_bytes(dict(layout.dims)) < problem.peak_bytes({})
    mesh_tf(plan, layout=layout, mesh=problem.mesh)
    assert plan.is_assigned
