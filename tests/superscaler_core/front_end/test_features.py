"""Model features train as in torch or are refused: alone, combined, and under plans."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import superscaler_core as ss
from tests.superscaler_core.as_torch import HOW, check_as_in_torch
from tests.superscaler_core.features import DTYPE, FEATURES, WIDTH, Model

CAPTURED = [name for name, feature in FEATURES.items() if not feature.refused]
REFUSED = [name for name in FEATURES if name not in CAPTURED]
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::superscaler_core.OpaqueWarning"),
]
BATCH = torch.randn(8, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(5))


def model_of(*names: str) -> Model:
    torch.manual_seed(3)
    return Model([FEATURES[name] for name in names])


def state_of(model: Model) -> list[dict[str, Tensor] | object]:
    """Copies of all that a forward of the features may change."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    kept = [(getattr(b, "memory", None), getattr(b, "count", 1)) for b in model.blocks]
    return [state, kept]


@pytest.mark.many(12)
@pytest.mark.parametrize(
    "names, how", [(CAPTURED[i::16], how) for i in range(16) for how in [*HOW][i % 4 :: 2]]
)
def test_features_train_as_in_torch(names: list[str], how: str, tmp_path: Path) -> None:
    """A model of a few features has each of them twice."""
    check_as_in_torch(model_of(*names, *names), [BATCH] * 2, how, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_feature_raises_a_short_capture_error(name: str) -> None:
    with pytest.raises(ss.CaptureError, match=FEATURES[name].refused) as caught:
        ss.capture(model_of("checkpoint", name), (BATCH,))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("names", [CAPTURED[i::4] for i in range(4)], ids=[*"0123"])
def test_capture_does_not_change_the_model(names: list[str]) -> None:
    model = model_of(*names)
    before = state_of(model)
    ss.capture(model, (BATCH,))
    torch.testing.assert_close(state_of(model), before, rtol=0, atol=0)


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
