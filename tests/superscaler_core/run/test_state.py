"""The state of a model: a program starts with it, takes another by torch's rules, gives it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.plans import PLANS

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """Tied weights; buffers that are read, folded into a constant, not read, and not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.last = nn.Linear(6, 6, dtype=torch.float64)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((6,), 2.0, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.float64))
        self.register_buffer("unread", torch.arange(3))
        self.register_buffer("cache", torch.ones(6, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x)) @ self.mask.tril() * self.scale
        return ((self.last(y) + self.cache) ** 2).mean()


def new_model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def compiled(model: nn.Module, plan_name: str = "data_parallel") -> ss.Compiled:
    plan = ss.Plan(ss.capture(model, (X,)), devices=range(2))
    PLANS[plan_name](plan)
    return ss.compile(plan)


def uneven(plan: ss.Plan) -> None:
    """Parameters are stored in boxes that form no layout."""
    for op in plan.graph.ops:
        plan.op_assign(plan.op_trans(op, ss.replicate(2)), plan.devices)
    for op in plan.graph.updates.values():
        if op.sizes.get("d1"):
            a, b = plan.op_trans(op, ss.split("d0", cuts=[0, 4, 6]))
            c, d = plan.op_trans(a, ss.split("d1", cuts=[0, 1, 6]))
            plan.op_assign([b, c, d], [0, 0, 1])
        else:
            plan.op_assign(op, 1)


def on_both(folder: Path, work: object, **options: object) -> list[object]:
    return list(ss.run_threads(folder, work, range(2), **options).values())  # type: ignore[arg-type]


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)
    return found.keys() == expected.keys()


@pytest.mark.parametrize("plan_name", ["data_parallel", "zero3"])
def test_a_program_starts_with_the_weights_of_the_captured_model(
    plan_name: str, tmp_path: Path
) -> None:
    model = new_model()
    folder = compiled(model, plan_name).save(tmp_path)
    for loss, state in on_both(folder, lambda t: (t.step(X), t.state_dict())):
        torch.testing.assert_close(loss, model(X).detach())
        assert same(state, model.state_dict())


def test_boxes_that_form_no_layout_start_with_them_too(tmp_path: Path) -> None:
    model = new_model()
    plan = ss.Plan(ss.capture(model, (X,)), devices=range(2))
    uneven(plan)
    folder = ss.compile(plan).save(tmp_path)
    for state in on_both(folder, lambda trainer: trainer.state_dict()):
        assert same(state, model.state_dict())


def test_weights_are_those_of_the_time_of_saving_and_no_copies(tmp_path: Path) -> None:
    model = new_model()
    made = compiled(model)
    graph = made.plan.graph
    assert graph.weights["first.weight"] is model.first.weight
    with torch.no_grad():
        model.first.weight += 1
    state = on_both(made.save(tmp_path), lambda trainer: trainer.state_dict())[0]
    assert same(state, model.state_dict())
    with torch.no_grad():
        model.first.weight += 1
    assert same(on_both(made.save(tmp_path), lambda t: t.state_dict())[0], model.state_dict())


def test_masters_start_with_the_weights_in_their_dtype(tmp_path: Path) -> None:
    model = new_model().float()
    plan = ss.Plan(ss.capture(model, (X.float(),)), devices=range(2))
    PLANS["data_parallel"](plan)
    folder = ss.compile(plan).save(tmp_path)

    def work(trainer: ss.Trainer) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in trainer.named_parameters()}

    for found in on_both(folder, work, dtype=torch.float64):
        assert same(found, {n: p.detach().double() for n, p in model.named_parameters()})


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (self.line(x) ** 2).mean()


BEGIN: dict[str, Callable[[ss.Trainer, Path], object]] = {
    "state": lambda trainer, folder: trainer.load_state_dict(Line().state_dict()),
    "init": lambda trainer, folder: trainer.init_weights(fill),
    "checkpoint": lambda trainer, folder: trainer.load(folder),
}


@pytest.mark.parametrize("is_meta", [True, False])
@pytest.mark.parametrize("begin", BEGIN)
def test_without_weights_the_first_step_says_so(begin: str, is_meta: bool, tmp_path: Path) -> None:
    with torch.device("meta" if is_meta else "cpu"):
        made = compiled(Line())
    assert bool(made.plan.graph.weights) != is_meta
    folder = made.save(tmp_path / "program", weights=is_meta)
    with pytest.raises(ss.PlanError, match=r"no values yet: .* load_state_dict, load or init_wei"):
        on_both(folder, lambda trainer: trainer.step(X))
    checkpoint = compiled(Line()).save(tmp_path / "other") / "weights"

    def work(trainer: ss.Trainer) -> bool:
        BEGIN[begin](trainer, checkpoint)
        return trainer.step(X).item() > 0

    assert all(on_both(folder, work))


