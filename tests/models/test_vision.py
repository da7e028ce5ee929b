"""Models of vision and others train as in torch, under every plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core.plan import Placement
from superscaler_core.plans import PLANS
from superscaler_core.schedules import one_f_one_b
from tests.models.vision import MODELS, batch, made

NUM_STEPS = 2
pytestmark = pytest.mark.filterwarnings("ignore")


def recomputed(plan: ss.Plan) -> None:
    PLANS["data_parallel"](plan)
    plan.recompute(plan.graph.ops[:-2])


HOW: dict[str, Callable[[ss.Plan], None]] = {
    **{name: PLANS[name] for name in ("data_parallel", "zero3", "one_f_one_b")},
    "recomputed": recomputed,
    **{name: PLANS[name] for name in ("megatron", "mesh_2d")},
}
BY_FEATURES = {
    "megatron": ["test_resnet", "test_efficientnet", "test_convnext", "test_byobnet", "bags"],
    "mesh_2d": ["test_resnet", "convolutions", "lstm"],
}
"""Models that are tested under these plans, a few of the many that the plans can cut."""


def train(step: Callable[[int], float], optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for number in range(NUM_STEPS):
        losses.append(step(number))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_alone(name: str, num_microbatches: int) -> Any:
    model = made(name)

    def step(number: int) -> float:
        chunks = (t.chunk(num_microbatches) for t in batch(name, number, num_microbatches))
        losses = [model(*one) / num_microbatches for one in zip(*chunks, strict=True)]
        sum(losses).backward()
        return sum(loss.item() for loss in losses)

    return train(step, torch.optim.SGD(model.parameters(), lr=0.05)), model.state_dict()


def train_rank(name: str, trainer: ss.Trainer) -> Any:
    def step(number: int) -> float:
        return trainer.step(*batch(name, number, trainer.num_microbatches)).item()

    stored = [*trainer.parameters()] or [torch.zeros(())]
    return train(step, torch.optim.SGD(stored, lr=0.05)), trainer.state_dict()


_graphs: dict[str, ss.Graph] = {}


PLANS_OF = {
    name: [
        how
        for how in HOW
        # This model has only one layer, so it cannot have two stages.
        if (name, how) != ("divergence", "one_f_one_b")
        if name in BY_FEATURES.get(how, MODELS)
    ]
    for name in MODELS
    if name != "noise"
}
CASES = [(name, how) for i, name in enumerate(PLANS_OF) for how in PLANS_OF[name][-i % 3 :: 3]]
"""A third of the plans of every model; every plan trains several models."""


def graph_of(name: str) -> ss.Graph:
    if name not in _graphs:
        _graphs[name] = ss.capture(made(name), batch(name, 0, 1))
    return _graphs[name]


def assert_trains(name: str, plan: ss.Plan, folder: Path) -> None:
    """Threads of the plan's devices train as torch does alone."""
    expected = copy.deepcopy(train_alone(name, plan.num_microbatches))
    folder = ss.compile(plan).save(folder, weights=True)
    for found in ss.run_threads(folder, lambda t: train_rank(name, t), plan.devices).values():
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.many(10)
@pytest.mark.parametrize("name, how", CASES)
def test_a_model_trains_as_in_torch(name: str, how: str, tmp_path: Path) -> None:
    plan = ss.Plan(graph_of(name), devices=range(2))
    HOW[how](plan)
    assert_trains(name, plan, tmp_path)


@pytest.mark.parametrize("name", BY_FEATURES["megatron"][:4])
def test_tensor_parallelism_cuts_most_bytes_of_the_parameters(name: str) -> None:
    plan = ss.Plan(graph_of(name), devices=range(2))
    PLANS["megatron"](plan)
    found = [
        (tensor.num_bytes, all(part.inputs[i].box.shape != tensor.shape for part in plan.parts(op)))
        for op in plan.graph.ops
        for i, tensor in enumerate(op.inputs)
        if tensor.kind == "parameter"
    ]
    assert sum(size for size, is_cut in found if is_cut) > 0.7 * sum(size for size, _ in found)


def test_megatron_rejects_a_model_without_inner_features_and_names_other_plans() -> None:
    # Its loss relates the results of its only map to the inputs.
    plan = ss.Plan(graph_of("divergence"), devices=range(2))
    with pytest.raises(ss.PlanError, match=r"no inner features.*data_parallel or zero3; or say"):
        PLANS["megatron"](plan)


def test_a_stage_may_have_no_parameters(tmp_path: Path) -> None:
    plan = ss.Plan(graph_of("lstm"), devices=range(3))
    ops = plan.graph.ops
    mean = next(op for op in ops if op.kind == "mean")
    head = next(op for op in ops if op.module == "head")
    stages = plan.pipeline([mean, head])
    assert not any(op.parameters for op in stages[1].ops)
    for stage in stages:
        for op in stage.ops:
            plan.op_assign(op, stage.index)
    plan.op_order(one_f_one_b(3, 2), Placement.even(plan.devices, 3))
    assert_trains("lstm", plan, tmp_path)


def alternating(plan: ss.Plan) -> None:
    """Assign pairs of ops to the two devices in turn; no op is cut."""
    for op in plan.graph.ops:
        plan.op_assign(op, op.index // 2 % 2)


def test_random_numbers_are_the_same_under_every_plan(tmp_path: Path) -> None:
    graph = ss.capture(made("noise"), batch("noise", 0, 1))
    found = []
    for number, how in enumerate((alternating, HOW["data_parallel"], recomputed)):
        plan = ss.Plan(graph, devices=range(2))
        how(plan)
        folder = ss.compile(plan).save(tmp_path / str(number), weights=True)
        found += ss.run_threads(folder, lambda t: train_rank("noise", t), range(2)).values()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-9)
