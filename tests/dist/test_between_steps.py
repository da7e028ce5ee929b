"""On real processes, ranks that part between two steps are told at once, and all alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import superscaler_core as ss
from tests.dist.on_ranks import on_ranks
from tests.dist.world import Worlds
from tests.superscaler_core.parallel.small_nets import batch, net

pytestmark = pytest.mark.dist


def parallel(plan: str = "zero3", **options: Any) -> tuple[Any, ss.Parallel]:
    model = net()
    return model, ss.parallelize(model, kwargs={"x": batch()}, plan=plan, **options)


def assert_raised(call: Callable[[], object], text: str) -> None:
    """All ranks raise the same error at once; after the timeout it would be another one."""
    with pytest.raises(ss.PlanError) as error:
        call()
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, str(error.value))
    assert text in of_ranks[0] == of_ranks[1]


@on_ranks(2)
def test_a_rank_that_clips_alone_is_told(rank: int) -> None:
    _, made = parallel()
    made.step(x=batch())
    call = (lambda: made.clip_grad_norm_(1.0)) if rank == 0 else (lambda: made.step(x=batch()))
    text = "rank 0 calls clip_grad_norm_ and rank 1 calls step: all ranks have to make the same"
    assert_raised(call, text)


@pytest.mark.parametrize(
    "plans, options, text",
    [
        (
            ("data_parallel", "zero3"),
            ({}, {}),
            "the plan: rank 0 has data_parallel, rank 1 has zero3;",
        ),
        (
            ("one_f_one_b",) * 2,
            ({"options": {"microbatches": 2}}, {"options": {"microbatches": 4}}),
            "its options: rank 0 has microbatches=2, rank 1 has microbatches=4;",
        ),
        (("zero3",) * 2, ({"seed": 0}, {"seed": 1}), "seed: rank 0 has 0, rank 1 has 1"),
    ],
)
@on_ranks(2)
def test_ranks_that_ask_for_other_plans_are_told(
    rank: int, plans: Any, options: Any, text: str
) -> None:
    wanted = f"ranks disagree about {text}"
    assert_raised(lambda: parallel(plans[rank], **options[rank]), wanted)


@on_ranks(2)
def test_ranks_that_change_rates_of_dropout_are_told(rank: int) -> None:
    model = net()
    model.drop.p = 0.1 * (rank + 1)
    text = "ranks disagree about the ops of the model: rank 0 has drop:dropout: ops.dropout"
    assert_raised(lambda: ss.parallelize(model, kwargs={"x": batch()}), text)
    model, made = parallel()
    made.step(x=batch())
    model.drop.p = 0.1 * (rank + 1)
    text = "rank 0 has one to be made, because drop.p changed from 0.0 to 0.1, rank 1 has one to"
    assert_raised(lambda: made.step(x=batch()), text)


def frozen(rank: int, plan: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, made = parallel(plan)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(4):
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(step != 2 or not name.startswith("layers.0"))
        model.beta = 0.5 if step == 3 else 1.0
        losses.append(made.step(x=batch()).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, made.state_dict()


@pytest.mark.parametrize("plan", ["zero3", "one_f_one_b:microbatches=2"])
def test_frozen_parameters_and_changed_values_count_on_all_ranks(worlds: Worlds, plan: str) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(4):
        model.layers[0].requires_grad_(step != 2)
        model.beta = 0.5 if step == 3 else 1.0
        loss = model(batch())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for found, state in worlds(2).run(frozen, plan):
        assert found == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=1e-12)
