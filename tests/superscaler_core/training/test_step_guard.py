"""A step that fails on one rank fails on all, or is skipped by all as if it had not been tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from tests.superscaler_core.parallel.threads import on_threads

NUM_WORDS = 7
PLANS: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "zero3": {},
    "one_f_one_b": {"microbatches": 2},
    "accumulate": {"microbatches": 2},
}


class Words(nn.Module):
    """A model with dropout and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, 6, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.head = nn.Linear(6, NUM_WORDS, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        return nn.functional.cross_entropy(self.head(nn.functional.dropout(x, 0.2)), tokens)


def model() -> Words:
    torch.manual_seed(0)
    return Words()


def batch(step: int) -> dict[str, Tensor]:
    return {"tokens": torch.arange(8).add(step) % NUM_WORDS}


def bad_batch() -> dict[str, Tensor]:
    """Its last token, which is in the last rank's part, is out of range."""
    return {"tokens": torch.tensor([0] * 7 + [NUM_WORDS])}


def sgd(parallel: ss.Parallel) -> torch.optim.Optimizer:
    return torch.optim.SGD(parallel.parameters(), lr=0.1)


def loop(parallel: ss.Parallel, batches: list[dict[str, Tensor]]) -> tuple[Any, ...]:
    """The usual loop, with two steps for each update; returns losses, reasons and the state."""
    optimizer, losses, reasons = sgd(parallel), [], []
    for each in batches:
        with parallel.step_guard() as guard:
            loss = parallel.step(**each).item()
        if guard.skipped:
            reasons.append(guard.reason)
            continue
        losses.append(loss)
        if len(losses) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, reasons, parallel.state_dict()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.filterwarnings("ignore:step_guard")
def test_skipped_batches_leave_no_trace(plan: str) -> None:
    def work(batches: list[dict[str, Tensor]]) -> dict[int, Any]:
        options = PLANS[plan]
        return on_threads(
            model(), batch(0), 2, lambda p: loop(p, batches), plan=plan, options=options
        )

    # Gradients of a step before the second bad batch are kept.
    found = work([bad_batch(), batch(0), bad_batch(), batch(2), batch(3)])
    expected = work([batch(0), batch(2), batch(3)])
    for rank, (losses, reasons, state) in found.items():
        torch.testing.assert_close((losses, state), expected[rank][::2], rtol=0, atol=0)
        assert len(reasons) == 2
        assert all("IndexError: index out of range in self" in reason for reason in reasons)


@pytest.mark.filterwarnings("ignore:step_guard")
def test_error_beside_the_step_is_skipped_by_all() -> None:
    def work(parallel: ss.Parallel) -> tuple[bool, str, float]:
        with parallel.step_guard() as guard:
            parallel.step(**batch(0))
            if parallel.trainer.rank == 1:
                raise KeyError("lr")
        return guard.skipped, guard.reason, parallel.step(**batch(0)).item()

    found = on_threads(model(), batch(0), 2, work, plan="zero3")
    assert found[0] == found[1]
    assert found[0][:2] == (True, "rank 1: KeyError: 'lr'")


def test_interrupt_is_not_skipped() -> None:
    def work(parallel: ss.Parallel) -> None:
        with parallel.step_guard():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_threads(model(), batch(0), 1, work)


def test_steps_that_update_weights_cannot_be_guarded() -> None:
    def work(parallel: ss.Parallel) -> None:
        parallel.trainer.update_with(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        with pytest.raises(ss.PlanError, match=r"update weights themselves .* cannot be undone"):
            parallel.step_guard()

    on_threads(model(), batch(0), 1, work)


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_raise_until_they_recover(plan: str) -> None:
    def work(parallel: ss.Parallel) -> list[float]:
        first = parallel.step(**batch(0)).item()
        for each in (bad_batch(), batch(1)):
            with pytest.raises((IndexError, TimeoutError)):
                parallel.step(**each)
        parallel.recover()
        assert all(p.grad is None for p in parallel.parameters())
        return [first, parallel.step(**batch(2)).item()]

    found = on_threads(model(), batch(0), 2, work, plan=plan, options=PLANS[plan])
    assert found[0] == found[1]
