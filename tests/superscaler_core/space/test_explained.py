"""Laws of explained plans: mesh and choices are those of the plan, for every planner."""

from __future__ import annotations

from typing import Any

import pytest

import superscaler_core as ss
from superscaler_core.plans import PLANS, fill
from superscaler_core.simulator import PROFILES
from superscaler_core.space.explained import explain_op
from tests.superscaler_core.cost.choices import TWO_HOSTS
from tests.superscaler_core.space.models import captured

UP = "layers.1.mlp.up:linear"


def explained(name: str, op: str = UP, **options: Any) -> str:
    plan = ss.Plan(captured("gpt"), range(4))
    fill(plan, PLANS[name], options)
    return explain_op(plan, op, ss.CostModel(plan.graph, PROFILES["a100"], TWO_HOSTS))


@pytest.mark.parametrize(
    ("name", "options", "chosen"),
    [
        ("data_parallel", {}, "b/4"),
        ("megatron", {}, "n/4"),
        ("hybrid", {"tp": 2}, "b/2 n/2"),
        ("hybrid", {"tp": 2, "pp": 2, "microbatches": 2}, "n/2"),
    ],
)
def test_the_marked_choice_is_the_cut_of_the_plan(
    name: str, options: dict[str, Any], chosen: str
) -> None:
    text = explained(name, **options)
    (marked,) = [line for line in text.splitlines() if line.startswith("*")]
    assert marked.startswith(f"*  {chosen} ")
    assert marked.endswith("+0.000")
    assert "none of these" not in text


def test_cut_that_is_not_among_the_choices_is_reported() -> None:
    assert "The plan cuts it in a way that is none of these" in explained("coshard")


def test_unknown_op_raises_plan_error_with_existing_names() -> None:
    with pytest.raises(ss.PlanError, match=r"has no op 'mlp\.up'; it has .*mlp\.up:linear"):
        explained("megatron", "mlp.up")
