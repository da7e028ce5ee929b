"""What a rank holds of the weights, with layouts, is the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rvdcomm as rv
import superscaler_core as ss
from tests.superscaler_core.parallel.small_nets import batch, net
from tests.superscaler_core.parallel.threads import on_threads


class Twice(nn.Module):
    """A layer that is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x)).square().mean()


def on_the_second(plan: ss.Plan) -> None:
    """Device 0 has nothing."""
    for op in plan.graph.ops:
        plan.op_assign(op, plan.devices[1])


def half_and_whole(plan: ss.Plan) -> None:
    """Device 0 reads the whole layer, and device 1 a half: these boxes are no layout."""
    first, *others = plan.graph.ops
    for part, device in zip(plan.op_trans(first, ss.split("n", 2)), plan.devices, strict=True):
        plan.op_assign(part, device)
    for op in others:
        plan.op_assign(op, plan.devices[0])


PLANS: dict[str, tuple[str | Callable[..., None], dict[str, Any], int]] = {
    "data parallel": ("data_parallel", {}, 2),
    "zero3": ("zero3", {}, 2),
    "tensor parallel": ("megatron", {}, 2),
    "stages": ("hybrid", {"pp": 2, "microbatches": 2}, 2),
    "all": ("hybrid", {"tp": 2, "pp": 2, "microbatches": 2}, 4),
    "one device": (on_the_second, {}, 2),
}


@pytest.mark.parametrize("case", PLANS)
def test_weights_of(case: str) -> None:
    plan, options, num_ranks = PLANS[case]
    check(net(), plan, options, num_ranks)


def test_boxes_that_are_no_layout_are_whole() -> None:
    check(Twice().double(), half_and_whole, {}, 2)


def check(
    model: nn.Module, plan: str | Callable[..., None], options: dict[str, Any], num_ranks: int
) -> None:
    """The boxes of all ranks, put where their layouts say, are the whole weights."""

    def work(parallel: ss.Parallel) -> Any:
        parallel.step(batch())
        shards = {
            name: (box.clone(), layout) for name, (box, layout) in parallel.weight_shards().items()
        }
        return shards, {name: t.clone() for name, t in parallel.state_dict().items()}

    found = on_threads(model, {"x": batch()}, num_ranks, work, plan=plan, options=options)
    whole = found[0][1]
    held = {name for shards, _ in found.values() for name in shards}
    assert held == set(whole)
    for name, value in whole.items():
        of_ranks = {rank: shards[name] for rank, (shards, _) in found.items() if name in shards}
        (layout,) = {layout for _, layout in of_ranks.values()}
        assert set(layout.ranks) == set(of_ranks)
        made = torch.full_like(value, torch.nan)
        for rank, (box, _) in of_ranks.items():
            made[layout.cell(rank).box.slices_within(rv.Box.of_shape(made.shape))] = box
        assert torch.equal(made, value), name
