"""Simulated steps of which tests make pages."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core import models, plans
from superscaler_core.plan import Overlap
from superscaler_core.simulator import Simulated, simulate

HOSTILE = "</script><b>&amp;{{script}}"
"""A text that would end a script block, or be filled in, if it was not escaped."""

OPTIONS = {
    "hybrid": {"tp": 2, "pp": 2, "microbatches": 4},
    "zero3": {},
    "one_f_one_b": {"microbatches": 4},
    "pipedream": {"microbatches": 4},
}


@cache
def simulated(name: str) -> Simulated:
    with torch.device("meta"):
        model = models.build("gpt", layers=4, sequence=16)
    inputs = models.example_inputs("gpt", 4, layers=4, sequence=16)
    plan = ss.Plan(ss.capture(model, inputs), range(4))
    plans.fill(plan, plans.PLANS[name], OPTIONS[name])
    if name == "zero3":
        plan.overlap = Overlap(1, reductions=True)
    topology = rv.Topology.preset("v100", 2, 2)
    return simulate(ss.compile(plan, topology=topology), "v100")


class Hostile(nn.Module):
    """A model whose module is named as no module should be."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("</script><script>", nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("</script><script>")(x).square().sum()


@cache
def hostile() -> Simulated:
    plan = ss.Plan(ss.capture(Hostile(), (torch.zeros(2, 4),)), range(1))
    plans.fill(plan, plans.PLANS["data_parallel"], {})
    return simulate(ss.compile(plan), "v100")
