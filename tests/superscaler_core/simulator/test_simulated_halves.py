"""Simulated halves of backwards: zero bubbles take what their definitions say."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core.cost.halves import halves
from superscaler_core.graph.graph import Graph
from superscaler_core.schedules import (
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    recompute_apart,
    split_backward,
    timeline,
    zero_bubble,
)
from superscaler_core.simulator import PROFILES, simulate
from superscaler_core.simulator.trace import events
from tests.superscaler_core.plans.test_halves import CASES as HALVES
from tests.superscaler_core.simulated_chains import free, given
from tests.superscaler_core.small import branched, on_one, two_linears
from tests.superscaler_core.training import Case

ROUNDING = 1e-9
"""Relative: times are whole picoseconds."""


def scaled_chain(num_layers: int) -> Graph:
    """``sum((g x) w0 w1 ...)``: all layers, the first too, have gradients of what they read."""
    builder = ss.GraphBuilder("scaled_chain")
    x = builder.input("x", (4, 8), "float32")
    gain = builder.parameter("gain", (8,), "float32")
    shape = [((4, 8), "float32")]
    (x,) = builder.op("mul", "b k, k -> b k", [x, gain], shape, "{x0} * {x1}", saves=(0, 1))
    for i in range(num_layers):
        weight = builder.parameter(f"layers.{i}.weight", (8, 8), "float32")
        (x,) = builder.op("linear", "b k+, n k+ -> b n", [x, weight], shape,
                          "F.linear({x0}, {x1})", flops=2.0)  # fmt: skip
    (loss,) = builder.op("sum", "b+ n+ -> ()", [x], [((), "float32")], "{x0}.sum()")
    return builder.build(loss)


def pipelined(order: Schedule, *, recomputes: bool = False) -> ss.Compiled:
    """A layer a stage; the scale is a segment of its own, which computes nothing to speak of."""
    graph = scaled_chain(order.num_stages)
    plan = ss.Plan(graph, range(order.num_workers))
    for stage in plan.pipeline([i + 1 for i in range(1, order.num_stages)]):
        for op in stage.ops:
            plan.op_assign(op, stage.index % order.num_workers)
    plan.recompute(graph.ops[:1])
    for op in graph.ops[1:-1] if recomputes else ():
        plan.recompute([op])
    plan.op_order(order)
    return ss.compile(plan, topology=free(order.num_workers))


@pytest.mark.parametrize(("d", "n"), [(2, 4), (3, 5), (4, 8)])
@pytest.mark.parametrize(("f", "b"), [(1e-3, 2e-3), (3e-3, 2e-3)])
def test_zero_bubble_takes_its_closed_form(d: int, n: int, f: float, b: float) -> None:
    """Idle is ``(D - 1)(F + I - W)``, and I and W are half a backward of a layer each."""
    compiled = pipelined(zero_bubble(d, n))
    found = simulate(compiled, given(compiled.plan.graph, f, b))
    assert found.secs == pytest.approx(n * (f + b) + (d - 1) * f, rel=ROUNDING)
    whole = pipelined(one_f_one_b(d, n))
    slower = simulate(whole, given(whole.plan.graph, f, b))
    assert slower.secs == pytest.approx((n + d - 1) * (f + b), rel=ROUNDING)


def test_splitting_a_backward_takes_its_overhead_in_the_second_half() -> None:
    (d, n), (f, b, more) = (3, 5), (3e-3, 2e-3, 1e-3)
    compiled, whole = pipelined(zero_bubble(d, n)), pipelined(one_f_one_b(d, n))
    profile = replace(given(compiled.plan.graph, f, b), split_secs=more)
    # The scale, whose input has no gradient, is not split. The last worker waits for the first F.
    secs = n * (f + b + more) + (d - 1) * f
    assert simulate(compiled, profile).secs == pytest.approx(secs, rel=ROUNDING)
    assert simulate(whole, profile).secs == pytest.approx((n + d - 1) * (f + b), rel=ROUNDING)


ORDERS = [
    split_backward(gpipe(3, 4)),
    split_backward(one_f_one_b(3, 4), 2),
    split_backward(interleaved(2, 4, 2), lambda worker: worker),
    Schedule.parse(
        "by-hand stages=2 microbatches=3\n"
        "worker 0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2\n"
        "worker 1: 1F0 1I0 1F1 1I1 1F2 1B2 1W0 1W1"
    ),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_halves_take_what_the_schedule_takes(order: Schedule) -> None:
    compiled = pipelined(order)
    found = simulate(compiled, given(compiled.plan.graph, 1e-3, 2e-3))
    paper = timeline(order, {"F": 1, "I": 1, "W": 1, "B": 2})
    assert found.secs == pytest.approx(float(paper.makespan) * 1e-3, rel=ROUNDING)
    for name in ("bubble_of_makespan", "bubble_of_ideal", "bubble_of_span"):
        expected = float(Fraction(getattr(paper, name)))
        assert getattr(found, name) == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)


@pytest.mark.parametrize("order", [one_f_one_b(3, 4), split_backward(one_f_one_b(3, 4), 1)])
def test_a_recomputation_apart_takes_a_forward_and_leaves_it_out_of_the_backward(
    order: Schedule,
) -> None:
    apart = recompute_apart(order)
    compiled = pipelined(apart, recomputes=True)
    found = simulate(compiled, given(compiled.plan.graph, 1e-3, 2e-3))
    paper = timeline(apart, {"F": 1, "R": 1, "I": 1, "W": 1, "B": 2})
    assert found.secs == pytest.approx(float(paper.makespan) * 1e-3, rel=ROUNDING)
    inside = pipelined(order, recomputes=True)
    slower = simulate(inside, given(inside.plan.graph, 1e-3, 2e-3))
    assert slower.secs > found.secs


def test_a_trace_names_the_halves() -> None:
    compiled = pipelined(recompute_apart(zero_bubble(2, 2)), recomputes=True)
    found = simulate(compiled, given(compiled.plan.graph, 1e-3, 2e-3))
    names = {event.get("cat") for event in events(found)}
    assert {"forward", "recomputation", "backward for inputs", "backward for weights"} <= names


def test_a_picture_shows_the_halves_and_what_they_assume(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    compiled = pipelined(recompute_apart(zero_bubble(2, 2)), recomputes=True)
    found = simulate(compiled, given(compiled.plan.graph, 1e-3, 2e-3))
    found.draw(tmp_path / "step.svg")
    picture = (tmp_path / "step.svg").read_text()
    assert all(name in picture for name in ("gradients of weights", "recomputation"))
    assert found.assumptions[-1].endswith("half of its backward for either")
    whole = pipelined(one_f_one_b(2, 2))
    assert found.assumptions[-1] not in simulate(whole, given(whole.plan.graph, 1, 1)).assumptions


@pytest.mark.parametrize("case", HALVES, ids=str)
def test_halves_compute_and_send_what_whole_backwards_do(case: Case) -> None:
    """Recomputations apart too; but for weights that an R of its own gathers for itself."""
    found, whole = (
        simulate(one.compiled(), PROFILES["a100"]) for one in (case, replace(case, rewrite=""))
    )
    for device, secs in whole.compute_secs.items():
        assert found.compute_secs[device] == pytest.approx(secs, rel=1e-6)
    sent, before = (sum(level.sent_bytes for level in one.levels) for one in (found, whole))
    gathers_again = case.plan.startswith("zero3") and "apart" in case.rewrite
    assert (sent > before) if gathers_again else (sent == before)


# --- what of a segment's backward is in which half ----------------------------------------------


def shares(graph: Graph) -> tuple[float, float]:
    """I and W of a graph on one device, if the backward of every op takes a second."""
    made = ss.compile(on_one(ss.Plan(graph, [0]))).materialized
    (segment,) = made.stages[0].steps[0]
    inputs, weights = zip(*halves(segment.ops), strict=True)
    return sum(inputs), sum(weights)


def test_what_is_made_of_weights_alone_is_in_w() -> None:
    """The input has no gradient, so nothing of the model is for it."""
    assert shares(two_linears()) == (0.0, 4.0)
    assert shares(branched()) == (0.0, 9.0)


def test_a_layer_that_reads_an_activation_has_half_of_its_backward_in_either_half() -> None:
    compiled = pipelined(split_backward(gpipe(2, 1)))
    steps = compiled.materialized.stages[1].steps[1]
    (segment,) = steps
    assert [op.kind for op in segment.ops] == ["linear", "sum"]
    assert halves(segment.ops) == ((0.5, 0.5), (1.0, 0.0))
