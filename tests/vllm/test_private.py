"""Every private name of vLLM that is used is there, with its arguments."""

from __future__ import annotations

import importlib
import inspect

import pytest

from rvdcomm.interop.vllm import private
from tests.vllm.engine import needs_vllm

pytestmark = needs_vllm


@pytest.mark.parametrize("name", private.NAMES)
def test_a_name_takes_what_is_passed(name: str) -> None:
    module, _, function = name.rpartition(".")
    found = getattr(importlib.import_module(module), function)
    passed = private.NAMES[name]
    taken = list(inspect.signature(found).parameters)
    assert tuple(taken[: len(passed)]) == passed


def test_a_layer_is_put_back_by_reset() -> None:
    import torch

    info = private.named("layerwise.get_layerwise_info")(torch.nn.Linear(1, 1))
    assert callable(info.reset)


def test_a_model_that_is_reloaded_has_these_attributes() -> None:
    layerwise = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    source = inspect.getsource(layerwise.initialize_layerwise_reload)
    assert all(f"model.{name} = " in source for name in private._OF_MODEL)


def test_experts_are_not_packed_while_they_have_a_kernel() -> None:
    """Otherwise a reload need not take the kernel away."""
    module = importlib.import_module(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
    )
    source = inspect.getsource(module.UnquantizedFusedMoEMethod)
    assert "is_weight_update = self.moe_kernel is not None" in source
