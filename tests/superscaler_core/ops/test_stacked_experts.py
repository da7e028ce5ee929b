"""Stacked experts: a list of modules with stacked weights computes the same, and is dealt out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

import superscaler_core as ss
from tests.superscaler_core.parallel.threads import on_threads


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, inner, bias=False), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)))


class Mixture(nn.Module):
    """As in remote code: a loop over experts, which may be a dict, and maybe a shared one."""

    def __init__(self, *, shared: bool = False, named: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        experts = [MLP(8, 12) for _ in range(4)]
        self.experts: Any = nn.ModuleList(experts)
        if named:
            self.experts = nn.ModuleDict({f"expert_{i}": each for i, each in enumerate(experts)})
        self.shared = MLP(8, 12) if shared else None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden.flatten(0, 1)
        scores = self.gate(x)
        weights, chosen = scores.softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for number, key in enumerate(self.experts):
            expert = self.experts[key] if isinstance(key, str) else key
            tokens, choices = torch.where(chosen == number)
            part = expert(x[tokens]) * weights[tokens, choices, None]
            result.index_add_(0, tokens, part)
        if self.shared is not None:
            result = result + self.shared(x)
        return result.view_as(hidden), scores


class Net(nn.Module):
    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.layers = nn.ModuleList(Mixture(**how) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, balance = self.embed(x), torch.zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=True):
            made, scores = layer(norm(x))
            x, balance = x + made, balance + scores.softmax(-1).square().mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten()) + 0.1 * balance


HOW = {"plain": {}, "shared": {"shared": True}, "named": {"named": True}}
PLANS = {
    "data_parallel": (2, 4), "data_parallel:experts=true": (2, 2), "expert_parallel": (4, 1),
    "zero3:experts=2": (4, 1), "hybrid:pp=2,microbatches=2,experts=true": (4, 2),
}  # fmt: skip
"""Plans, each with devices, and the experts that each of these stores."""


def seeded(how: str) -> Net:
    torch.manual_seed(0)
    return Net(**HOW[how])


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 5, 6, generator=generator)
    return {"x": x, "y": torch.randint(3, (8, 5), generator=generator)}


@pytest.mark.parametrize("how", HOW)
def test_stacked_experts_compute_what_the_list_did_and_load_its_state(how):
    listed = seeded(how)
    stacked = ss.stack_experts(copy.deepcopy(listed))
    assert torch.equal(stacked(**data()), listed(**data()))
    assert stacked.get_parameter("layers.0.experts.w1.weight").shape == (4, 12, 8)
    other = ss.stack_experts(Net(**HOW[how]))
    other.load_state_dict(listed.state_dict())
    assert torch.equal(other(**data()), listed(**data()))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("how", HOW)
def test_stacked_experts_are_dealt_out_and_train_as_on_one_device(how, plan):
    alone = seeded(how)
    loss = alone(**data())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9)

    def work(parallel: ss.Parallel) -> tuple[Tensor, Tensor, dict[str, torch.Size]]:
        found = parallel.step(**data()), parallel.clip_grad_norm_(1e9)
        return *found, {name: p.shape for name, p in parallel.named_parameters()}

    given = data()
    results = on_threads(ss.stack_experts(seeded(how)), given, PLANS[plan][0], work, plan=plan)
    stored = set()
    for found, total, shapes in results.values():
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(total.float(), norm, rtol=1e-4, atol=0)
        stored |= {s[0] for name, s in shapes.items() if name.endswith("experts.w1.weight")}
    assert stored == {PLANS[plan][1]}


def test_layers_of_a_model_are_no_experts():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model.head = nn.Linear(4, 3)
    assert isinstance(ss.stack_experts(model).layers, nn.ModuleList)
