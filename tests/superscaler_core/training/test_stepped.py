"""``Stepped``: optimizers and norms that need whole tensors are refused where these are boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import superscaler_core as ss
from tests.superscaler_core.parallel.small_nets import batch, net
from tests.superscaler_core.parallel.threads import on_threads


class Muon(torch.optim.SGD):
    """By its name it needs whole tensors."""


class LAMB(torch.optim.SGD):
    """By its name it needs whole tensors."""


class Lars8bit(torch.optim.SGD):
    """By its name, without the bits of its states, it needs whole tensors."""


class Wrapped(LAMB):
    """Of a class that needs whole tensors."""


class TwoSteps(torch.optim.Optimizer):
    """As users write SAM: another optimizer steps the groups, which have its options."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, "adaptive": False})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.base.step()


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    class Lbfgs(torch.optim.LBFGS):
        def step(self, closure: Any = None) -> Any:
            return super().step(lambda: 0.0)

    return Lbfgs(parameters)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": lambda p: Muon(p, lr=0.1),
    "LAMB": lambda p: Wrapped(p, lr=0.1),
    "Lars8bit": lambda p: Lars8bit(p, lr=0.1),
    "Adafactor": torch.optim.Adafactor,
    "SAM": TwoSteps,
    "Lbfgs": lbfgs,
}


def refused(parallel: ss.Parallel, make: Any) -> str:
    """What an optimizer's step raises; parameters stay as they are."""
    parallel.step(x=batch())
    before = [p.detach().clone() for p in parallel.parameters()]
    optimizer = make(parallel.parameters())
    with pytest.raises(ss.PlanError) as raised:
        optimizer.step()
    assert all(map(torch.equal, parallel.parameters(), before))
    return str(raised.value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_that_needs_whole_tensors_is_refused_by_name_on_boxes(name: str) -> None:
    found = on_threads(
        net(), {"x": batch()}, 2, lambda p: refused(p, OPTIMIZERS[name]), plan="zero3"
    )
    for text in found.values():
        assert f"{name} needs whole tensors, and this rank stores [3, 6] of" in text


@pytest.mark.parametrize("name", ["SAM", "Lbfgs"])
def test_optimizer_over_all_parameters_is_refused_where_ranks_store_others(name: str) -> None:
    plan = "one_f_one_b:microbatches=2"
    found = on_threads(net(), {"x": batch()}, 2, lambda p: refused(p, OPTIMIZERS[name]), plan=plan)
    for text in found.values():
        assert f"{name} needs all parameters together" in text


@pytest.mark.parametrize(
    "name, plan",
    [*((name, "data_parallel") for name in OPTIMIZERS), ("Muon", "one_f_one_b:microbatches=2")],
)
def test_optimizer_is_allowed_where_parameters_are_whole(name: str, plan: str) -> None:
    def work(parallel: ss.Parallel) -> None:
        optimizer = OPTIMIZERS[name](parallel.parameters())
        for _ in range(2):
            parallel.step(x=batch())
            optimizer.step()

    on_threads(net(), {"x": batch()}, 2, work, plan=plan)


class Novel(torch.optim.Optimizer):
    """Of a name that tells nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """It changes nothing."""


def test_an_optimizer_that_is_not_known_warns_once_where_parameters_are_parts() -> None:
    def work(parallel: ss.Parallel) -> None:
        parallel.step(x=batch())
        Novel(parallel.parameters()).step()

    with pytest.warns(UserWarning, match="Novel steps parts of parameters") as found:
        on_threads(net(), {"x": batch()}, 2, work, plan="zero3")
    assert len(found) == 1
    on_threads(net(), {"x": batch()}, 2, work, plan="zero3")
    on_threads(net(), {"x": batch()}, 2, work)


@pytest.mark.parametrize("plan", ["zero3", "one_f_one_b:microbatches=2"])
@pytest.mark.parametrize("of_torch", ["clip_grad_norm_", "get_total_norm"])
def test_norm_of_torch_over_boxes_is_refused(of_torch: str, plan: str) -> None:
    def work(parallel: ss.Parallel) -> None:
        parallel.step(x=batch())
        given: list[Any] = [*parallel.parameters()]
        args = (given, 1.0) if of_torch == "clip_grad_norm_" else ([p.grad for p in given],)
        before = [p.grad.clone() for p in given]
        with pytest.raises(ss.PlanError, match="call clip_grad_norm_ of the parallel model"):
            getattr(nn.utils, of_torch)(*args)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(given, before, strict=True))
        assert parallel.clip_grad_norm_(1.0) > 0

    on_threads(net(), {"x": batch()}, 2, work, plan=plan)


def test_norm_of_torch_is_that_of_the_model_where_parameters_are_whole() -> None:
    def work(parallel: ss.Parallel) -> tuple[float, float]:
        parallel.step(x=batch())
        ours = parallel.clip_grad_norm_(1e9).item()
        return nn.utils.clip_grad_norm_(parallel.parameters(), 1e9).item(), ours

    for found in on_threads(net(), {"x": batch()}, 2, work).values():
        assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_optimizer_over_the_captured_models_own_parameters_is_refused() -> None:
    model = net()
    parallel = ss.parallelize(model, kwargs={"x": batch()})
    parallel.step(x=batch())
    with pytest.raises(ss.PlanError, match="make the optimizer over parameters\\(\\) of what"):
        torch.optim.AdamW(model.parameters()).step()


def stepped_by(changes: Callable[[int, torch.optim.Optimizer], object]) -> set[str]:
    """What ranks raise at the step after each of them changed its optimizer."""

    def work(parallel: ss.Parallel) -> str:
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        parallel.step(x=batch())
        optimizer.step()
        parallel.step(x=batch())
        changes(parallel.trainer.rank, optimizer)
        try:
            parallel.step(x=batch())
        except ss.PlanError as error:
            return str(error)
        return ""

    return {*on_threads(net(), {"x": batch()}, 2, work, plan="zero3").values()}


def test_ranks_whose_optimizers_differ_raise_plan_error_at_the_next_call() -> None:
    def change(rank: int, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)

    (text,) = stepped_by(change)
    assert text.startswith("step: before it, ranks 0 and 1 stepped optimizers over the same")


def test_rank_that_left_out_a_step_of_its_optimizer_is_noticed() -> None:
    (text,) = stepped_by(lambda rank, optimizer: rank == 0 and optimizer.step())
    assert "another number of times" in text


def test_equal_changes_of_groups_pass() -> None:
    def change(_: int, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.3

    assert stepped_by(change) == {""}


def test_how_parameters_are_grouped_does_not_matter() -> None:
    def work(parallel: ss.Parallel) -> None:
        given = [*parallel.parameters()]
        halves = [{"params": given[:3]}, {"params": given[3:]}]
        groups = halves if parallel.trainer.rank else [{"params": given}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        for _ in range(2):
            parallel.step(x=batch())
            optimizer.step()

    on_threads(net(), {"x": batch()}, 2, work, plan="zero3")
