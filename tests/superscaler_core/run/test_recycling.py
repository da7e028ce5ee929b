"""Recycling: a result of one pass is an input of the next, and the last pass is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.schedules import Action, Schedule

BATCH, WIDTH, MICROBATCHES = 4, 6, 3


class Loop(nn.Module):
    """Two blocks with a recycled result, dropout, and a tensor that skips the second block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.tanh(self.first(x + self.norm(before)))
        made = self.drop(torch.tanh(self.second(inner))) + inner
        return made.square().mean(), made


def new_model() -> Loop:
    torch.manual_seed(0)
    return Loop().double()


def graph_of(model: nn.Module, results: tuple[int, ...] = ()) -> ss.Graph:
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    return ss.capture(model, (x, torch.zeros_like(x)), recycled={"before": 1}, results=results)


def schedule(num_stages: int, passes: int) -> Schedule:
    """All passes of all microbatches, then all forwards, then all backwards."""
    rows = [
        (
            *(Action("f", s, mb, t) for t in range(passes) for mb in range(MICROBATCHES)),
            *(Action("F", s, mb) for mb in range(MICROBATCHES)),
            *(Action("B", s, mb) for mb in range(MICROBATCHES)),
        )
        for s in range(num_stages)
    ]
    return Schedule("passes", num_stages, MICROBATCHES, tuple(rows))


def program(model: nn.Module, num_stages: int, passes: int, **how: bool) -> ss.Compiled:
    """A program in which every stage is on two devices."""
    graph = graph_of(model, (1,) if how.get("results") else ())
    plan = ss.Plan(graph, range(2 * num_stages))
    stages = plan.pipeline([graph.ops_in("second")[0]] if num_stages == 2 else [])
    for stage in stages:
        devices = [2 * stage.index, 2 * stage.index + 1]
        # The second stage is split along another dim, so that recycling changes the layout.
        dims = (plan.dims.batch, plan.dims.of("second.weight", 0))[stage.index :]
        for op in stage.ops:
            plan.spread(op, devices, [ss.Axis(2, dims)])
        if how.get("recompute"):
            plan.recompute(stage.ops)
        if how.get("gather"):
            plan.unshard(stage.ops)
    plan.op_order(schedule(num_stages, passes))
    return ss.compile(plan)


def alone(model: nn.Module, batch: Tensor, passes: int) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a plain loop."""
    total = 0.0
    for x in batch.chunk(MICROBATCHES):
        made = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(passes):
                made = model(x, made)[1]
        loss = model(x, made)[0] / MICROBATCHES
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "num_stages, passes, how",
    [
        (1, 3, {}),
        (2, 0, {}),
        (1, 1, {"recompute": True}),
        (2, 3, {"recompute": True}),
        (1, 0, {"gather": True}),
        (2, 1, {"gather": True}),
    ],
    ids=str,
)
def test_a_program_trains_the_last_turn_of_a_plain_loop(
    tmp_path: Path, num_stages: int, passes: int, how: dict[str, bool]
) -> None:
    model = new_model()
    batch = torch.randn(MICROBATCHES * BATCH, WIDTH, dtype=torch.float64)
    folder = program(model, num_stages, passes, **how).save(tmp_path)

    def work(trainer: ss.Trainer) -> tuple[list[float], dict[str, Tensor]]:
        trainer.load_state_dict(model.state_dict())
        losses = [trainer.step(batch).item() for _ in range(2)]
        return losses, {n: p.grad for n, p in trainer.named_parameters() if p.grad is not None}

    found = ss.run_threads(folder, work, ranks=range(2 * num_stages))
    loss, grads = alone(model, batch, passes)
    for losses, _ in found.values():
        assert losses == pytest.approx([loss, loss], rel=1e-12)
    for name in ("norm.weight", "first.bias"):
        # Both steps added to the gradient.
        torch.testing.assert_close(found[0][1][name], 2 * grads[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_results_are_those_of_the_last_turn(tmp_path: Path, num_stages: int) -> None:
    model = new_model()
    batch = torch.randn(MICROBATCHES * BATCH, WIDTH, dtype=torch.float64)
    folder = program(model, num_stages, passes=2, results=True).save(tmp_path)

    def work(trainer: ss.Trainer) -> Tensor:
        trainer.step(batch)
        return trainer.results["1"]

    made = torch.zeros_like(batch)
    with torch.no_grad():
        for _ in range(3):
            made = model(batch, made)[1]
    for found in ss.run_threads(folder, work, ranks=range(2 * num_stages)).values():
        torch.testing.assert_close(found, made, rtol=1e-12, atol=1e-12)


def test_recycled_inputs_are_not_batch_inputs() -> None:
    graph = graph_of(new_model())
    assert [t.name for t in graph.batch_inputs] == ["x"]
    assert {given.name: made.name for given, made in graph.recycled.items()} == {"before": "add_2"}


def test_report_counts_the_transfers_of_all_turns() -> None:
    compiled = program(new_model(), 2, 3)
    (edge,) = (e for e in compiled.materialized.edges.all if e.recycles is not None)
    rows = [row.first for row in compiled.report().rows]
    times = {(move.name, move.way): move.num_times for move in rows}
    assert times[edge.name, "forward"] == 3 * MICROBATCHES
    assert (edge.name, "backward") not in times
    onward = next(e for e in compiled.materialized.edges.all if e.crosses and e is not edge)
    assert times[onward.name, "forward"] == 4 * MICROBATCHES
    assert times[onward.name, "backward"] == MICROBATCHES


def test_schedule_with_turns_of_a_model_without_recycling_raises_plan_error() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0), nn.Linear(BATCH * WIDTH, 1))

    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).sum()

    plan = ss.Plan(ss.capture(Scalar(), (torch.randn(BATCH, WIDTH),)), [0])
    with pytest.raises(ss.PlanError, match=r"forwards without gradient .* recycles nothing"):
        plan.op_order(schedule(1, 1))


@pytest.mark.parametrize(
    ("recycled", "message"),
    [
        ({"after": 1}, "no input 'after'; it has x, before"),
        ({"before": 2}, "returns 2 tensors; .* the loss and 2 more"),
    ],
    ids=str,
)
def test_invalid_recycled_argument_raises_capture_error(
    recycled: dict[str, int], message: str
) -> None:
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    with pytest.raises(ss.CaptureError, match=message):
        ss.capture(new_model(), (x, torch.zeros_like(x)), recycled=recycled)


def test_recycled_result_of_another_shape_raises_plan_error() -> None:
    class Narrow(Loop):
        def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            loss, made = super().forward(x, before)
            return loss, made[:2]

    x = torch.randn(BATCH, WIDTH)
    with pytest.raises(ss.PlanError, match=r"recycled as before\[4, 6\]"):
        ss.capture(Narrow(), (x, torch.zeros_like(x)), recycled={"before": 1})
