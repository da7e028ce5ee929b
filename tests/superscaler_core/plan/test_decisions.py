"""Decisions: a value that is read back from its text and gives the same program."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.graph import TokenSlices
from superscaler_core.plan import Chosen, Decisions, PlacedPart
from tests.superscaler_core.cases import Case
from tests.superscaler_core.program.test_step_program import CASES


@pytest.mark.many(20)
@pytest.mark.parametrize("case", {case.plan: case for case in CASES}.values(), ids=str)
def test_decisions_round_trip_through_text_and_give_the_same_program(case: Case) -> None:
    compiled = case.compiled()
    decisions = compiled.plan.decisions
    read = Decisions.parse(str(decisions))
    assert read == decisions
    assert hash(read) == hash(decisions)
    again = ss.Plan(compiled.plan.graph, compiled.plan.devices)
    again.decide(read)
    assert again.decisions == decisions
    assert ss.compile(again).files == compiled.files


def test_decisions_with_token_slices_apply_to_the_captured_graph() -> None:
    case = Case("terapipe", 2, {"lengths": (4, 3, 1)}, sizes={"layers": 2})
    compiled = case.compiled()
    decisions = compiled.plan.decisions
    assert "\nslices 4,3,1 at layers.1." in str(decisions)
    again = ss.Plan(case._graph(), compiled.plan.devices)
    again.decide(Decisions.parse(str(decisions)))
    assert again.decisions == decisions
    assert ss.compile(again).files == compiled.files
    other = replace(decisions, slices=TokenSlices((5, 3), ()))
    with pytest.raises(PlanError, match=r"about slices 5,3: .* is of slices 4,3,1 at"):
        ss.Plan(compiled.plan.graph, compiled.plan.devices).decide(other)
    with pytest.raises(PlanError, match=r"slices of \[5, 4\] tokens: .* sequences of \[8\] tokens"):
        ss.Plan(case._graph(), again.devices).decide(replace(other, slices=TokenSlices((5, 4))))


def test_changes_to_a_copied_plan_do_not_affect_the_original() -> None:
    plan = Case("megatron", 2).compiled().plan
    before = plan.decisions
    other = copy.copy(plan)
    other.op_assign(plan.graph.ops[0], 1)
    other.recompute(plan.graph.ops[:3])
    other.note("something else")
    assert plan.decisions == before != other.decisions


def test_edited_decisions_text_is_applied() -> None:
    plan = Case("data_parallel", 2).compiled().plan
    text = str(plan.decisions)
    op = plan.graph.ops[3]
    edited = Decisions.parse(f"# one block again\n{text}\n\nrecompute {op.name}\n")
    other = ss.Plan(plan.graph, plan.devices)
    other.decide(edited)
    assert [other.recompute_group(part) > 0 for part in other.parts(op)] == [True, True]
    assert "run.backward" in ss.compile(other).files[0]


def test_decisions_of_many_lines_round_trip() -> None:
    notes = tuple(map(str, range(20_000)))
    decisions = Decisions("model", (0, 1), notes=notes)
    assert Decisions.parse(str(decisions)) == decisions


@pytest.mark.parametrize(
    "line, words",
    [
        ("op a 0", "line 2 of a plan, 'op a 0': an op has one line"),
        ("op a: 0 b(1)", "'b\\(1\\)' is none of LOOP"),
        ("order a", "an order is"),
        ("slices 4,x", "slices are"),
        ("what a", "a line begins with op, stage, order"),
        ("schedule 1f1b stages=2", "the schedule of a plan"),
    ],
)
def test_unreadable_line_of_decisions_raises_plan_error(line: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Decisions.parse(f"plan of x on 0\n{line}")


def test_order_of_windows_matters_and_order_of_parts_does_not() -> None:
    graph = Case("zero3", 2).compiled().plan.graph
    plans = []
    for order in ((True, False), (False, True)):
        plan = ss.Plan(graph, range(2))
        for op in graph.ops:
            plan.op_assign(plan.op_trans(op, ss.replicate(2)), [0, 1])
        for gathers in order:
            (plan.unshard if gathers else plan.reduce_grads)(graph.ops)
        plans.append(plan)
    first, other = (plan.decisions for plan in plans)
    assert first != other
    for plan in plans:
        again = plan.copy()
        assert again.fsdp_units == plan.fsdp_units
        assert ss.compile(again).files == ss.compile(plan).files
    backwards = replace(first, parts=dict(reversed(first.parts.items())))
    assert backwards == first
    assert hash(backwards) == hash(first)


def test_decisions_with_spaces_in_names_round_trip() -> None:
    class Spaced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("my layer", nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.get_submodule("my layer")(x).square().mean()

    graph = ss.capture(Spaced(), (torch.ones(2, 4),), name="a model of mine")
    plan = ss.Plan(graph, range(2))
    for op in graph.ops:
        plan.spread(op, plan.devices, [ss.Axis(2, (plan.dims.batch,))])
    plan.recompute(graph.ops[:2])
    plan.op_order(plan.parts(graph.ops[0])[0], graph.ops[1])
    assert any(" " in op.name for op in graph.ops)
    assert Decisions.parse(str(plan.decisions)) == plan.decisions
    program = ss.compile(plan).step_program
    assert ss.StepProgram.parse(str(program)) == program


def test_decisions_that_do_not_fit_the_plan_raise_plan_error() -> None:
    plan = Case("megatron", 2).compiled().plan
    decisions = plan.decisions
    with pytest.raises(PlanError, match="the plan has decisions already"):
        plan.decide(decisions)
    with pytest.raises(PlanError, match=r"about GPT on devices \[0, 1\]: .* on \[0, 1, 2\]"):
        ss.Plan(plan.graph, range(3)).decide(decisions)
    first = plan.graph.ops[0].name
    for wrong, words in (
        (replace(decisions, stages=("nothing",)), "has no op 'nothing'"),
        (replace(decisions, parts={first: (PlacedPart((("zz", 0, 1),)),)}), "no loop 'zz'"),
        (replace(decisions, parts={first: (PlacedPart(device=7),)}), "to device 7"),
        (replace(decisions, recomputed=((Chosen("no op"),),)), "has no op 'no op'"),
    ):
        with pytest.raises(PlanError, match=words):
            ss.Plan(plan.graph, plan.devices).decide(wrong)
