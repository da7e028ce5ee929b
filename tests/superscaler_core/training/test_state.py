"""State: buffers that a forward updates equal those of torch under every plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import superscaler_core as ss
from superscaler_core.plans import PLANS
from tests.superscaler_core.as_torch import (
    Trained,
    check_program,
    compiled,
    in_program,
    in_torch,
    on_ranks,
    train,
)

DTYPE = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Counts(nn.Module):
    """A moving average that the next microbatch reads, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6, dtype=DTYPE))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(6, dtype=DTYPE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean(0), alpha=0.5)
            self.last.copy_(x[0])
            self.count += 1
        return x - self.average


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(6, 6), layer, nn.Tanh()) for layer in layers]
        self.blocks = nn.Sequential(*blocks).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.blocks(x) - y) ** 2).mean()


def norms() -> nn.Module:
    return Model(nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=0.3, affine=False))


def synchronised() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(norms())


def counts() -> nn.Module:
    return Model(Counts(), Counts())


def spectral() -> nn.Module:
    layers = [parametrizations.spectral_norm(nn.Linear(6, 6)), spectral_norm(nn.Linear(6, 6))]
    return Model(*layers)


EXACT: dict[str, Callable[[], nn.Module]] = {
    "synchronised": synchronised, "counts": counts, "spectral": spectral, "norms": norms,
}  # fmt: skip


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, size, 6, dtype=DTYPE, generator=generator)
    return x + 1, y


def batches(micro: int = 1) -> list[tuple[Tensor, Tensor]]:
    return [batch(step, 4 * micro) for step in range(3)]


def planned(model: nn.Module, how: str) -> ss.Compiled:
    """A program of two devices; ``how`` is a plan, or what data parallelism does twice."""
    plan = ss.Plan(ss.capture(model, batch(0, 4)), devices=range(2))
    again = {"rerun": plan.recompute_regions, "recomputed": plan.recompute}.get(how)
    if again is None:
        return compiled(plan.graph, how)
    PLANS["data_parallel"](plan)
    again(plan.graph.ops[:-2])
    return ss.compile(plan)


HOW = ["data_parallel", "zero3", "one_f_one_b", "rerun", "recomputed", "alternating"]


@pytest.mark.parametrize(
    "how, name", [*zip(HOW, [*EXACT][:3] * 2, strict=True), ("one_f_one_b", "norms")]
)
def test_buffers_and_weights_are_those_of_one_device(name: str, how: str, tmp_path: Path) -> None:
    model = made(EXACT[name])
    program = planned(model, how)
    check_program(program, model, batches(program.plan.num_microbatches), tmp_path)


# --- batch norm -----------------------------------------------------------------------------------


def train_by_halves(model: nn.Module) -> Trained:
    """As torch's DistributedDataParallel on two ranks: each rank normalizes its half of the batch,
    and the buffers of the first rank are broadcast."""

    def step(*batch: Tensor) -> Tensor:
        halves = zip(*(x.chunk(2) for x in batch), strict=True)
        ranks = [model, copy.deepcopy(model)]
        loss = sum(rank(*half) / 2 for rank, half in zip(ranks, halves, strict=True))
        loss.backward()
        for mine, others in zip(*(rank.parameters() for rank in ranks), strict=True):
            mine.grad += others.grad
        return loss

    return train(step, model.parameters(), batches()), dict(model.state_dict())


@pytest.mark.parametrize("how", ["data_parallel", "zero3", "recomputed"])
def test_batch_norm_in_data_parallel_is_that_of_ddp(how: str, tmp_path: Path) -> None:
    model = made(norms)
    found = on_ranks(planned(model, how), tmp_path, lambda t: in_program(t, batches()))
    expected = train_by_halves(model)
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)


def test_capture_notes_batch_norm_per_device_and_suggests_sync_batch_norm() -> None:
    (note,) = ss.capture(made(norms), batch(0, 4)).notes
    assert "as in DistributedDataParallel" in note
    assert "convert_sync_batchnorm" in note
    assert not ss.capture(made(synchronised), batch(0, 4)).notes


def test_batch_norm_in_evaluation_uses_its_running_statistics(tmp_path: Path) -> None:
    model = made(norms)
    in_torch(model, batches())
    program = planned(model.eval(), "data_parallel")
    assert not program.plan.graph.state
    expected = pytest.approx([model(*batch(7, 4)).item()] * 2, rel=1e-12)
    assert on_ranks(program, tmp_path, lambda t: t.step(*batch(7, 4)).item()) == expected


# --- checkpoints and errors -----------------------------------------------------------------------


def test_checkpoint_restores_buffers_under_another_plan(tmp_path: Path) -> None:
    model = made(counts)
    first, second = (planned(model, name) for name in ("one_f_one_b", "data_parallel"))
    micro = first.plan.num_microbatches

    def begin(trainer: ss.Trainer) -> None:
        in_program(trainer, batches(micro)[:1])
        trainer.save(tmp_path / "saved")

    def go_on(trainer: ss.Trainer) -> Any:
        trainer.load(tmp_path / "saved")
        return trainer.state_dict(), in_program(trainer, batches())

    on_ranks(first, tmp_path / "first", begin)
    found = on_ranks(second, tmp_path / "second", go_on)
    in_torch(model, batches(micro)[:1], micro)
    expected = copy.deepcopy(dict(model.state_dict())), in_torch(model, batches())
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)


def test_updated_buffers_of_a_stage_on_several_workers_raise_plan_error() -> None:
    with pytest.raises(ss.PlanError, match=r"replaces buffers in its forward .* on one worker"):
        planned(made(counts), "chimera")


def test_buffer_update_with_a_gradient_raises_capture_error() -> None:
    class Keeps(Counts):
        def forward(self, x: Tensor) -> Tensor:
            self.average += x.mean(0)
            return x

    with pytest.raises(ss.CaptureError, match=r"a gradient in buffer .*average.*detach"):
        ss.capture(Model(Keeps()), batch(0, 4))
