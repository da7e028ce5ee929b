"""On real processes, ranks that part between two steps are told at once, and all alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import superscaler_core as ss
from tests.dist.world import Worlds
from tests.superscaler_core.parallel.small_nets import batch, net

pytestmark = pytest.mark.dist


def parallel(plan: str = "zero3", **options: Any) -> tuple[Any, ss.Parallel]:
    model = net()
    return model, ss.parallelize(model, kwargs={"x": batch()}, plan=plan, **options)


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(ss.PlanError) as error:
        call()
    return str(error.value)


def clips_alone(rank: int) -> list[str]:
    _, made = parallel()
    made.step(x=batch())
    call = (lambda: made.clip_grad_norm_(1.0)) if rank == 0 else (lambda: made.step(x=batch()))
    return [raised(call)]


def other_plans(rank: int) -> list[str]:
    return [
        raised(lambda: parallel("zero3" if rank else "data_parallel")),
        raised(lambda: parallel("one_f_one_b", options={"microbatches": 2 + 2 * rank})),
    ]


def other_rates(rank: int) -> list[str]:
    model = net()
    model.drop.p = 0.1 * (rank + 1)
    texts = [raised(lambda: ss.parallelize(model, kwargs={"x": batch()}))]
    model, made = parallel()
    made.step(x=batch())
    model.drop.p = 0.1 * (rank + 1)
    return [*texts, raised(lambda: made.step(x=batch()))]


def other_seeds(rank: int) -> list[str]:
    return [raised(lambda: parallel(seed=rank))]


CASES: dict[str, tuple[Callable[[int], list[str]], list[str]]] = {
    "one rank clips": (
        clips_alone,
        ["rank 0 calls clip_grad_norm_ and rank 1 calls step: all ranks have to make the same"],
    ),
    "plans": (
        other_plans,
        [
            "ranks disagree about the plan: rank 0 has data_parallel, rank 1 has zero3;",
            "ranks disagree about its options: rank 0 has microbatches=2, rank 1 has "
            "microbatches=4;",
        ],
    ),
    "rates of dropout": (
        other_rates,
        [
            "ranks disagree about the ops of the model: rank 0 has drop:dropout: ops.dropout",
            "rank 0 has one to be made, because drop.p changed from 0.0 to 0.1, rank 1 has one to",
        ],
    ),
    "seeds": (other_seeds, ["ranks disagree about seed: rank 0 has 0, rank 1 has 1"]),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_part_raise_the_same_error_at_once(worlds: Worlds, case: str) -> None:
    work, texts = CASES[case]
    # After the timeout of the group it would be another error.
    first, second = worlds(2).run(work)
    assert first == second
    for text, wanted in zip(first, texts, strict=True):
        assert wanted in text


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
