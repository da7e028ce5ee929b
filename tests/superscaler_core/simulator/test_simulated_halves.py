"""Simulated halves of backwards: zero bubble schedules take the time of their definitions."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core import Graph
from superscaler_core.cost import halves
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
from tests.superscaler_core.cases import Case
from tests.superscaler_core.plans.test_halves import CASES as HALVES
from tests.superscaler_core.simulated_chains import free, given
from tests.superscaler_core.small import branched, on_one, two_linears

ROUNDING = 1e-9
"""Relative tolerance: times are whole picoseconds."""


def scaled_chain(num_layers: int) -> Graph:
    """``sum((g x) w0 w1 ...)``: all layers, also the first, have a gradient of their input."""
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
    """One layer per stage. The scale is a separate segment with negligible time."""
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
def test_time_of_zero_bubble_equals_the_closed_form(d: int, n: int, f: float, b: float) -> None:
    """The idle time is ``(D - 1)(F + I - W)``. I and W are each half of a layer's backward."""
    compiled = pipelined(zero_bubble(d, n))
    found = simulate(compiled, given(compiled.plan.graph, f, b))
    assert found.secs == pytest.approx(n * (f + b) + (d - 1) * f, rel=ROUNDING)
    whole = pipelined(one_f_one_b(d, n))
    slower = simulate(whole, given(whole.plan.graph, f, b))
    assert slower.secs == pytest.approx((n + d - 1) * (f + b), rel=ROUNDING)


def test_overhead_of_a_split_backward_is_in_its_second_half() -> None:
    (d, n), (f, b, more) = (3, 5), (3e-3, 2e-3, 1e-3)
    compiled, whole = pipelined(zero_bubble(d, n)), pipelined(one_f_one_b(d, n))
    profile = replace(given(compiled.plan.graph, f, b), split_secs=more)
    # The scale is not split, as its input has no gradient. The last worker waits for the first F.
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
def test_simulated_split_schedules_equal_their_timeline(order: Schedule) -> None:
    compiled = pipelined(order)
    found = simulate(compiled, given(compiled.plan.graph, 1e-3, 2e-3))
    paper = timeline(order, {"F": 1, "I": 1, "W": 1, "B": 2})
    assert found.secs == pytest.approx(float(paper.makespan) * 1e-3, rel=ROUNDING)
    for name in ("bubble_of_makespan", "bubble_of_ideal", "bubble_of_span"):
        expected = float(Fraction(getattr(paper, name)))
        assert getattr(found, name) == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)


@pytest.mark.parametrize("order", [one_f_one_b(3, 4), split_backward(one_f_one_b(3, 4), 1)])
def test_separate_recomputation_equals_its_timeline_and_shortens_the_step(order: Schedule) -> None:
    apart = recompute_apart(order)
    compiled = pipelined(apart, recomputes=True)
    found = simulate(compiled, given(compiled.plan.graph, 1e-3, 2e-3))
    paper = timeline(apart, {"F": 1, "R": 1, "I": 1, "W": 1, "B": 2})
    assert found.secs == pytest.approx(float(paper.makespan) * 1e-3, rel=ROUNDING)
    inside = pipelined(order, recomputes=True)
    slower = simulate(inside, given(inside.plan.graph, 1e-3, 2e-3))
    assert slower.secs > found.secs


def test_trace_names_both_halves_of_a_backward() -> None:
    compiled = pipelined(recompute_apart(zero_bubble(2, 2)), recomputes=True)
    found = simulate(compiled, given(compiled.plan.graph, 1e-3, 2e-3))
    names = {event.get("cat") for event in events(found)}
    assert {"forward", "recomputation", "backward for inputs", "backward for weights"} <= names


def test_picture_shows_both_halves_and_the_result_lists_their_assumption(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    compiled = pipelined(recompute_apart(zero_bubble(2, 2)), recomputes=True)
    found = simulate(compiled, given(compiled.plan.graph, 1e-3, 2e-3))
    found.draw(tmp_path / "step.svg")
    picture = (tmp_path / "step.svg").read_text()
    assert all(name in picture for name in ("gradients of weights", "recomputation"))
    assert found.assumptions[-1].endswith("half of its backward for either")
    whole = pipelined(one_f_one_b(2, 2))
    assert found.assumptions[-1] not in simulate(whole, given(whole.plan.graph, 1, 1)).assumptions


@pytest.mark.parametrize("case", HALVES[::2], ids=str)
def test_split_backwards_compute_and_send_as_much_as_whole_ones(case: Case) -> None:
    """This holds for separate recomputations (R) too, except that R in ZeRO-3 gathers again."""
    found, whole = (
        simulate(one.compiled(), PROFILES["a100"]) for one in (case, replace(case, rewrite=""))
    )
    for device, secs in whole.compute_secs.items():
        assert found.compute_secs[device] == pytest.approx(secs, rel=1e-6)
    sent, before = (sum(level.sent_bytes for level in one.levels) for one in (found, whole))
    gathers_again = case.plan.startswith("zero3") and "apart" in case.rewrite
    assert (sent > before) if gathers_again else (sent == before)


# --- shares of a segment's backward in both halves ----------------------------------------------


def shares(graph: Graph) -> tuple[float, float]:
    """Seconds of I and W of a graph on one device, if the backward of every op takes a second."""
    made = ss.compile(on_one(ss.Plan(graph, [0]))).materialized
    (segment,) = made.stages[0].steps[0]
    inputs, weights = zip(*halves(segment.ops), strict=True)
    return sum(inputs), sum(weights)


def test_backward_without_input_gradients_is_entirely_in_the_weight_half() -> None:
    """The input of the model has no gradient, so I takes no time."""
    assert shares(two_linears()) == (0.0, 4.0)
    assert shares(branched()) == (0.0, 9.0)


def test_backward_of_a_later_layer_is_divided_equally_between_both_halves() -> None:
    compiled = pipelined(split_backward(gpipe(2, 1)))
    steps = compiled.materialized.stages[1].steps[1]
    (segment,) = steps
    assert [op.kind for op in segment.ops] == ["linear", "sum"]
    assert halves(segment.ops) == ((0.5, 0.5), (1.0, 0.0))
