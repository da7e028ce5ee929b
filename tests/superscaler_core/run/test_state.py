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
    "synchronised": synchronised, "counts": counts, "spectral": spectral,
}  # fmt: skip


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, size, 6, dtype=DTYPE, generator=generator)
    return x + 1, y


def recompute_regions(plan: ss.Plan) -> None:
    PLANS["data_parallel"](plan)
    plan.recompute_regions(plan.graph.ops[:-2])


def recomputed(plan: ss.Plan) -> None:
    PLANS["data_parallel"](plan)
    plan.recompute(plan.graph.ops[:-2])


def alternating(plan: ss.Plan) -> None:
    for op in plan.graph.ops:
        plan.op_assign(op, op.index // 2 % 2)


HOW = {
    **{name: PLANS[name] for name in ("data_parallel", "zero3", "one_f_one_b")},
    "rerun": recompute_regions, "recomputed": recomputed, "alternating": alternating,
}  # fmt: skip


def train_alone(model: nn.Module, size: int, micro: int, steps: int = 3) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        total = 0.0
        for x, y in zip(*(t.chunk(micro) for t in batch(step, size * micro)), strict=True):
            loss = model(x, y) / micro
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def train(trainer: ss.Trainer, size: int, micro: int, steps: int = 3, folder: Any = None) -> Any:
    optimizer = torch.optim.SGD([*trainer.parameters()] or [torch.zeros(())], lr=0.1)
    losses = []
    for step in range(steps):
        losses.append(trainer.step(*batch(step, size * micro)).item())
        optimizer.step()
        optimizer.zero_grad()
        if folder is not None and step == 0:
            trainer.save(folder)
    return losses, trainer.state_dict()


@pytest.mark.parametrize("how, name", [*zip(HOW, [*EXACT] * 2, strict=True)])
def test_buffers_and_weights_are_those_of_one_device(name: str, how: str, tmp_path: Path) -> None:
    model = made(EXACT[name])
    plan = ss.Plan(ss.capture(model, batch(0, 4)), devices=range(2))
    HOW[how](plan)
    compiled = ss.compile(plan).save(tmp_path)
    expected = train_alone(copy.deepcopy(model), 4, plan.num_microbatches)
    for found in ss.run_threads(
        compiled, lambda t: train(t, 4, plan.num_microbatches), range(2)
    ).values():
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


# --- batch norm -----------------------------------------------------------------------------------


def train_by_halves(model: nn.Module, steps: int = 3) -> Any:
    """As torch's DistributedDataParallel on two ranks: each rank normalizes its half of the batch,
    and the buffers of the first rank are broadcast."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        halves = zip(*(t.chunk(2) for t in batch(step, 4)), strict=True)
        ranks = [model, copy.deepcopy(model)]
        made = [rank(*half) / 2 for rank, half in zip(ranks, halves, strict=True)]
        losses.append(sum(loss.item() for loss in made))
        sum(made).backward()
        for mine, others in zip(*(rank.parameters() for rank in ranks), strict=True):
            mine.grad += others.grad
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize("how", ["data_parallel", "zero3", "recomputed"])
def test_batch_norm_in_data_parallel_is_that_of_ddp(how: str, tmp_path: Path) -> None:
    model = made(norms)
    plan = ss.Plan(ss.capture(model, batch(0, 4)), devices=range(2))
    HOW[how](plan)
    expected = train_by_halves(copy.deepcopy(model))
    compiled = ss.compile(plan).save(tmp_path)
    for found in ss.run_threads(compiled, lambda t: train(t, 4, 1), range(2)).values():
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_capture_notes_batch_norm_per_device_and_suggests_sync_batch_norm() -> None:
    (note,) = ss.capture(made(norms), batch(0, 4)).notes
    assert "as in DistributedDataParallel" in note
    assert "convert_sync_batchnorm" in note
    assert not ss.capture(made(synchronised), batch(0, 4)).notes


def test_batch_norm_in_a_pipeline_is_that_of_one_device(tmp_path: Path) -> None:
    model = made(norms)
    plan = ss.Plan(ss.capture(model, batch(0, 4)), devices=range(2))
    PLANS["one_f_one_b"](plan)
    expected = train_alone(copy.deepcopy(model), 4, plan.num_microbatches)
    compiled = ss.compile(plan).save(tmp_path)
    micro = plan.num_microbatches
    for found in ss.run_threads(compiled, lambda t: train(t, 4, micro), range(2)).values():
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_batch_norm_in_evaluation_uses_its_running_statistics(tmp_path: Path) -> None:
    model = made(norms)
    train_alone(model, 4, 1)
    model.eval()
    plan = ss.Plan(ss.capture(model, batch(0, 4)), devices=range(2))
    PLANS["data_parallel"](plan)
    assert not plan.graph.state
    compiled = ss.compile(plan).save(tmp_path, weights=True)
    expected = model(*batch(7, 4)).item()
    for found in ss.run_threads(compiled, lambda t: t.step(*batch(7, 4)).item(), range(2)).values():
        assert found == pytest.approx(expected, rel=1e-12)


# --- checkpoints and errors -----------------------------------------------------------------------


def test_checkpoint_restores_buffers_under_another_plan(tmp_path: Path) -> None:
    model = made(counts)
    graph = ss.capture(model, batch(0, 4))
    plans = {name: ss.Plan(graph, devices=range(2)) for name in ("one_f_one_b", "data_parallel")}
    folders = {}
    for name, plan in plans.items():
        PLANS[name](plan)
        folders[name] = ss.compile(plan).save(tmp_path / name)
    micro = plans["one_f_one_b"].num_microbatches
    saved = tmp_path / "saved"
    ss.run_threads(
        folders["one_f_one_b"], lambda t: train(t, 4, micro, steps=1, folder=saved), range(2)
    )
    alone = copy.deepcopy(model)
    train_alone(alone, 4, micro, steps=1)

    def go_on(trainer: ss.Trainer) -> Any:
        trainer.load(saved)
        return trainer.state_dict(), train(trainer, 4, 1)

    expected = copy.deepcopy(alone.state_dict()), train_alone(alone, 4, 1)
    for found in ss.run_threads(folders["data_parallel"], go_on, range(2)).values():
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_training_starts_from_the_buffers_of_a_loaded_state_dict(tmp_path: Path) -> None:
    model = made(counts)
    plan = ss.Plan(ss.capture(model, batch(0, 4)), devices=range(2))
    PLANS["one_f_one_b"](plan)
    train_alone(model, 4, 1)
    state = copy.deepcopy(model.state_dict())
    # ``last`` is not persistent, and so it is no entry of a state dict.
    for block in model.blocks:
        block[1].last.zero_()
    expected = train_alone(model, 4, plan.num_microbatches)

    def run(trainer: ss.Trainer) -> Any:
        trainer.load_state_dict(state)
        return train(trainer, 4, plan.num_microbatches)

    for found in ss.run_threads(ss.compile(plan).save(tmp_path), run, range(2)).values():
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_updated_buffers_of_a_stage_on_several_workers_raise_plan_error() -> None:
    plan = ss.Plan(ss.capture(made(counts), batch(0, 4)), devices=range(2))
    PLANS["chimera"](plan)
    with pytest.raises(ss.PlanError, match=r"replaces buffers in its forward .* on one worker"):
        ss.compile(plan)


def test_buffer_update_with_a_gradient_raises_capture_error() -> None:
    class Keeps(Counts):
        def forward(self, x: Tensor) -> Tensor:
            self.average += x.mean(0)
            return x

    with pytest.raises(ss.CaptureError, match=r"a gradient in buffer .*average.*detach"):
        ss.capture(Model(Keeps()), batch(0, 4))
