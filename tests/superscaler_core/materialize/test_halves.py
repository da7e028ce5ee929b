"""Blocks of I, W and R: their instructions, and checks of step programs with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import superscaler_core as ss
from superscaler_core.program import Event, Verb
from superscaler_core.run.evaluate import evaluate
from superscaler_core.schedules import Action, ActionKind, one_f_one_b, split_backward
from tests.superscaler_core.cases import Case
from tests.superscaler_core.small import on_one, two_linears


def block(case: Case, run: ActionKind, stage: int = 0) -> list[str]:
    """The instructions of a stage, without their devices."""
    blocks = case.compiled().step_program.blocks
    return [str(instruction).partition(" on ")[0] for instruction in blocks[stage, run]]


TP = Case("hybrid", 4, {"tp": 2, "pp": 2, "microbatches": 2}, rewrite="halves")


def kinds_of(case: Case, run: ActionKind, stage: int = 0) -> list[Verb]:
    return [i.kind for i in case.compiled().step_program.blocks[stage, run]]


def test_i_block_has_all_communication_and_w_block_only_weight_gradients() -> None:
    whole = kinds_of(replace(TP, rewrite=""), ActionKind.BACKWARD, 1)
    inputs, weights = kinds_of(TP, ActionKind.INPUTS, 1), kinds_of(TP, ActionKind.WEIGHTS, 1)
    assert set(weights) == {Verb.BACKWARD_WEIGHTS}
    halves = {Verb.BACKWARD_INPUTS: Verb.BACKWARD}
    assert [halves.get(kind, kind) for kind in inputs] == whole
    assert inputs.count(Verb.BACKWARD_INPUTS) == len(weights)


def test_w_block_has_the_order_of_the_i_block() -> None:
    inputs = [line for line in block(TP, ActionKind.INPUTS, 1) if line.startswith("I ")]
    assert [line.replace("I ", "W ") for line in inputs] == block(TP, ActionKind.WEIGHTS, 1)


def test_windows_are_released_in_i_and_reduced_in_w() -> None:
    case = Case("zero3", 2, rewrite="halves")
    assert Verb.REDUCE not in kinds_of(case, ActionKind.INPUTS)
    inputs, weights = kinds_of(case, ActionKind.INPUTS), kinds_of(case, ActionKind.WEIGHTS)
    assert inputs.count(Verb.UNSHARD) == inputs.count(Verb.RESHARD) > 0
    assert weights.count(Verb.REDUCE) == inputs.count(Verb.UNSHARD)
    assert Verb.UNSHARD not in weights


BACK = ("send-back", "receive-back")
"""What a backward leaves for other stages, and takes from them."""


def test_separate_recomputation_block_has_all_rerun_instructions() -> None:
    case = Case("hybrid", 4, {"tp": 2, "pp": 2, "microbatches": 2, "keep": ss.Keep.BLOCK_INPUTS})
    inside = block(case, ActionKind.BACKWARD)
    apart = replace(case, rewrite="apart")
    again, back = block(apart, ActionKind.RECOMPUTE), block(apart, ActionKind.BACKWARD)
    assert sorted(again + back) == sorted(inside)
    assert {line.split()[0] for line in back} <= {"B", "move-back", *BACK}
    assert not {"B", "move-back"}.intersection(line.split()[0] for line in again)


# --- weights whose gradients read weights -------------------------------------------------------


def gated() -> ss.Graph:
    """``sum((x + shift) (up gate)^T)``: the gradient of either matrix reads the other."""
    builder = ss.GraphBuilder("gated")
    up = builder.parameter("up", (8, 6), "float64")
    gate = builder.parameter("gate", (8, 6), "float64")
    shift = builder.parameter("shift", (6,), "float64")
    x = builder.input("x", (4, 6), "float64")
    (h,) = builder.op("add", "b k, k -> b k", [x, shift], [((4, 6), "float64")], "{x0} + {x1}")
    (w,) = builder.op("times", "n k, n k -> n k", [up, gate], [((8, 6), "float64")],
                      "{x0} * {x1}")  # fmt: skip
    (y,) = builder.op("linear", "b k+, n k+ -> b n", [h, w], [((4, 8), "float64")],
                      "F.linear({x0}, {x1})", flops=2.0)  # fmt: skip
    (loss,) = builder.op("sum", "b+ n+ -> ()", [y], [((), "float64")], "({x0} * {x0}).sum()")
    return builder.build(loss)


@pytest.mark.parametrize("which, num_windows", [("gated", 1), ("two_linears", 1), ("apart", 0)])
def test_w_block_gathers_the_weights_whose_values_it_reads(
    which: str, num_windows: int, tmp_path: Path
) -> None:
    """The gradients are also those of one device, though windows are released between I and W.

    If both layers share a window, the first layer's gradient is in W and reads the second layer's
    weight. If each layer has a window, each is a segment, and gradients of inputs are in I.
    """
    graph = gated() if which == "gated" else two_linears()
    plan = ss.Plan(graph, [0, 1])
    for op in graph.ops:
        cut = (plan.dims.batch,) if op.kind != "times" else ()
        plan.spread(op, plan.devices, [ss.Axis(2, cut)])
    for name in graph.parameters:
        plan.op_assign(plan.op_trans(plan.update(name), ss.split("d0", 2)), plan.devices)
    for group in [[op] for op in graph.ops] if which == "apart" else [graph.ops]:
        plan.unshard(group)
    plan.op_order(split_backward(one_f_one_b(1, 2)))
    compiled = ss.compile(plan)
    kinds = [i.kind for i in compiled.step_program.blocks[0, ActionKind.WEIGHTS]]
    assert kinds.count(Verb.UNSHARD) == num_windows
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.randn(t.shape, dtype=torch.float64, generator=generator)
        for name, t in graph.parameters.items()
    }
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)

    def work(trainer: ss.Trainer) -> dict[str, Tensor]:
        trainer.load_state_dict(state)
        trainer.step(x)
        return {name: p.grad for name, p in trainer.named_parameters() if p.grad is not None}

    weights = {name: value.clone().requires_grad_() for name, value in state.items()}
    for half in x.chunk(2):
        (evaluate(graph, (half,), weights) / 2).backward()
    found = ss.run_threads(compiled.save(tmp_path), work, range(2))
    for name, weight in weights.items():
        whole = torch.cat([found[rank][name] for rank in range(2)])
        torch.testing.assert_close(whole, weight.grad, rtol=1e-12, atol=1e-12)


# --- errors -------------------------------------------------------------------------------------


def test_separate_recomputation_of_only_some_microbatches_raises_order_error() -> None:
    order = ss.Schedule.parse("some stages=1 microbatches=2\nworker 0: 0F0 0R0 0B0 0F1 0B1")
    plan = on_one(ss.Plan(two_linears(), [0]))
    plan.op_order(order)
    with pytest.raises(ss.OrderError, match=r"an R for microbatches \[0\] of stage 0 and none for"):
        ss.compile(plan)


def program() -> ss.StepProgram:
    return (
        Case("hybrid", 4, TP.options | {"keep": ss.Keep.SEGMENT_INPUTS}, rewrite="halves-apart")
        .compiled()
        .step_program
    )


def events(change: Callable[[list[Event]], list[Event]]) -> ss.StepProgram:
    made = program()
    return replace(made, events=tuple(change(list(made.events))))


def is_kind(event: Event, kind: ActionKind) -> bool:
    return isinstance(event, Action) and event.kind is kind


def test_weight_half_before_its_input_half_raises_plan_error() -> None:
    def offloaded(given: list[Event]) -> list[Event]:
        first = next(e for e in given if is_kind(e, ActionKind.WEIGHTS))
        return [first, *(e for e in given if e != first)]

    with pytest.raises(ss.PlanError, match=r"half:.*: the gradients of the inputs come first"):
        events(offloaded).check()


@pytest.mark.parametrize(
    "kind, words",
    [
        (ActionKind.WEIGHTS, r"sum:.*: no backward has added to it"),
        (ActionKind.INPUTS, r"out-back:.*: its stage has not left it"),
    ],
)
def test_missing_events_of_one_half_raise_plan_error(kind: ActionKind, words: str) -> None:
    with pytest.raises(ss.PlanError, match=words):
        events(lambda given: [e for e in given if not is_kind(e, kind)]).check()


def test_program_without_recomputation_events_is_valid() -> None:
    """Without R, the backward of a recomputed segment runs the segment again."""
    kind = ActionKind.RECOMPUTE
    assert any(is_kind(e, kind) for e in program().events)
    events(lambda given: [e for e in given if not is_kind(e, kind)]).check()
