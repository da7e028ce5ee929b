"""Models on the meta device, programs of their plans, and the cost functions for these programs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import PROFILES, StageCost
from superscaler_core.models import GPT, GPTConfig, MLPConfig, MLPModel
from superscaler_core.plans import PLANS, fill
from superscaler_core.schedules import one_f_one_b

ONE_HOST = rv.Topology.single_host(4, alpha_secs=5e-6, bytes_per_sec=200e9)
TWO_HOSTS = rv.Topology.hosts(
    [[0, 1], [2, 3]], intra=rv.Link(5e-6, 100e9), inter=rv.Link(20e-6, 10e9)
)


class Plain(nn.Module):
    """A chain of linear maps without biases, in which every call is a single op."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


@cache
def graph(name: str) -> ss.Graph:
    """The captured model: "plain", "mlp", "gpt", or "gpt of many kernels" (attention not fused)."""
    with torch.device("meta"):
        if name == "plain":
            return ss.capture(Plain((640, 1536, 1024, 512)), (torch.empty(4096, 640),))
        if name == "mlp":
            model = MLPModel(MLPConfig(inputs=640, hidden=1536, outputs=512, layers=4))
            return ss.capture(model, (torch.empty(2048, 640), torch.empty(2048, 512)))
        sizes = GPTConfig(
            vocabulary=640, sequence=1024, layers=2, width=1024, heads=16,
            fused=name == "gpt", tied=False,
        )  # fmt: skip
        tokens = torch.empty(8, 1024, dtype=torch.int64)
        return ss.capture(GPT(sizes), (tokens, tokens))


ONE_BUCKET = ss.Overlap(bucket_bytes=1 << 40)
"""One bucket for all weights, because the cost functions assume that weights move in one call."""


def compiled(
    model: str, plan_name: str, microbatches: int, topology: rv.Topology, **options: Any
) -> ss.Compiled:
    """The program of a plan on four devices, with one stage."""
    plan = ss.Plan(graph(model), range(4))
    fill(plan, PLANS[plan_name], options)
    plan.op_order(one_f_one_b(1, microbatches))
    plan.overlap = ONE_BUCKET
    return ss.compile(plan, topology=topology)


def storage_of(plan: ss.Plan) -> Mapping[ss.PTensor, ss.OpSplit]:
    """The split of the storage of every parameter whose storage the plan specifies."""
    return {tensor: plan.op_split(plan.update(tensor.name)) for tensor in plan.updates()}


def model_of(program: ss.Compiled, profile: str = "a100") -> ss.CostModel:
    """The cost functions for a program's graph and topology."""
    topology = program.materialized.topology
    assert topology is not None
    return ss.CostModel(program.plan.graph, PROFILES[profile], topology)


def stage_of(program: ss.Compiled, costs: ss.CostModel) -> StageCost:
    """The cost of all ops as one stage, with the choices of the program's plan."""
    plan = program.plan
    splits = {op: plan.op_split(op) for op in plan.graph.ops}
    return costs.stage_cost(plan.graph.ops, plan.devices, splits, storage=storage_of(plan))
