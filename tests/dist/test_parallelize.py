"""``parallelize`` on real processes trains and evaluates as one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rvdcomm as rv
import superscaler_core as ss
from tests.dist.world import Worlds
from tests.superscaler_core.run.test_results import batch, words

pytestmark = pytest.mark.dist

SIZES = (4, 4, 3, 2)
Found = tuple[Tensor, dict[str, Tensor], Tensor, Tensor]


def named(size: int, seed: int) -> dict[str, Tensor]:
    tokens, labels = batch(size, seed)
    return {"tokens": tokens, "labels": labels}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # A large eps: gradients that are zero up to rounding do not decide the comparison.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


class Scaled(nn.Module):
    """A model whose loss is scaled by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = words()
        self.register_buffer("scale", torch.tensor([0.5, 1.5], dtype=torch.float64))

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.words(tokens, labels)
        return {**found, "loss": (found["loss"] * self.scale).sum()}


def trained(
    rank: int, plan: str, options: dict[str, Any], topology: rv.Network | None = None
) -> Found:
    """The results of one rank; models of ranks other than the first start with other values."""
    model = Scaled()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value += rank
    parallel = ss.parallelize(
        model,
        kwargs=named(4, 0),
        plan=plan,
        options=options,
        results=("logits",),
        topology=topology,
    )
    optimizer = adamw(parallel.parameters())
    losses = []
    for step, size in enumerate(SIZES):
        losses.append(parallel.step(**named(size, step)))
        optimizer.step()
        optimizer.zero_grad()
    loss, results = parallel.evaluate(**named(3, 9))
    assert isinstance(results, dict)
    return torch.stack(losses), parallel.state_dict(), loss, results["logits"]


def alone() -> Found:
    """The same on one device."""
    model = Scaled()
    optimizer = adamw(model.parameters())
    losses = []
    for step, size in enumerate(SIZES):
        losses.append(model(**named(size, step))["loss"])
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        wanted = model(**named(3, 9))
    return torch.stack(losses).detach(), dict(model.state_dict()), wanted["loss"], wanted["logits"]


def of_own(rank: int) -> tuple[list[str], float]:
    """Refusals of batches that differ between ranks, and the loss of samples of this rank's own."""
    parallel = ss.parallelize(words(), kwargs=named(4, 0), plan="zero3")
    parallel.step(**named(4, 0))
    refusals = []
    for odd in (named(4 + 2 * rank, 0), named(6, rank)):
        with pytest.raises(ValueError, match="other") as error:
            parallel.step(**odd)
        refusals.append(str(error.value))
    parallel.step(**named(6, 0))
    own = ss.parallelize(words(), kwargs=named(2, 0), batch=ss.Batch(kind="local"))
    both = named(5, 3)
    mine = {name: x[:2] if rank == 0 else x[2:] for name, x in both.items()}
    return refusals, own.step(**mine).item()


def test_ranks_learn_that_others_pass_other_batches_or_join_them(worlds: Worlds) -> None:
    wanted = words()(**named(5, 3))["loss"].item()
    for (shapes, values), loss in worlds(2).run(of_own):
        assert shapes.startswith("ranks pass other shapes: rank 0 passes tokens [4, 6]")
        assert values.startswith("input 'tokens' has other values on rank 1 than on rank 0")
        assert loss == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "num_ranks, plan, options",
    [
        (2, "one_f_one_b", {"microbatches": 4}),
        (4, "hybrid", {"tp": 2, "pp": 2, "microbatches": 2}),
        (2, "auto", {"max_tried": 4}),
    ],
)
def test_every_rank_trains_and_evaluates_as_one_device(
    worlds: Worlds, num_ranks: int, plan: str, options: dict[str, Any]
) -> None:
    for found in worlds(num_ranks).run(trained, plan, options):
        torch.testing.assert_close(found, alone(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("plan", ["zero3", "megatron"])
def test_ranks_of_a_network_train_as_one_device(worlds: Worlds, plan: str) -> None:
    ring = rv.Network.preset("ring", 4, link=rv.Link(1e-6, 1e9))
    for found in worlds(4).run(trained, plan, {}, ring):
        torch.testing.assert_close(found, alone(), rtol=0, atol=1e-12)
