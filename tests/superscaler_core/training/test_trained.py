"""``Trained``: parameters are frozen and trained again between steps, as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import superscaler_core as ss
from tests.superscaler_core.as_torch import compiled, on_ranks
from tests.superscaler_core.parallel.small_nets import batch, net
from tests.superscaler_core.parallel.threads import on_threads

CLOSE = {"rtol": 0.0, "atol": 1e-12}
Named = Callable[[], Iterator[tuple[str, Tensor]]]

FREEZES: dict[int, dict[str, bool]] = {
    1: {"layers.0": False, "layers.2": False},
    3: {"layers.0": True},
    4: {"layers.2": True, "layers.3": False},
}
"""By the number of the step before which it happens: modules, and whether they are trained."""


def freeze(named: Named, flags: dict[str, bool]) -> None:
    for name, parameter in named():
        for module, flag in flags.items():
            if name.startswith(module):
                parameter.requires_grad_(flag)


def trained(step: Callable[[], Tensor], model: Any, named: Named) -> tuple[Tensor, Any, set[str]]:
    """Losses and parameters of some steps, and the names of parameters that have a gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for number in range(6):
        freeze(named, FREEZES.get(number, {}))
        optimizer.zero_grad()
        losses.append(step().detach())
        optimizer.step()
    with_grad = {name for name, p in model.named_parameters() if p.grad is not None}
    return torch.stack(losses), {n: t.clone() for n, t in model.state_dict().items()}, with_grad


def alone(model: Any) -> tuple[Tensor, Any, set[str]]:
    def step() -> Tensor:
        loss: Tensor = model(batch())
        loss.backward()
        return loss

    return trained(step, model, model.named_parameters)


@pytest.mark.parametrize(
    "plan, starts_frozen",
    [("megatron", False), ("zero3", True), ("one_f_one_b:microbatches=4", False)],
)
def test_frozen_and_unfrozen_parameters_train_as_on_one_device(
    plan: str, starts_frozen: bool
) -> None:
    def model() -> Any:
        made = net()
        if starts_frozen:
            freeze(made.named_parameters, {"layers.0": False, "layers.1": False})
        return made

    def work(parallel: ss.Parallel) -> Any:
        return trained(lambda: parallel.step(x=batch()), parallel, parallel.named_parameters)

    wanted = alone(model())
    found = on_threads(model(), {"x": batch()}, 2, work, plan=plan)
    for losses, state, _ in found.values():
        torch.testing.assert_close((losses, state), wanted[:2], **CLOSE)
    assert set().union(*(names for _, _, names in found.values())) == wanted[2]


def test_flags_of_the_captured_model_freeze_on_all_ranks() -> None:
    model = net()

    def work(parallel: ss.Parallel) -> tuple[set[str], set[str]]:
        parallel.step(x=batch())
        parallel.trainer.calls.rows(torch.zeros(1))  # all ranks have stepped
        model.layers[1].requires_grad_(False)
        for parameter in parallel.parameters():
            parameter.grad = None
        parallel.step(x=batch())
        have = {n for n, p in parallel.named_parameters() if p.grad is not None}
        return have, {n for n, p in parallel.named_parameters() if p.requires_grad}

    wanted = {f"layers.{i}.{name}" for i in (0, 2, 3) for name in ("weight", "bias")}
    for have, flags in on_threads(model, {"x": batch()}, 2, work).values():
        assert have == flags == wanted


def test_program_of_an_earlier_set_is_used_again() -> None:
    parallel = ss.parallelize(net(), kwargs={"x": batch()})
    for flag in (True, False, True, False):
        freeze(parallel.named_parameters, {"layers.0": flag})
        parallel.step(x=batch())
    assert len(parallel._programs.kept) == 2


def test_evaluation_does_not_depend_on_what_is_trained() -> None:
    parallel = ss.parallelize(net(), kwargs={"x": batch()})
    freeze(parallel.named_parameters, {"layers": False})
    assert parallel.evaluate(x=batch()).item() == pytest.approx(net()(batch()).item(), rel=1e-12)


def test_ranks_that_freeze_different_parameters_raise_plan_error_on_all() -> None:
    # Each rank stores the parameter, and its flag is that rank's own.
    def work(parallel: ss.Parallel) -> str:
        if parallel.trainer.rank == 1:
            freeze(parallel.named_parameters, {"layers.2.bias": False})
        with pytest.raises(ss.PlanError) as raised:
            parallel.step(x=batch())
        freeze(parallel.named_parameters, {"layers.2.bias": False})
        parallel.step(x=batch())
        return str(raised.value)

    wanted = (
        "requires_grad of 'layers.2.bias' is True on ranks [0] and False on ranks [1]: freeze it, "
        "or train it, on all ranks that store it."
    )
    assert {*on_threads(net(), {"x": batch()}, 2, work).values()} == {wanted}


def test_parameters_of_a_program_in_files_can_be_frozen_and_trained_again(tmp_path: Path) -> None:
    program = compiled(ss.capture(net(), (batch(),)), "data_parallel")

    def work(trainer: ss.Trainer) -> None:
        for flag in (False, True):
            freeze(trainer.named_parameters, {"layers.0": flag})
            for parameter in trainer.parameters():
                parameter.grad = None
            trainer.step(batch())
            have = {name for name, p in trainer.named_parameters() if p.grad is not None}
            assert ("layers.0.weight" in have) is flag
            assert "layers.1.weight" in have

    on_ranks(program, tmp_path, work)


def test_parameter_that_a_program_in_files_has_no_gradient_of_is_refused(tmp_path: Path) -> None:
    model = net()
    model.layers[0].requires_grad_(False)
    program = compiled(ss.capture(model, (batch(),)), "data_parallel")

    def work(trainer: ss.Trainer) -> str:
        freeze(trainer.named_parameters, {"layers.0": True})
        with pytest.raises(ss.PlanError) as raised:
            trainer.step(batch())
        return str(raised.value)

    for text in on_ranks(program, tmp_path, work):
        assert text.startswith("requires_grad of 'layers.0.bias' was set to True, and the program")
