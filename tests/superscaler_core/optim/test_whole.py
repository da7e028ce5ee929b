"""``optim.whole``: optimizers that need whole parameters step as on one device under every plan."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import superscaler_core as ss
from superscaler_core.optim import Whole
from tests.superscaler_core.optim.others import LAMB, LARS, SAM, SOAP, Shampoo
from tests.superscaler_core.packed import inputs, models
from tests.superscaler_core.parallel.small_nets import batch, net
from tests.superscaler_core.parallel.threads import on_threads

whole_module = sys.modules[Whole.__module__]
"""The package has a function of the name of its module."""

NUM_STEPS = 5

PLANS = {
    "data_parallel": 2, "zero3": 2, "megatron": 2, "data_parallel:zero=1,whole=true": 2,
    "one_f_one_b:microbatches=2": 2, "one_f_one_b:tp=2,microbatches=2,zero=1": 4,
}  # fmt: skip
"""Plans with their number of ranks: parameters that are whole on all, in boxes, whole on one."""

OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Shampoo": (Shampoo, {}),
    "SOAP": (SOAP, {}),
    "LAMB": (LAMB, {}),
    "LARS": (LARS, {"lr": 0.1, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"weight_decay": 0.1}),
}


def train(optimizer: Any, step: Callable[[], Any], num: int = NUM_STEPS) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for _ in range(num):
        step()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def alone(of: Callable[..., Any], num: int = NUM_STEPS, **options: Any) -> dict[str, Tensor]:
    """The parameters that the optimizer makes on one device."""
    model = net()
    train(of(model.parameters(), **options), lambda: model(x=batch()).backward(), num)
    return dict(model.state_dict())


def check(found: dict[int, dict[str, Tensor]], want: dict[str, Tensor], rel: float = 1e-12) -> None:
    for mine in found.values():
        for name, value in want.items():
            torch.testing.assert_close(mine[name], value, rtol=rel, atol=rel)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_one_device(name: str, plan: str) -> None:
    of, options = OPTIMIZERS[name]

    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        optimizer = ss.optim.whole(of, parallel, **options)
        train(optimizer, lambda: parallel.step(x=batch()))
        return parallel.state_dict()

    check(on_threads(net(), {"x": batch()}, PLANS[plan], work, plan=plan), alone(of, **options))


@pytest.mark.parametrize("plan", ["zero3", "one_f_one_b:tp=2,microbatches=2,zero=1"])
def test_matrices_by_muon_and_the_rest_by_adamw(plan: str) -> None:
    def both(model: Any, muon: Any, adamw: Any, step: Callable[[], Any]) -> None:
        for _ in range(NUM_STEPS):
            step()
            muon.step()
            adamw.step()
            muon.zero_grad()
            adamw.zero_grad()

    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    both(model, torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01),
         lambda: model(x=batch()).backward())  # fmt: skip

    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        mine = [p for p in parallel.parameters() if p.ndim == 2]
        rest = [p for p in parallel.parameters() if p.ndim < 2]
        muon = ss.optim.whole(torch.optim.Muon, parallel, mine, lr=0.02)
        both(parallel, muon, torch.optim.AdamW(rest, lr=0.01), lambda: parallel.step(x=batch()))
        return parallel.state_dict()

    # Muon's products are in bfloat16, so a last bit of a gradient may count.
    check(on_threads(net(), {"x": batch()}, PLANS.get(plan, 2), work, plan=plan),
          dict(model.state_dict()), 1e-3)  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_sam_steps_by_the_gradient_of_the_whole_model(plan: str) -> None:
    def trained(model: Any, optimizer: Any, step: Callable[[], Any]) -> dict[str, Tensor]:
        for _ in range(NUM_STEPS):
            step()
            assert optimizer.step(step) is not None
            optimizer.zero_grad()
        return dict(model.state_dict())

    def backward() -> Tensor:
        loss: Tensor = model(x=batch())
        loss.backward()
        return loss

    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        optimizer = ss.optim.whole(SAM, parallel, lr=0.1, momentum=0.9)
        return trained(parallel, optimizer, lambda: parallel.step(x=batch()))

    found = on_threads(net(), {"x": batch()}, PLANS[plan], work, plan=plan)
    model = net()
    check(found, trained(model, SAM(model.parameters(), lr=0.1, momentum=0.9), backward))


@pytest.mark.parametrize(
    ("first", "then"),
    [("zero3", "one_f_one_b:microbatches=2"), ("megatron", "data_parallel:zero=1,whole=true")],
)
@pytest.mark.parametrize("of", [Shampoo, LAMB])
def test_a_run_goes_on_under_another_plan(
    of: Callable[..., Any], first: str, then: str, tmp_path: Path
) -> None:
    """States that have the parameter's shape, and others."""

    def start(parallel: ss.Parallel) -> None:
        optimizer = ss.optim.whole(of, parallel)
        train(optimizer, lambda: parallel.step(x=batch()), 2)
        parallel.save(tmp_path / "saved", optimizer=optimizer, step=2)

    def go_on(parallel: ss.Parallel) -> dict[str, Tensor]:
        optimizer = ss.optim.whole(of, parallel)
        assert parallel.load(tmp_path / "saved", optimizer=optimizer).step == 2
        assert {group["lr"] for group in optimizer.param_groups} == {0.1 * 0.7 * 0.7}
        for _ in range(3):
            parallel.step(x=batch())
            optimizer.step()
            optimizer.zero_grad()
        return parallel.state_dict()

    on_threads(net(), {"x": batch()}, 2, start, plan=first)
    model = net()
    optimizer = of(model.parameters())
    train(optimizer, lambda: model(x=batch()).backward(), 2)
    for _ in range(3):
        model(x=batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    check(on_threads(net(), {"x": batch()}, 2, go_on, plan=then), dict(model.state_dict()))
    single = net()
    again = of(single.parameters())
    ss.load_run(tmp_path / "saved", single, optimizer=again)
    for _ in range(3):
        single(x=batch()).backward()
        again.step()
        again.zero_grad()
    check({0: dict(single.state_dict())}, dict(model.state_dict()))


def test_owners_have_equal_shares_and_bytes_are_reported() -> None:
    def work(parallel: ss.Parallel) -> tuple[int, int, str]:
        optimizer = ss.optim.whole(LAMB, parallel)
        return (
            sum(p.numel() for p in optimizer.owned.values()),
            optimizer.bytes_per_step,
            (optimizer.report()),
        )

    size = sum(p.numel() for p in net().parameters())
    boxes = on_threads(net(), {"x": batch()}, 2, work, plan="zero3")
    assert [own for own, *_ in boxes.values()] == [size // 2] * 2
    # Half of every gradient goes to its owner, and half of every parameter comes back.
    assert [moved for _, moved, _ in boxes.values()] == [size * 8] * 2
    assert "8 parameters dealt out, 4 of them, 672 B, to rank 1" in boxes[1][2]
    dealt = on_threads(net(), {"x": batch()}, 2, work, plan="zero1:zero=1,whole=true")
    assert [moved for _, moved, _ in dealt.values()] == [0, 0]
    # Whole on every rank: gradients are there, and values go to the other rank.
    copies = on_threads(net(), {"x": batch()}, 2, work)
    assert [moved for _, moved, _ in copies.values()] == [size * 8] * 2


def test_values_that_are_loaded_between_steps_count() -> None:
    other = net(seed=3).state_dict()

    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        optimizer = ss.optim.whole(LARS, parallel, lr=0.1)
        train(optimizer, lambda: parallel.step(x=batch()), 1)
        parallel.load_state_dict(other)
        optimizer.param_groups[0]["lr"] = 0.1
        train(optimizer, lambda: parallel.step(x=batch()), 1)
        return parallel.state_dict()

    model = net(seed=3)
    train(LARS(model.parameters(), lr=0.1), lambda: model(x=batch()).backward(), 1)
    check(on_threads(net(), {"x": batch()}, 2, work, plan="zero3"), dict(model.state_dict()))


def test_values_that_are_changed_through_their_data_count() -> None:
    def trained(model: Any, optimizer: Any, step: Callable[[], Any]) -> dict[str, Tensor]:
        for _ in range(3):
            step()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data.clamp_(-0.1, 0.1)
        return dict(model.state_dict())

    model = net()
    want = trained(model, LAMB(model.parameters()), lambda: model(x=batch()).backward())
    found = on_threads(
        net(), {"x": batch()}, 2,
        lambda p: trained(p, ss.optim.whole(LAMB, p), lambda: p.step(x=batch())), plan="zero3",
    )  # fmt: skip
    check(found, want)


class NormSGD(torch.optim.Optimizer):
    """Steps by the gradient over its norm, that of all parameters; nothing in its name says so."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter -= 0.1 * parameter.grad / norm


class DAdaptNorm(NormSGD):
    """The same with a name that is known."""


@pytest.mark.parametrize(
    "of", [DAdaptNorm, partial(DAdaptNorm), lambda params: DAdaptNorm(params)],
    ids=["class", "partial", "function"],
)  # fmt: skip
def test_a_function_that_makes_a_known_optimizer_is_as_its_class(of: Callable[..., Any]) -> None:
    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        train(ss.optim.whole(of, parallel), lambda: parallel.step(x=batch()))
        return parallel.state_dict()

    check(on_threads(net(), {"x": batch()}, 2, work, plan="zero3"), alone(DAdaptNorm))


def test_an_unknown_optimizer_warns_unless_it_is_said_what_it_needs() -> None:
    def work(parallel: ss.Parallel, together: bool | None) -> dict[str, Tensor]:
        train(
            ss.optim.whole(NormSGD, parallel, together=together), lambda: parallel.step(x=batch())
        )
        return parallel.state_dict()

    each = partial(on_threads, net(), {"x": batch()}, 2, plan="zero3")
    check(each(partial(work, together=True)), alone(NormSGD))
    each(partial(work, together=False))
    with pytest.warns(UserWarning, match="NormSGD is taken for .* say together=True") as said:
        each(partial(work, together=None))
    assert len(said) == 1


@pytest.mark.parametrize("plan", ["zero3", "one_f_one_b:tp=2,microbatches=2,zero=1"])
def test_values_move_to_owners_in_the_first_step_alone(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a rank stores nothing of what is stepped."""
    counts = Counter[int]()

    def counted(transport: Any, *args: Any) -> dict[str, Tensor]:
        counts[transport.rank] += 1
        return gathered(transport, *args)

    gathered = whole_module.gathered
    monkeypatch.setattr(whole_module, "gathered", counted)

    def work(parallel: ss.Parallel) -> None:
        optimizer = ss.optim.whole(LAMB, parallel, ["layers.0.weight"])
        train(optimizer, lambda: parallel.step(x=batch()), 3)

    num = PLANS[plan]
    on_threads(net(), {"x": batch()}, num, work, plan=plan)
    # Values once, and gradients in each of the three steps.
    assert counts == dict.fromkeys(range(num), 4)


def test_a_frozen_parameter_and_one_without_a_gradient_stay() -> None:
    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        optimizer = ss.optim.whole(LAMB, parallel)
        before = parallel.state_dict()
        optimizer.step()
        for name, parameter in parallel.named_parameters():
            parameter.requires_grad_(not name.startswith("layers.0"))
        train(optimizer, lambda: parallel.step(x=batch()), 2)
        found = parallel.state_dict()
        for name, value in found.items():
            assert torch.equal(value, before[name]) == (
                name.startswith("layers.0") or name == "shift"
            ), name
        return found

    on_threads(net(), {"x": batch()}, 2, work, plan="zero3")


def test_frozen_parameters_may_be_given_and_are_not_owned() -> None:
    model = net()
    model.layers[0].requires_grad_(False)

    def work(parallel: ss.Parallel) -> None:
        optimizer = ss.optim.whole(LAMB, parallel, parallel.parameters())
        train(optimizer, lambda: parallel.step(x=batch()), 1)
        assert not any(name.startswith("layers.0") for name in optimizer.owned)
        for parameter in parallel.parameters():
            parameter.requires_grad_(True)
        parallel.step(x=batch())
        with pytest.raises(ss.PlanError, match=r"layers\.0.* was frozen when the optimizer"):
            optimizer.step()

    on_threads(model, {"x": batch()}, 2, work, plan="zero3")


def test_gradients_are_scaled_and_clipped_as_usual() -> None:
    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        optimizer, scaler = ss.optim.whole(LARS, parallel, lr=0.1), parallel.grad_scaler()
        for _ in range(2):
            parallel.step(x=batch())
            scaler.unscale_(optimizer)
            parallel.clip_grad_norm_(0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return parallel.state_dict()

    model = net()
    optimizer = LARS(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x=batch()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    check(on_threads(net(), {"x": batch()}, 2, work, plan="zero3"), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("params", "options", "words"),
    [
        (["layers.9.weight"], {}, "'layers.9.weight', which is no parameter of the model"),
        ([{"params": ["layers.0.weight"]}, "layers.1.weight"], {}, "parameters or groups"),
        ([{"params": ["layers.0.weight"]}, {"params": ["layers.0.weight"]}], {}, "two groups"),
        ([torch.zeros(2)], {}, "a tensor"),
        (None, {"momentum": 0.9, "nesterov": True, "dampening": 0.5}, "Nesterov momentum requires"),
    ],
)
def test_wrong_arguments_are_refused_on_all_ranks(
    params: Any, options: dict[str, Any], words: str
) -> None:
    def work(parallel: ss.Parallel) -> str:
        with pytest.raises((ss.PlanError, ValueError), match=words) as raised:
            ss.optim.whole(torch.optim.SGD, parallel, params, **options)
        return str(raised.value)

    assert len(on_threads(net(), {"x": batch()}, 2, work, plan="zero3")) == 2


def test_ranks_that_give_other_options_are_told_so() -> None:
    def work(parallel: ss.Parallel) -> None:
        with pytest.raises(ss.PlanError, match="ranks disagree about its options"):
            ss.optim.whole(LAMB, parallel, lr=0.1 + parallel.trainer.rank)

    on_threads(net(), {"x": batch()}, 2, work, plan="zero3")


def test_a_model_of_one_device_is_refused() -> None:
    with pytest.raises(ss.PlanError, match="not Net: on one device, make the optimizer itself"):
        ss.optim.whole(LAMB, net())


@pytest.mark.parametrize("plan", ["megatron", "zero3_offload"])
def test_weights_of_several_pieces_and_on_the_host_are_owned_in_the_dims_of_the_model(
    plan: str,
) -> None:
    """Queries, keys and values in one weight, which tensor parallelism cuts piece by piece."""
    torch.manual_seed(4)
    model, given = models()["split Conv1D"]().double(), inputs()
    alone = deepcopy(model)
    optimizer = LAMB(alone.parameters())
    train(optimizer, lambda: alone(*given).backward(), 2)

    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        train(ss.optim.whole(LAMB, parallel), lambda: parallel.step(*given), 2)
        return parallel.state_dict()

    names = [*signature(model.forward).parameters]
    example = dict(zip(names, given, strict=False))
    found = on_threads(model, example, 2, work, plan=plan)
    check(found, dict(alone.state_dict()), 1e-10)
