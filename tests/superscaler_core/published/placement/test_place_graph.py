"""Placement problems of models, and plans of placements that train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import PROFILES, CostModel
from superscaler_core.evaluation import Request
from superscaler_core.published.placement import (
    PLACERS,
    assign,
    every_placement,
    place_graph,
    search_placement,
)
from tests.superscaler_core.as_torch import check_program

TOPOLOGY = rv.Topology.hosts([[0, 1], [2, 3]], intra=rv.Link(1e-6, 8e9), inter=rv.Link(1e-5, 2e9))


class Branches(nn.Module):
    """Two equal branches between two linear maps."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.stem, self.out = (nn.Linear(width, width, dtype=dtype) for _ in range(2))
        self.left, self.right = (
            nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.GELU()) for _ in range(2)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        return F.mse_loss(self.out(self.left(x) + self.right(x)), target)


def captured(width: int, batch: int) -> ss.Graph:
    with torch.device("meta" if width > 64 else "cpu"):
        model = Branches(width)
        inputs = torch.zeros(2, batch, width, dtype=torch.float64).unbind()
    return ss.capture(model, inputs)


def costs_of(graph: ss.Graph) -> CostModel:
    return CostModel(graph, PROFILES["v100"], TOPOLOGY)


def test_each_branch_is_a_group_that_includes_its_backward_ops() -> None:
    problem = place_graph(costs_of(captured(8, 4)), range(2))
    names = [[problem.operations[i].name for i in members] for members in problem.groups]
    firsts = ["stem:linear", "left.0:linear", "right.0:linear", "out:linear", "mse_loss"]
    assert [mine[0] for mine in names] == firsts
    # The op that reads both branches is in the group of the last one, as no block ends in between.
    assert "add" in names[2]
    for mine in names:
        half = len(mine) // 2
        assert mine[half:] == [f"{name}:backward" for name in reversed(mine[:half])]


def test_links_are_those_of_the_topology() -> None:
    problem = place_graph(costs_of(captured(8, 4)), range(4))
    assert problem.latency_secs[0].tolist() == [0.0, 1e-6, 1e-5, 1e-5]
    assert problem.bytes_per_sec[3, :3].tolist() == [2e9, 2e9, 8e9]


def test_one_device_takes_the_sum_of_the_costs_and_holds_all_memory() -> None:
    graph = captured(8, 4)
    costs = costs_of(graph)
    problem = place_graph(costs, range(2))
    alone = {op: ss.plan.OpSplit.of([((), 0, 0)]) for op in graph.ops}
    prices = [costs.op_cost(op, alone[op]) for op in graph.ops]
    stage = costs.stage_cost(graph.ops, [0], alone)
    total = sum(each.forward_secs + each.backward_secs for each in prices) + stage.update_secs
    assert problem.secs([0] * 5) == pytest.approx(total, rel=1e-12)
    held = sum(each.resting_bytes + each.grads_bytes + each.kept_bytes for each in stage.memory)
    assert problem.group_bytes.sum() == held


@pytest.mark.parametrize("assignment", [(0, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 1, 1, 0, 0)])
def test_simulated_step_of_a_plan_is_near_the_step_of_the_problem(
    assignment: tuple[int, ...],
) -> None:
    # The tolerance covers biases that a product adds in its call, and the overhead of segments.
    graph = captured(2048, 8192)
    problem = place_graph(costs_of(graph), range(2))
    plan = ss.Plan(graph, range(2))
    assign(plan, problem=problem, assignment=assignment)
    plan.overlap = ss.Overlap()
    made = ss.compile(plan, topology=TOPOLOGY)
    found = ss.simulate(made, topology=TOPOLOGY, profile=PROFILES["v100"])
    assert found.secs == pytest.approx(float(problem.secs(assignment)), rel=0.02)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("assignment", [(0, 1, 0, 0, 0), (1, 1, 0, 1, 0)])
def test_a_placement_trains_like_one_device(
    assignment: tuple[int, ...], microbatches: int, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    model, batches = Branches(6), [torch.randn(2, 8, 6).double().unbind() for _ in range(3)]
    graph = ss.capture(model, torch.zeros(2, 8 // microbatches, 6, dtype=torch.float64).unbind())
    problem = place_graph(costs_of(graph), range(2))
    plan = ss.Plan(graph, range(2))
    assign(plan, problem=problem, assignment=assignment, microbatches=microbatches)
    check_program(ss.compile(plan), model, batches, tmp_path)


@pytest.mark.parametrize("placer", [*PLACERS.values(), every_placement])
def test_candidates_are_plans_that_compile(placer) -> None:
    graphs = {samples: captured(8, samples) for samples in (2, 4)}
    request = Request(graphs.__getitem__, (2, 4), 4, (0, 1), TOPOLOGY, PROFILES["v100"], 10**9)
    found = list(search_placement(placer)(request))
    assert [each.samples for each in found] == [4, 2]
    for each in found:
        plan = each.plan(request)
        assert plan.num_microbatches == 4 // each.samples
        assert ss.compile(plan, topology=TOPOLOGY).memory.keys() == {0, 1}


def test_no_candidate_is_proposed_if_no_placement_fits() -> None:
    request = Request(
        lambda samples: captured(8, samples), (4,), 4, (0, 1), TOPOLOGY, PROFILES["v100"], 100
    )
    assert not list(search_placement(every_placement)(request))
