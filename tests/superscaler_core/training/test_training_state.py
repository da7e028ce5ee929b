"""State of a run: after saving and loading, training continues as without interruption."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rvdcomm as rv
import superscaler_core as ss
from rvdcomm.checkpoint import Rules, open_checkpoint, reshard
from superscaler_core.training.training_state import SavedRun
from tests.superscaler_core.as_torch import compiled
from tests.superscaler_core.resumed import CASES, Resumable, grouped, same_losses
from tests.superscaler_core.small import on_one

PAIRS = [("pipeline", "tensor"), ("tensor", "hybrid"), ("hybrid", "three"), ("three", "zero1")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return on_threads("accumulate", tmp_path_factory.mktemp("program"), lambda run: run.train(7))[0]


def on_threads(name: str, folder: Path, work: Callable[[Resumable], Any]) -> list[Any]:
    case = CASES[name]
    program = folder / f"program_{name}"
    case.compiled().save(program)

    def serve(trainer: ss.Trainer) -> Any:
        return work(Resumable(trainer, case))

    return list(ss.run_threads(program, serve, range(case.num_devices), seed=5).values())


@pytest.mark.parametrize(
    ("before", "after", "form"),
    [(*pair, ("safetensors", "dcp")[number % 2]) for number, pair in enumerate(PAIRS)],
)
def test_training_resumes_under_another_plan_with_the_same_losses(
    before: str, after: str, form: str, tmp_path: Path, uninterrupted: dict[int, float]
) -> None:
    def first(run: Resumable) -> dict[int, float]:
        run.train(3)
        run.save(tmp_path / "step", format=form)
        return run.train(1)

    def second(run: Resumable) -> dict[int, float]:
        run.load(tmp_path / "step")
        return run.train(3)

    for losses in on_threads(before, tmp_path, first):
        assert same_losses(losses, uninterrupted)
    for losses in on_threads(after, tmp_path, second):
        assert sorted(losses) == [3, 4, 5]
        assert same_losses(losses, uninterrupted)


# --- optimizers, compared with a single device --------------------------------------------------

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, dtype=torch.float64)
        self.last = nn.Linear(10, 6, dtype=torch.float64)
        self.register_buffer("scale", torch.full((6,), 2.0, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.last(torch.tanh(self.first(x))) * self.scale * self.scalar - x) ** 2).mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@cache
def program_of(plan_name: str) -> ss.Compiled:
    return compiled(ss.capture(net(), (X,)), plan_name)


def program(folder: Path, plan_name: str = "zero1") -> Path:
    return program_of(plan_name).save(folder / plan_name)


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


def alone(make: Make, folder: Path | None = None) -> tuple[Net, Any]:
    """Three steps of plain torch; saved after two."""
    model = net()
    optimizer = make(model.parameters())
    for number in range(3):
        if number == 2 and folder is not None:
            ss.save_run(folder, model, optimizer=optimizer, step=2)
        loss = model(X)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def step_of(trainer: ss.Trainer, optimizer: torch.optim.Optimizer) -> None:
    trainer.step(X)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "plan_name"),
    [
        *((name, "zero1") for name in OPTIMIZERS if name not in ("adam", "adamw", "rmsprop")),
        *(("adam", "megatron"), ("adamw", "data_parallel"), ("rmsprop", "megatron")),
    ],
)
def test_optimizer_state_moves_from_a_single_device_to_a_plan_and_back(
    name: str, plan_name: str, tmp_path: Path
) -> None:
    make = OPTIMIZERS[name]
    expected, expected_optimizer = alone(make, tmp_path / "two")

    def work(trainer: ss.Trainer) -> dict[str, Tensor]:
        optimizer = make(trainer.parameters())
        assert trainer.load(tmp_path / "two", optimizer=optimizer).step == 2
        step_of(trainer, optimizer)
        trainer.save(tmp_path / "three", optimizer=optimizer, step=3)
        return trainer.state_dict()

    for state in ss.run_threads(program(tmp_path, plan_name), work, range(2)).values():
        torch.testing.assert_close(state, dict(expected.state_dict()), rtol=1e-12, atol=1e-14)
    model = net()
    optimizer = make(model.parameters())
    assert ss.load_run(tmp_path / "three", model, optimizer=optimizer).step == 3
    torch.testing.assert_close(
        optimizer.state_dict(), expected_optimizer.state_dict(), rtol=1e-10, atol=1e-14
    )


def test_training_resumes_when_the_first_rank_has_nothing_to_train(tmp_path: Path) -> None:
    model = net()
    model.first.requires_grad_(False)
    plan = ss.Plan(ss.capture(model, (X,)), devices=range(2))
    for op in plan.graph.ops:
        plan.op_assign(op, op.module != "first")
    folder = ss.compile(plan).save(tmp_path / "program")

    def work(trainer: ss.Trainer, *, resumes: bool) -> list[float]:
        trainer.update_with(OPTIMIZERS["adam"])
        if resumes:
            trainer.load(tmp_path / "two")
            return [trainer.step(X).item()]
        losses = [trainer.step(X).item() for _ in range(2)]
        trainer.save(tmp_path / "two")
        return [*losses, trainer.step(X).item()]

    whole, after = (
        ss.run_threads(folder, partial(work, resumes=resumes), range(2))
        for resumes in (False, True)
    )
    assert after == {rank: losses[2:] for rank, losses in whole.items()}


# --- contents of a checkpoint -------------------------------------------------------------------


def saved(folder: Path, **options: Any) -> Path:
    def work(trainer: ss.Trainer) -> None:
        optimizer = OPTIMIZERS["adam"](trainer.parameters())
        step_of(trainer, optimizer)
        trainer.save(folder / "saved", optimizer=optimizer, step=1, **options)

    ss.run_threads(program(folder, "data_parallel"), work, range(2))
    return folder / "saved"


def test_optimizer_states_are_saved_once_in_the_layout_of_their_parameters(tmp_path: Path) -> None:
    tensors = open_checkpoint(saved(tmp_path)).tensors
    names = dict(net().named_parameters())
    like = {f"optimizer.state.{n}.{k}": n for n in names for k in ("exp_avg", "exp_avg_sq")}
    like |= {f"optimizer.state.{n}.max_exp_avg_sq": n for n in names}
    extra = {"scale", "training.json"}
    assert set(tensors) == {*names, *like, *extra}
    for state, name in like.items():
        assert {b.box for b in tensors[state].blocks} == {b.box for b in tensors[name].blocks}
    # Every tensor is written once, and the replicas share the writing.
    assert all(len(tensor.blocks) == 1 for tensor in tensors.values())
    assert len({block.extent.file for t in tensors.values() for block in t.blocks}) == 2


def test_checkpoint_without_options_has_only_the_model(tmp_path: Path) -> None:
    folder = program(tmp_path)
    ss.run_threads(folder, lambda trainer: trainer.save(tmp_path / "model"), range(2))
    assert set(open_checkpoint(tmp_path / "model").tensors) == set(net().state_dict())
    model = net()
    with pytest.raises(rv.CheckpointError, match="holds a model alone, without the state"):
        ss.load_run(tmp_path / "model", model, optimizer=OPTIMIZERS["adam"](model.parameters()))


def test_checkpoint_restores_buffers_step_extra_and_scaler(tmp_path: Path) -> None:
    extra = {"epoch": 3, "best": (0.5, [1])}
    model = net()
    model.scale.fill_(7.0)
    ss.save_run(tmp_path / "saved", model, step=4, extra=extra, scaler=Scaler(8.0))

    def work(trainer: ss.Trainer) -> tuple[SavedRun, Tensor, Tensor]:
        found = trainer.load(tmp_path / "saved", scaler=(scaler := Scaler(0.0)))
        assert scaler.scale == 8.0
        return found, trainer.state_dict()["scale"], trainer.step(X)

    for found, scale, loss in ss.run_threads(program(tmp_path), work, range(2)).values():
        assert found == SavedRun(4, extra)
        assert torch.equal(scale, model.scale)
        torch.testing.assert_close(loss, model(X).detach())


class Scaler:
    """An object with a state, like a gradient scaler."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.random()),
    "torch": lambda: torch.rand(()).item(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_generators_are_restored_together_with_the_optimizer(
    name: str, tmp_path: Path
) -> None:
    model, draw = net(), DRAWS[name]
    optimizer = torch.optim.SGD(model.parameters())
    draw()
    ss.save_run(tmp_path / "saved", model, optimizer=optimizer)
    expected = [draw() for _ in range(3)]
    ss.load_run(tmp_path / "saved", model)
    assert draw() not in expected
    ss.load_run(tmp_path / "saved", model, optimizer=optimizer)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("to", ["sharded", "dcp", "whole"])
def test_resharded_checkpoint_restores_the_same_state(to: str, tmp_path: Path) -> None:
    reshard(saved(tmp_path), tmp_path / "other", Rules(), to=to)
    states = []
    for folder in (tmp_path / "saved", tmp_path / "other"):
        model = net()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        assert ss.load_run(folder, model, optimizer=optimizer).step == 1
        states.append((model.state_dict(), optimizer.state_dict()))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


# --- errors -------------------------------------------------------------------------------------


def refused(folder: Path, make: Make, match: str) -> None:
    """Every rank refuses to save the state of an optimizer."""

    def work(trainer: ss.Trainer) -> None:
        optimizer = make(trainer.parameters())
        step_of(trainer, optimizer)
        with pytest.raises(rv.CheckpointError, match=match):
            trainer.save(folder / "saved", optimizer=optimizer, step=1)

    ss.run_threads(program(folder, "megatron"), work, range(2))
    assert not (folder / "saved").exists()


class RowKeeper(torch.optim.SGD):
    """Steps element by element, and keeps the mean of every row beside."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() > 1:
                self.state[parameter]["mean"] = parameter.detach().mean(-1, keepdim=True)
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:RowKeeper steps parts")
def test_optimizer_state_of_another_shape_raises_checkpoint_error(tmp_path: Path) -> None:
    match = r"RowKeeper keeps mean \[5, 1\] for first.weight, of which this rank stores \[5, 6\]"
    refused(tmp_path, lambda p: RowKeeper(p), match)


def test_optimizer_of_a_tensor_that_is_no_parameter_raises_checkpoint_error(tmp_path: Path) -> None:
    other = nn.Parameter(torch.ones(4))
    match = r"saved: rank 0: SGD updates a tensor of shape \[4\] that is none of trainer.param"
    refused(tmp_path, lambda p: torch.optim.SGD([*p, other]), match)


def test_two_optimizers_of_one_parameter_are_refused() -> None:
    model = net()
    one, two = (torch.optim.SGD(model.parameters()) for _ in range(2))
    with pytest.raises(rv.CheckpointError, match="two optimizers update scalar"):
        ss.save_run("nowhere", model, optimizer=[one, two])


def test_different_optimizer_options_on_ranks_raise_checkpoint_error(tmp_path: Path) -> None:
    def work(trainer: ss.Trainer) -> None:
        optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1 + trainer.rank)
        with pytest.raises(rv.CheckpointError, match="ranks that store scalar have different"):
            trainer.save(tmp_path / "saved", optimizer=optimizer)

    ss.run_threads(program(tmp_path, "data_parallel"), work, range(2))


def test_loading_into_another_optimizer_class_raises_checkpoint_error(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters())
    match = "saved state of scalar is of Adam, and the optimizer is RMSprop: make a Adam"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(rv.CheckpointError, match=match):
        ss.load_run(saved(tmp_path), model, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parameter_groups_restore_their_options_by_parameter(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(grouped(model.named_parameters()), lr=0.1)
    ss.save_run(tmp_path / "saved", model, optimizer=optimizer)
    turned = torch.optim.SGD(grouped(model.named_parameters())[::-1], lr=0.5)
    ss.load_run(tmp_path / "saved", model, optimizer=turned)
    found = [(group["lr"], group["weight_decay"]) for group in turned.param_groups]
    assert found == [(0.1, 0.0), (0.1, 0.1)]
    match = "in one group of SGD, and were saved with different options: weight_decay="
    with pytest.raises(rv.CheckpointError, match=match):
        ss.load_run(tmp_path / "saved", model, optimizer=torch.optim.SGD(model.parameters()))


def test_parameter_without_a_saved_state_raises_checkpoint_error(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.first.parameters())
    ss.save_run(tmp_path / "saved", model, optimizer=optimizer)
    with pytest.raises(
        rv.CheckpointError, match=r"state has nothing of .*, which this SGD updates"
    ):
        ss.load_run(tmp_path / "saved", model, optimizer=torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("given", ["scheduler", "scaler"])
def test_loading_an_unsaved_scheduler_or_scaler_raises_checkpoint_error(
    given: str, tmp_path: Path
) -> None:
    model = net()
    ss.save_run(tmp_path / "saved", model, step=1)
    with pytest.raises(
        rv.CheckpointError, match=r"0 schedulers, and 1 are|no state of a gradient scaler"
    ):
        ss.load_run(tmp_path / "saved", model, **{given: Scaler(1.0)})


def test_save_that_fails_on_one_rank_raises_checkpoint_error_on_all(tmp_path: Path) -> None:
    def work(trainer: ss.Trainer) -> None:
        trainer.save(tmp_path / "saved")
        with pytest.raises(rv.CheckpointError, match="saved holds a complete checkpoint"):
            trainer.save(tmp_path / "saved")

    # The other rank has nothing to write.
    plan = on_one(ss.Plan(ss.capture(net(), (X,)), devices=range(2)))
    folder = ss.compile(plan).save(tmp_path / "program")
    ss.run_threads(folder, work, range(2), timeout_secs=10)


# --- the latest checkpoint ----------------------------------------------------------------------


def test_latest_returns_the_complete_checkpoint_with_the_highest_step(tmp_path: Path) -> None:
    assert ss.latest(tmp_path / "none") is None
    for step in (2, 10, 9):
        ss.save_run(tmp_path / f"step-{step}", net(), step=step)
    ss.save_run(tmp_path / "model", net())
    ss.save_run(tmp_path / "step-11", net(), step=11)
    (tmp_path / "step-11" / "rvdcomm-manifest.json").unlink()
    assert ss.latest(tmp_path) == tmp_path / "step-10"
