"""Random plans on threads compute the loss and the gradients of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core import Graph, Trainer
from superscaler_core.materialize import schedule_of
from superscaler_core.run.evaluate import evaluate
from tests.superscaler_core.cases import REWRITES
from tests.superscaler_core.schedule_rows import own
from tests.superscaler_core.small import branched, two_linears

NUM_DEVICES = 4
X = torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


class Windows(nn.Module):
    """Windows over rows of six pixels: overlapping, of stride 2, and wider than a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv1d(1, 2, 5, padding=2, dtype=torch.float64)
        self.down = nn.Conv1d(2, 1, 3, stride=2, padding=1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x.unsqueeze(1)))
        mean = F.avg_pool1d(hidden, 3, 1, padding=1, count_include_pad=False)
        return (self.down(mean) + F.max_pool1d(hidden, 2)[:, :1]).square().mean()


GRAPHS = {g.name: g for g in (two_linears(), branched(), ss.capture(Windows(), (X[:4],)))}


def state_of(graph: Graph) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
        for name, tensor in graph.parameters.items()
    }


def reference(graph: Graph, num_microbatches: int) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and gradients, by the definition."""
    weights = {name: value.requires_grad_() for name, value in state_of(graph).items()}
    size = graph.inputs[0].shape[0]
    losses = [
        evaluate(graph, (X[i * size : (i + 1) * size],), weights) for i in range(num_microbatches)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: value.grad for name, value in weights.items()}


def step_and_gather(state: dict[str, Tensor], trainer: Trainer) -> tuple[float, dict[str, Tensor]]:
    """The loss, and gradients as the change of the state by an update ``w - grad``."""
    trainer.load_state_dict(state)
    loss = trainer.step(X[: 4 * trainer.num_microbatches])
    with torch.no_grad():
        for weight in trainer.parameters():
            weight -= weight.grad
    after = trainer.state_dict()
    return loss.item(), {name: state[name] - after[name] for name in state}


def check(compiled: ss.Compiled) -> None:
    plan = compiled.plan
    want_loss, want = reference(plan.graph, plan.num_microbatches)
    with tempfile.TemporaryDirectory() as folder:
        compiled.save(folder)
        work = partial(step_and_gather, state_of(plan.graph))
        results = ss.run_threads(folder, work, range(NUM_DEVICES), timeout_secs=20)
    for loss, grads in results.values():
        assert loss == pytest.approx(want_loss, rel=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-10, atol=1e-12)


Devices = tuple[int, ...]


@st.composite
def parted(
    draw: Callable[..., object], plan: ss.Plan, op: ss.Op, allowed: Devices, most: int = 6
) -> None:
    """Split an op and place its parts at random, with no two replicas on one device."""
    for _ in range(draw(st.integers(0, 2))):
        for part in plan.parts(op):
            loops = [i for i in op.sizes if op.is_splittable(i)]
            loop = draw(st.sampled_from(loops))
            lo, hi = part.range(loop)
            if hi - lo > 1 and len(plan.parts(op)) < most and draw(st.booleans()):
                at = draw(st.integers(lo + 1, hi - 1))
                plan.op_trans(part, ss.split(loop, cuts=[lo, at, hi]))
    for part in plan.parts(op):
        count = draw(st.sampled_from([1, 1, 1, 2]))
        devices = draw(st.permutations(allowed))[: min(count, len(allowed))]
        plan.op_assign(plan.op_trans(part, ss.replicate(len(devices))), devices)


@st.composite
def plans(draw: Callable[..., object], graph: Graph) -> ss.Plan:
    plan = ss.Plan(graph, range(NUM_DEVICES))
    for op in plan.graph.ops:
        draw(parted(plan, op, plan.devices))
    if draw(st.booleans()):
        plan.pipeline([draw(st.integers(1, len(graph.ops) - 1))])
        name = draw(st.sampled_from(["naive", "gpipe", "1f1b"]))
        plan.op_order(ss.SCHEDULES[name](2, 2))
    draw(further(plan))
    return plan


def rounds(*rows: str) -> ss.Schedule:
    stages = 1 + max(int(word[0]) for row in rows for word in row.split())
    return own(*rows, stages=stages, microbatches=2)


ROUTES = {
    "chimera": (ss.SCHEDULES["chimera"](2, 4), ss.Placement(((0, 1), (3, 2)))),
    "rounds of the first stage": (
        rounds("0F0 0B0", "0F1 0B1", "1F0 1B0 1F1 1B1"), ss.Placement(((0,), (2,), (1, 3)))
    ),
    "rounds of the last stage": (
        rounds("0F0 0F1 0B0 0B1", "1F0 1B0", "1F1 1B1"), ss.Placement(((1, 2), (0,), (3,)))
    ),
    "rounds of all": (rounds("0F0 0B0", "0F1 0B1"), ss.Placement(((0, 2), (1, 3)))),
    "one way in one worker": (
        rounds("0F0 1F0 1B0 0B0 0F1 0B1", "1F1 1B1"), ss.Placement(((0, 3), (1, 2)))
    ),
    "teams": (rounds("0F0 0B0", "0F0 1F0 1B0 0B0 1F1 1B1", "0F1 0B1", "0F1 0B1"),
     ss.Placement(((0,), (1,), (2,), (3,)))),
}  # fmt: skip
"""Schedules of stages on several workers, for different microbatches."""


@st.composite
def routed(draw: Callable[..., object], graph: Graph, name: str) -> ss.Plan:
    """A plan by one of ``ROUTES``, with ops split at random on the devices of their stage."""
    schedule, placement = ROUTES[name]
    plan = ss.Plan(graph, range(NUM_DEVICES))
    if schedule.num_stages > 1:
        plan.pipeline([draw(st.integers(1, len(graph.ops) - 1))])
    for stage in plan.stages:
        devices = tuple(sorted(placement.devices_of(schedule, stage.index, 0)))
        for op in stage.ops:
            draw(parted(plan, op, devices))
    plan.op_order(schedule, placement)
    draw(further(plan))
    return plan


@st.composite
def further(draw: Callable[..., object], plan: ss.Plan) -> None:
    """Add random decisions to a plan that has its parts and its schedule."""
    graph = plan.graph
    for name in draw(st.sets(st.sampled_from(sorted(graph.parameters)))):
        draw(parted_storage(plan, plan.update(name)))
    rewrite = draw(st.sampled_from(["", *REWRITES]))
    if rewrite:
        plan.op_order(REWRITES[rewrite](schedule_of(plan)), plan.placement)
    if draw(st.booleans()):
        plan.recompute(plan.graph.ops[:2])
    if draw(st.booleans()):
        draw(recompute_regions(plan))
    unit = draw(st.sampled_from([None, plan.unshard, plan.reduce_grads]))
    if unit is not None:
        unit(graph.ops[:1], graph.ops_in("down"))
    if draw(st.booleans()):
        if not any(plan.region_group(op) for op in graph.ops):
            plan.offload(graph.ops[1:3])
        plan.store_on_host(draw(st.sampled_from(["*", "up.*"])))


@st.composite
def recompute_regions(draw: Callable[..., object], plan: ss.Plan) -> None:
    """Rerun a random range of ops in each stage."""
    for stage in plan.stages:
        first = draw(st.integers(0, len(stage.ops)))
        count = draw(st.integers(1, len(stage.ops)))
        plan.recompute_regions(stage.ops[first : first + count])


@st.composite
def parted_storage(draw: Callable[..., object], plan: ss.Plan, op: ss.Op) -> None:
    """Store a parameter in pieces of one dim on distinct devices."""
    loop = draw(st.sampled_from(list(op.sizes)))
    count = draw(st.integers(1, min(NUM_DEVICES, op.sizes[loop])))
    parts = plan.op_trans(op, ss.split(loop, count))
    plan.op_assign(parts, draw(st.permutations(range(NUM_DEVICES)))[:count])


@pytest.mark.parametrize("name", GRAPHS)
@settings(max_examples=14)
@given(data=st.data())
def test_random_plans_compute_loss_and_gradients_of_the_model(
    name: str, data: st.DataObject
) -> None:
    check_that_it_computes(data.draw(plans(GRAPHS[name])))


@pytest.mark.parametrize("order", ROUTES)
@settings(max_examples=4)
@given(name=st.sampled_from(sorted(GRAPHS)), data=st.data())
def test_random_plans_with_several_routes_compute_loss_and_gradients(
    name: str, order: str, data: st.DataObject
) -> None:
    check_that_it_computes(data.draw(routed(GRAPHS[name], order)))


def check_that_it_computes(plan: ss.Plan) -> None:
    """Check the loss and the gradients of a plan, if it can be compiled."""
    try:
        compiled = ss.compile(plan)
    except ss.PlanError as error:
        # A device adds up its parts of a sum, and replicas can make such partial sums overlap.
        # Rerun groups can overlap in a window.
        assume("put parts of one sum on distinct devices" not in str(error))
        assume("recompute_regions of two groups" not in str(error))
        raise
    check(compiled)
