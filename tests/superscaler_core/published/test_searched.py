"""Searched plans: they keep their limit of microbatches, and run models with branches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.published.tessel.order_by_search import order_by_search, stage_edges
from superscaler_core.schedules import Schedule, one_f_one_b, timeline
from tests.superscaler_core.as_torch import check_program
from tests.superscaler_core.cases import Case

WIDTH = 12


class Decoder(nn.Module):
    """A decoder that reads the results of both encoders."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, seen: Tensor, read: Tensor) -> Tensor:
        made: Tensor = self.layers(seen * read).square().mean()
        return made


class TwoEncoders(nn.Module):
    """An image encoder of two stages, a text encoder of one, and a decoder that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.more = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.text = nn.Sequential(nn.Linear(10, WIDTH), nn.Tanh())
        self.decoder = Decoder()

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        seen = self.more(self.image(image))
        read = self.text(text)
        loss: Tensor = self.decoder(seen, read)
        return loss


def batch_of(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(size, width, generator=generator, dtype=torch.float64) for width in (6, 10)
    )  # type: ignore[return-value]


def branches(microbatches: int) -> ss.Plan:
    """Every stage on its own device; a stage starts at the first op of a submodule."""
    torch.manual_seed(0)
    graph = ss.capture(TwoEncoders().double(), batch_of(0, 4))
    plan = ss.Plan(graph, range(4))
    plan.pipeline([graph.ops_in(name)[0] for name in ("more", "text", "decoder")])
    for stage in plan.stages:
        for op in stage.ops:
            plan.op_assign(op, stage.index)
    routes = (tuple((worker,) for worker in range(4)),)
    order_by_search(plan, routes, ss.Placement.even(plan.devices, 4), microbatches, 3)
    return plan


def test_edges_of_stages_are_read_from_the_graph() -> None:
    assert stage_edges(branches(2)) == ((0, 1), (1, 3), (2, 3))


def test_two_encoders_and_a_decoder_train_the_same_weights_as_one_device(tmp_path: Path) -> None:
    program = ss.compile(branches(4))
    torch.manual_seed(0)
    check_program(program, TwoEncoders().double(), [batch_of(n, 16) for n in (0, 1)], tmp_path)


def schedule_of(case: Case) -> Schedule:
    schedule = case.planned().schedule
    assert schedule is not None
    return schedule


def test_a_searched_pipeline_keeps_its_limit_and_is_not_slower_than_1f1b() -> None:
    found = schedule_of(Case("searched", 4, {"microbatches": 6, "in_flight": 4}, model="mlp",
                             sizes={"layers": 4}))  # fmt: skip
    assert max(found.peak_microbatches) <= 4
    assert timeline(found).makespan <= timeline(one_f_one_b(4, 6)).makespan


def test_v_route_with_chunks_raises_plan_error() -> None:
    with pytest.raises(ss.PlanError, match="routes are line, v, both, and only a line has chunks"):
        Case("searched", 2, {"route": "v", "chunks": 2}).planned()