def test_a_program_saved_without_weights_forgets_those_that_were_there(tmp_path: Path) -> None:
    made = compiled(Line())
    made.save(tmp_path)
    with pytest.raises(ss.PlanError, match="no values yet"):
        on_both(made.save(tmp_path, weights=False), lambda trainer: trainer.step(X))


def fill(name: str, whole: Tensor) -> None:
    whole.normal_() if name.endswith("weight") else whole.zero_()


def test_init_gives_all_ranks_and_plans_the_same(tmp_path: Path) -> None:
    def work(trainer: ss.Trainer) -> dict[str, Tensor]:
        trainer.init_weights(fill, seed=3)
        return trainer.state_dict()

    states = []
    for plan_name in ("data_parallel", "zero3"):
        folder = compiled(new_model(), plan_name).save(tmp_path / plan_name)
        states += on_both(folder, work)
    assert all(same(state, states[0]) for state in states[1:])
    assert states[0]["first.bias"].abs().max() == 0
    assert states[0]["first.weight"].std() > 0.5


# --- load_state_dict ----------------------------------------------------------------------------


def test_a_state_has_the_names_of_torch_and_is_read_back(tmp_path: Path) -> None:
    state = new_model(1).state_dict()
    state["scale"] = torch.arange(6.0, dtype=torch.float64)
    state["unread"] = torch.arange(3) + 5
    expected = new_model()
    expected.load_state_dict(state)

    def work(trainer: ss.Trainer) -> object:
        assert trainer.load_state_dict(state) == ([], [])
        return trainer.step(X), trainer.state_dict()

    for loss, found in on_both(compiled(new_model()).save(tmp_path), work):
        torch.testing.assert_close(loss, expected(X).detach())
        assert same(found, expected.state_dict())


MISSING = ["scale", "last.weight", "first.bias"]


@pytest.mark.parametrize("name", MISSING)
def test_missing_names_are_an_error_as_in_torch(name: str, tmp_path: Path) -> None:
    state = {k: v for k, v in new_model(1).state_dict().items() if k != name}
    expected = new_model()
    assert list(expected.load_state_dict(state, strict=False).missing_keys) == [name]
    folder = compiled(new_model()).save(tmp_path)
    match = rf'Missing key\(s\) in state_dict: "{name}"'
    with pytest.raises(RuntimeError, match=match):
        new_model().load_state_dict(state)
    with pytest.raises(ss.PlanError, match=match):
        on_both(folder, lambda trainer: trainer.load_state_dict(state))

    def work(trainer: ss.Trainer) -> object:
        return trainer.load_state_dict(state, strict=False), trainer.state_dict()

    for found, after in on_both(folder, work):
        assert found == ([name], [])
        assert same(after, expected.state_dict())


def test_unexpected_names_are_an_error_as_in_torch(tmp_path: Path) -> None:
    state = {**new_model().state_dict(), "cache": torch.ones(6), "more.weight": torch.ones(1)}
    folder = compiled(new_model()).save(tmp_path)
    match = r'Unexpected key\(s\) in state_dict: "cache", "more.weight"'
    with pytest.raises(RuntimeError, match=match):
        new_model().load_state_dict(state)
    with pytest.raises(ss.PlanError, match=match):
        on_both(folder, lambda trainer: trainer.load_state_dict(state))
    found = on_both(folder, lambda trainer: trainer.load_state_dict(state, strict=False))
    assert found == [([], ["cache", "more.weight"])] * 2


def test_another_shape_is_an_error_even_if_not_strict(tmp_path: Path) -> None:
    state = {**new_model().state_dict(), "scale": torch.ones(7)}
    folder = compiled(new_model()).save(tmp_path)
    with pytest.raises(ss.PlanError, match=r"size mismatch for scale: .*\[7\] .* \[6\]"):
        on_both(folder, lambda trainer: trainer.load_state_dict(state, strict=False))


def test_a_buffer_that_was_folded_cannot_change(tmp_path: Path) -> None:
    state = {**new_model().state_dict(), "mask": torch.zeros(6, 6, dtype=torch.float64)}
    folder = compiled(new_model()).save(tmp_path)
    with pytest.raises(ss.PlanError, match="buffer mask has other values, and the capture comput"):
        on_both(folder, lambda trainer: trainer.load_state_dict(state))
