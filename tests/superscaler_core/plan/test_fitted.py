"""Decisions for another batch: ranges in proportion, as the plan itself would cut."""

from __future__ import annotations

import pytest

import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.models import build, example_inputs
from superscaler_core.plan import Decisions, Plan
from superscaler_core.plans import PLANS, fill, parse_plan

WORDS = [
    "data_parallel",
    "megatron",
    "megatron_sp",
    "sequence_parallel",
    "zero1",
    "zero3",
    "recompute",
    "hybrid:tp=2,pp=1,microbatches=1",
    "hybrid:tp=2,pp=2,microbatches=4",
    "hybrid:tp=1,pp=2,microbatches=4,zero=1,keep=block_inputs",
    "coshard:parts=2",
]


def graph(samples: int) -> ss.Graph:
    return ss.capture(build("gpt"), example_inputs("gpt", samples))


def filled(words: str, samples: int) -> Plan:
    name, options = parse_plan(words)
    plan = Plan(graph(samples), range(4))
    fill(plan, PLANS[name], options)
    return plan


@pytest.mark.many(14)
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("samples", [4, 8, 16])
def test_decisions_of_a_batch_fit_another_one_as_the_plan_itself_does(
    words: str, samples: int
) -> None:
    decisions = Decisions.parse(str(filled(words, 8).decisions))
    plan = Plan(graph(samples), range(4))
    plan.decide(decisions, fit=True)
    assert plan.decisions == filled(words, samples).decisions
    if samples == 4 and words == "data_parallel":
        with pytest.raises(PlanError):
            Plan(graph(samples), range(4)).decide(decisions)


def test_samples_that_do_not_divide_are_cut_unevenly() -> None:
    plan = Plan(graph(6), range(4))
    plan.decide(filled("data_parallel", 8).decisions, fit=True)
    first = plan.decisions.parts[plan.graph.ops[0].name]
    assert [piece[1:] for part in first for piece in part.pieces] == [
        (0, 1),
        (1, 3),
        (3, 4),
        (4, 6),
    ]
    ss.compile(plan)


def test_fewer_samples_than_parts_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"has 3 iterations, too few for the part \w+\[0:2\] of 8"):
        Plan(graph(3), range(4)).decide(filled("data_parallel", 8).decisions, fit=True)
