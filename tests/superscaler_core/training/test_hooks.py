"""Hooks of stored parameters see a complete gradient, once per step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import superscaler_core as ss
from tests.superscaler_core.parallel.small_nets import batch, net
from tests.superscaler_core.parallel.threads import on_threads

PLANS = ["data_parallel", "zero3", "one_f_one_b:microbatches=4", "zero_offload"]


@pytest.mark.parametrize("plan", PLANS)
def test_hooks_see_the_complete_gradient_once_per_step(plan: str) -> None:
    def work(parallel: ss.Parallel) -> None:
        counts, seen = Counter[str](), dict[str, Tensor]()
        for name, parameter in parallel.named_parameters():

            def look(grad: Tensor, name: str = name) -> None:
                seen[name] = grad.clone()

            def count(parameter: Tensor, name: str = name) -> None:
                assert parameter.grad is not None
                counts[name] += 1

            parameter.register_hook(look)
            parameter.register_post_accumulate_grad_hook(count)
        for step in (1, 2):
            for parameter in parallel.parameters():
                parameter.grad = None
            parallel.step(x=batch())
            assert {*counts.values()} == {step}
            for name, parameter in parallel.named_parameters():
                assert torch.equal(seen[name], parameter.grad)

    on_threads(net(), {"x": batch()}, 2, work, plan=plan)


def test_hook_may_replace_the_gradient_before_it_is_added() -> None:
    parallel = ss.parallelize(net(), kwargs={"x": batch()})
    parallel.step(x=batch())
    first = next(parallel.parameters())
    assert first.grad is not None
    once = first.grad.clone()
    first.register_hook(lambda grad: 2 * grad)
    parallel.step(x=batch())
    torch.testing.assert_close(first.grad, 3 * once)


@pytest.mark.parametrize("plan", PLANS)
def test_optimizers_in_the_backward_train_as_those_after_it(plan: str) -> None:
    def after(model: Any, step: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(3):
            step()
            optimizer.step()
            optimizer.zero_grad()

    def inside(parallel: ss.Parallel) -> dict[str, Tensor]:
        for parameter in parallel.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=1e-2, eps=1e-3)

            def update(parameter: Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            parallel.step(x=batch())
        return parallel.state_dict()

    model = net()
    after(model, lambda: model(batch()).backward())
    for state in on_threads(net(), {"x": batch()}, 2, inside, plan=plan).values():
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=1e-12)
