"""2-D tensor parallel: matrices are split along both dims, and so are their transfers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import superscaler_core as ss
from tests.superscaler_core.cases import Case, check_trains
from tests.superscaler_core.plans.test_plans_communication import backward, fetches, forward, kinds

CASES = [
    Case("mesh_2d", 4, {"sequence": True}, optimizer="adamw"),
    Case("mesh_2d", 4, {"x": 1, "y": 2}, sizes={"tied": True}),
    Case("mesh_2d", 4, model="swin"),
    Case("mesh_2d", 6, {"x": 3}, model="mlp", batch=6),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mesh_2d_trains_the_same_weights_as_one_device(case: Case, tmp_path: Path) -> None:
    check_trains(case, tmp_path)


def shares(made: ss.Compiled, name: str) -> set[float]:
    """How much of a parameter each device stores."""
    tensor = made.plan.graph.parameter(name)
    shards = made.materialized.weights.storage[tensor].shards.values()
    return {shard.box.num_elements / tensor.box.num_elements for shard in shards}


@pytest.mark.parametrize(("model", "x", "y"), [("gpt", 4, 2), ("swin", 2, 4)])
def test_every_device_stores_one_piece_of_every_matrix(model: str, x: int, y: int) -> None:
    sizes = {"layers": 1} if model == "gpt" else {"depths": (1,)}
    made = Case("mesh_2d", 8, {"x": x, "y": y}, model=model, sizes=sizes, batch=8).compiled()
    words = ["attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down"]
    matrices = [f"layers.0.{word}.weight" for word in words] + ["head.weight"]
    if model == "gpt":
        matrices.append("embed.weight")
    assert {share for name in matrices for share in shares(made, name)} == {1 / (x * y)}


def test_mesh_2d_layer_gathers_along_one_axis_and_scatters_along_the_other() -> None:
    """The six maps of a layer reduce-scatter; q, k and v share one all-gather.

    Around each norm, all-to-alls change the split from the width to the batch and back.
    """
    one, two = (Case("mesh_2d", 4, sizes={"layers": layers}).compiled() for layers in (1, 2))
    there = kinds(forward(two)) - kinds(forward(one))
    back = kinds(backward(two)) - kinds(backward(one))
    assert there == {"reduce_scatter": 6, "all_gather": 4, "all_to_all": 4}
    assert back == {"all_gather": 6, "reduce_scatter": 4, "all_to_all": 4}
    assert kinds(fetches(two)) == {}


@pytest.mark.parametrize(
    ("num", "options", "sides"),
    [(8, {}, (4, 2)), (8, {"x": 2}, (2, 4)), (8, {"y": 1}, (8, 1))],
)
def test_default_mesh_is_as_square_as_possible(
    num: int, options: dict[str, int], sides: tuple[int, int]
) -> None:
    case = Case("mesh_2d", num, options, sizes={"heads": 8, "layers": 1}, batch=8)
    plan = case.compiled().plan
    linear = next(op for op in plan.graph.ops if op.name == "layers.0.attn.q:linear")
    cuts = [{part.range(i) for part in plan.parts(linear)} for i in ("n", "k")]
    assert tuple(map(len, cuts)) == sides


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("mesh_2d", 4, {"x": 3}), "x=3 times y=0 on 4 devices: .* has to divide 4"),
        (Case("mesh_2d", 4, {"x": 4, "y": 2}), "x=4 times y=2 on 4 devices"),
        (Case("mesh_2d", 4, {"x": -1}), "x=-1"),
        (Case("mesh_2d", 8, {}),
         "dim 0 of tokens cannot be cut into 8 parts: .* it can be cut into at most 4"),
    ],
    ids=str,
)  # fmt: skip
def test_infeasible_mesh_raises_plan_error(case: Case, words: str) -> None:
    with pytest.raises(ss.PlanError, match=words):
        replace(case, sizes={"heads": 8}).compiled()
