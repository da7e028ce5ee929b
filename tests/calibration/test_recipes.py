"""Laws of recipes: named, correct plans; the first is the choice of the cost model."""

from __future__ import annotations

import pytest

import rvdcomm as rv
from rvdcomm.calibration.recipes import MAX_PLANS, MODEL, plan_of, recipes
from tests.oracle import plan_faults

HOSTS = rv.Topology.hosts([range(2), range(2, 4)], rv.Link(1e-5, 1e9), rv.Link(1e-4, 1e8))
PAIRS = [
    ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)"),
    ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"),
    ("R(1)V(2)D(2,1)", "R(1)V(1)D(1,4)"),
    ("R(1)V(1)D(3,1)", "R(2)V(1)D(1,2)"),
]


def model_of(src: str, dst: str, shape: tuple[int, int] = (6, 10)) -> rv.Plan:
    return rv.plan(rv.Layout(shape, src), rv.Layout(shape, dst), "float32", HOSTS)


@pytest.mark.parametrize("src, dst", PAIRS)
def test_every_recipe_moves_the_tensor_correctly(src: str, dst: str) -> None:
    """They are several different plans, with the same steps for tensors of another size."""
    model, larger = model_of(src, dst), model_of(src, dst, (12, 20))
    found = recipes(model, None)
    assert next(iter(found.items())) == (MODEL, model)
    assert 1 < len(found) <= MAX_PLANS
    assert len({str(plan.path) for plan in found.values()}) == len(found)
    for name, plan in found.items():
        assert plan_faults(plan) == []
        kinds = [step.kind for step in plan_of(name, larger, None).path.steps]
        assert kinds == [step.kind for step in plan.path.steps]


def test_unknown_recipe_falls_back_to_the_choice_of_the_cost_model() -> None:
    model = model_of(*PAIRS[0])
    assert plan_of("candidate 99", model, None) is model


def test_recipes_beyond_the_memory_limit_are_left_out() -> None:
    model = model_of(*PAIRS[1])
    peaks = {name: plan.cost.peak_bytes for name, plan in recipes(model, None).items()}
    limit = max(peaks.values()) - 1
    fitting = recipes(model, limit)
    assert set(fitting) == {name for name, peak in peaks.items() if peak <= limit or name == MODEL}
    assert len(fitting) < len(peaks)
    (beyond,) = {name for name in peaks if name not in fitting}
    assert plan_of(beyond, model, limit) is model


def test_equal_layouts_have_one_recipe() -> None:
    layout = rv.Layout((6, 10), "R(1)V(1)D(4,1)")
    assert list(recipes(rv.plan(layout, layout, "float32", HOSTS), None)) == [MODEL]
