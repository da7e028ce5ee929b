"""Model features train as in torch or are refused: alone, combined, and under plans."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import superscaler_core as ss
from superscaler_core.plans import PLANS
from tests.superscaler_core.features import DTYPE, FEATURES, WIDTH, Model

CAPTURED = [name for name, feature in FEATURES.items() if not feature.refused]
REFUSED = [name for name in FEATURES if name not in CAPTURED]
NUM_STEPS = 2
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::superscaler_core.OpaqueWarning"),
]
BATCH = torch.randn(8, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(5))


def model_of(*names: str) -> Model:
    torch.manual_seed(3)
    return Model([FEATURES[name] for name in names])


def by_features(plan: ss.Plan) -> None:
    """Split every op along its last splittable loop, and replicate ops without one."""
    for op in plan.graph.ops:
        loops = [i for i, size in op.sizes.items() if op.is_splittable(i) and size % 2 == 0]
        how = ss.split(loops[-1], 2) if loops else ss.replicate(2)
        plan.op_assign(plan.op_trans(op, how), plan.devices)


def alternating(plan: ss.Plan) -> None:
    """Ops by turns on one device and the other."""
    for op in plan.graph.ops:
        plan.op_assign(op, op.index // 2 % 2)


HOW: dict[str, Callable[[ss.Plan], None]] = {
    "data_parallel": PLANS["data_parallel"],
    "zero3": PLANS["zero3"],
    "by features": by_features,
    "alternating": alternating,
}


def train_alone(model: Model) -> tuple[list[float], dict[str, Tensor]]:
    """Some training steps in torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(NUM_STEPS):
        loss = model(BATCH)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def train(trainer: ss.Trainer) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps in a program, from its current weights."""
    # A device may store no parameter.
    stored = [*trainer.parameters()] or [torch.zeros(())]
    optimizer = torch.optim.SGD(stored, lr=0.1, momentum=0.9)
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(trainer.step(BATCH).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, trainer.state_dict()


def check(names: tuple[str, ...], how: str, folder: Path) -> None:
    plan = ss.Plan(ss.capture(model_of(*names), (BATCH,)), devices=range(2))
    HOW[how](plan)
    expected = train_alone(model_of(*names))
    for found in ss.run_threads(ss.compile(plan).save(folder), train, range(2)).values():
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "names, how", [(CAPTURED[i::16], how) for i in range(16) for how in [*HOW][i % 2 :: 2]]
)
def test_features_train_as_in_torch(names: list[str], how: str, tmp_path: Path) -> None:
    """A model of a few features has each of them twice."""
    check((*names, *names), how, tmp_path)


@pytest.mark.parametrize("name", REFUSED[::2])  # others: below, at random
def test_unsupported_feature_raises_a_short_capture_error(name: str) -> None:
    with pytest.raises(ss.CaptureError, match=FEATURES[name].refused) as caught:
        ss.capture(model_of("checkpoint", name), (BATCH,))
    assert len(str(caught.value)) < 400


@settings(max_examples=5, deadline=None)
@given(st.lists(st.sampled_from(CAPTURED), min_size=2, max_size=4), st.sampled_from(sorted(HOW)))
def test_combined_features_train_as_in_torch(names: list[str], how: str) -> None:
    with TemporaryDirectory() as folder:
        check(tuple(names), how, Path(folder))


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.sampled_from(CAPTURED), min_size=1, max_size=2),
    st.sampled_from(REFUSED),
    st.integers(0, 2),
)
def test_model_with_one_unsupported_feature_is_rejected(
    names: list[str], bad: str, place: int
) -> None:
    with pytest.raises(ss.CaptureError):
        ss.capture(model_of(*names[:place], bad, *names[place:]), (BATCH,))


def test_capture_does_not_change_the_model() -> None:
    for name in CAPTURED:
        model = model_of(name)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        ss.capture(model, (BATCH,))
        assert before.keys() == model.state_dict().keys()
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        assert getattr(model.blocks[0], "memory", None) is None
        assert getattr(model.blocks[0], "count", 1) == 1


def test_capture_does_not_depend_on_the_surrounding_grad_mode() -> None:
    with torch.no_grad():
        graph = ss.capture(model_of("no_grad"), (BATCH,))
    assert str(graph) == str(ss.capture(model_of("no_grad"), (BATCH,)))
    assert graph.loss.requires_grad


def test_autograd_functions_still_work_after_a_capture() -> None:
    model = model_of("reversal")
    ss.capture(deepcopy(model), (BATCH,))
    model(BATCH).backward()
    assert model.blocks[0].line.weight.grad is not None


def test_lazy_parameter_without_a_shape_raises_capture_error() -> None:
    model = model_of("cast")
    model.blocks.append(torch.nn.LazyLinear(3))
    with pytest.raises(
        ss.CaptureError, match=r"'blocks.1.weight' has no shape yet: call the model"
    ):
        ss.capture(model, (BATCH,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_module_raises_capture_error() -> None:
    scripted = torch.jit.script(torch.nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ss.CaptureError, match="ScriptModule is not traced; capture the module"):
        ss.capture(scripted, (BATCH,))
