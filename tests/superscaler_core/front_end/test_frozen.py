"""Parameters that a forward freezes for a while, or changes while they are frozen."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from tests.superscaler_core.as_torch import check_as_in_torch, in_program, in_torch
from tests.superscaler_core.parallel.threads import on_threads

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Teacher(nn.Module):
    """A model of two layers: what is trained, and what follows it or is compared with it."""

    def __init__(self, run: Callable[[Teacher, Tensor], Tensor], *, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.other = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))
        self.other.requires_grad_(not frozen)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def one_frozen(model: Teacher, x: Tensor) -> Tensor:
    model.other.requires_grad_(False)
    made = model.other(model.line(x).tanh())
    model.other.requires_grad_(True)
    return (model.other(made) ** 2).mean()


def reference(model: Teacher, x: Tensor) -> Tensor:
    """As DPO's reference: the same weights without gradient, but with one of the inputs."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    before = model.other(model.line(x))
    for parameter in model.parameters():
        parameter.requires_grad = True
    return ((model.other(model.line(x)) - 0.5 * before) ** 2).mean()


def adapter(model: Teacher, x: Tensor) -> Tensor:
    """As PEFT's ``disable_adapter``: the adapter is frozen where it is not read."""
    model.other.requires_grad_(False)
    with torch.no_grad():
        before = model.line(x)
    model.other.requires_grad_(True)
    return ((model.line(x) + model.other(x) - before * 0.3) ** 2).mean()


def average(update: Callable[[Tensor, Tensor], object]) -> Callable[[Teacher, Tensor], Tensor]:
    """As BYOL and MoCo: a frozen average of the trained weights computes what is compared with."""

    def run(model: Teacher, x: Tensor) -> Tensor:
        with torch.no_grad():
            for kept, new in zip(model.other.parameters(), model.line.parameters(), strict=True):
                update(kept, new)
            wanted = model.other(x)
        return ((model.line(x) - wanted) ** 2).mean()

    return run


def listed(model: Teacher, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_lerp_([*model.other.parameters()], [*model.line.parameters()], 0.1)
    return ((model.line(x) - model.other(x)) ** 2).mean()


def of_data(kept: Tensor, new: Tensor) -> None:
    kept.data = kept.data * 0.9 + new.data * 0.1


FROZEN_FOR_A_WHILE = [one_frozen, reference, adapter]
AVERAGES = {
    "in place": average(lambda kept, new: kept.mul_(0.9).add_(new, alpha=0.1)),
    "copied": average(lambda kept, new: kept.copy_(kept * 0.9 + new * 0.1)),
    "data": average(of_data),
    "data in place": average(lambda kept, new: kept.data.lerp_(new.data, 0.1)),
    "list": listed,
}


@pytest.mark.parametrize(
    "run, how", [(run, how) for run in FROZEN_FOR_A_WHILE for how in ("zero3", "alternating")]
)
def test_what_is_frozen_for_a_while_has_no_gradient_from_there(
    run: Callable[[Teacher, Tensor], Tensor], how: str, tmp_path: Path
) -> None:
    check_as_in_torch(Teacher(run, frozen=False), [X] * 3, how, tmp_path)


@pytest.mark.parametrize(
    "name, how", [*zip([*AVERAGES] * 2, cycle(["data_parallel", "zero3", "alternating"]))]
)
def test_frozen_parameters_that_a_forward_changes_are_state(
    name: str, how: str, tmp_path: Path
) -> None:
    check_as_in_torch(Teacher(AVERAGES[name], frozen=True), [X] * 3, how, tmp_path)


def test_averages_are_shared_by_the_programs_of_all_shapes() -> None:
    model = Teacher(AVERAGES["in place"], frozen=True)
    alone = deepcopy(model)
    expected = in_torch(alone, [X] * 3)[0], alone(X[:4]).detach(), dict(alone.state_dict())

    def work(parallel: ss.Parallel) -> tuple[object, ...]:
        return in_program(parallel, [X] * 3)[0], parallel.step(X[:4]), parallel.state_dict()

    for found in on_threads(model, {"x": X}, 2, work).values():
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "run, frozen, message",
    [
        (lambda m, x: m.other.requires_grad_(False)(x).sum() + m.line(x).sum(), False,
         "leaves parameter 'other.weight' frozen.* undo that before it returns"),
        (lambda m, x: m.other.requires_grad_(True)(x).sum() + m.line(x).sum(), True,
         "trains parameter 'other.weight', which is frozen outside .*requires_grad_"),
        (average(lambda kept, new: kept.mul_(0.9)), False,
         "writes parameter 'other.weight' in place, which is trained; .*freeze the parameter"),
        (average(of_data), False, "replaces the data of a tensor"),
    ],
)  # fmt: skip
def test_forward_that_leaves_other_parameters_trained_is_refused_by_name(
    run: Callable[[Teacher, Tensor], Tensor], frozen: bool, message: str
) -> None:
    with pytest.raises(ss.CaptureError, match=message):
        ss.capture(Teacher(run, frozen=frozen), (X,))
