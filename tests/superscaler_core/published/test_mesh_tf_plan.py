"""Layouts of Mesh-TensorFlow: text form, rules, and results equal to one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import superscaler_core as ss
from superscaler_core.parallel import SProgram
from superscaler_core.plan import Mesh
from superscaler_core.plans import PLANS
from superscaler_core.plans.pieces.tensor_parallel import tensor_parallel
from superscaler_core.published.mesh_tf.mesh_layout import NAMES, MeshLayout, named_dims
from tests.superscaler_core.cases import Case, check_trains

WORDS = st.text("abcxyz_0", min_size=1, max_size=4)


@given(st.dictionaries(WORDS, WORDS))
def test_layout_round_trips_through_its_text(dims: dict[str, str]) -> None:
    layout = MeshLayout(tuple(dims.items()))
    assert MeshLayout.parse(str(layout)) == layout
    assert MeshLayout(tuple(reversed(dims.items()))) == layout


@pytest.mark.parametrize("text", ["batch", "batch:", ":rows", "a:b;c"])
def test_malformed_layout_is_rejected(text: str) -> None:
    with pytest.raises(ss.PlanError, match="expected DIM:SIDE between semicolons"):
        MeshLayout.parse(text)


def test_layout_with_two_sides_for_one_dim_is_rejected() -> None:
    with pytest.raises(ss.PlanError, match="cut along one side of the mesh at most"):
        MeshLayout.parse("batch:rows;batch:cols")


# --- plans ---------------------------------------------------------------------------------------


def case(layout: str, mesh: str, num: int = 4, **more: object) -> Case:
    options = {"layout": MeshLayout.parse(layout), "mesh": Mesh.parse(mesh)}
    return Case("mesh_tf", num, options, **more)  # type: ignore[arg-type]


CASES = [
    case("batch:rows;heads:cols;hidden:cols;vocabulary:cols", "rows:2;cols:2", optimizer="adamw"),
    case("sequence:rows;width:cols", "rows:2;cols:2", sizes={"tied": True}),
    case("heads:a;hidden:b", "a:4;b:1"),
    case("experts:rows;sequence:cols", "rows:2;cols:2", model="moe"),
    case("batch:rows;hidden:cols", "rows:2;cols:2", model="mlp"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_train_the_same_weights_as_one_device(case: Case, tmp_path: Path) -> None:
    check_trains(case, tmp_path)


def test_batch_heads_hidden_layout_equals_megatron_with_data_parallelism() -> None:
    made = case("batch:rows;heads:cols;hidden:cols", "rows:2;cols:2").planned()
    other = ss.Plan(made.graph, range(4))
    tensor_parallel(other, made.graph.ops, range(4), 2)
    assert made.decisions.parts == other.decisions.parts


def test_mesh_tf_without_a_mesh_equals_data_parallel() -> None:
    made = Case("mesh_tf", 4).planned()
    assert made.decisions.parts == Case("data_parallel", 4).planned().decisions.parts


def test_plan_text_contains_layout_and_mesh() -> None:
    text = "mesh_tf:layout=hidden:cols;batch:rows,mesh=rows:2;cols:2"
    sprogram = SProgram.of(text)
    assert sprogram.function is PLANS["mesh_tf"]
    options = ",".join(f"{name}={value}" for name, value in sprogram.options.items())
    assert options == "layout=batch:rows;hidden:cols,mesh=rows:2,cols:2"


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("gpt", {"batch", "sequence", "vocabulary", "heads", "hidden", "width"}),
        ("moe", set(NAMES)),
        ("mlp", {"batch", "hidden"}),
    ],
)
def test_dim_names_follow_from_the_structure_of_the_model(model: str, names: set[str]) -> None:
    plan = Case("data_parallel", 1, model=model).planned()
    dims = named_dims(plan.blocks)
    assert set(dims) >= names
    assert len({dim for each in dims.values() for dim in each}) == sum(map(len, dims.values()))


@pytest.mark.parametrize(
    ("layout", "mesh", "words"),
    [
        ("batch:rows", "rows:2", "the mesh has to be of the plan's 4 devices"),
        ("batch:up", "rows:4", r"batch:up has to be DIM:SIDE; .* the mesh the sides rows"),
        ("d_ff:rows", "rows:4", r"the model has the dims batch \(4\), sequence \(8\), vocab"),
        ("batch:rows;hidden:rows", "rows:4", r"has both batch and hidden, .* the same side rows"),
        ("sequence:rows", "rows:3;cols:1", "the mesh has to be of"),
    ],
)
def test_layouts_that_do_not_fit_mesh_or_model_raise_plan_error(
    layout: str, mesh: str, words: str
) -> None:
    made = case(layout, mesh)
    with pytest.raises(ss.PlanError, match=words):
        made.planned()


def test_mesh_side_that_does_not_divide_a_dim_raises_plan_error() -> None:
    made = case("sequence:rows", "rows:3", num=3)
    with pytest.raises(ss.PlanError, match=r"sequence is 8 in .*, which rows:3 does not divide"):
        made.planned()
