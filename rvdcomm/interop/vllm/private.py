"""The names of vLLM that this package needs, most of them private (vLLM 0.32).

- ``initialize_layerwise_reload``: makes a model's layers those that loaders fill, on the device
  ``meta``, and wraps the loaders of parameters.
- ``finalize_layerwise_reload``: ends the reload, after ``load_weights``.
- ``quant_method.moe_kernel`` of a layer of experts.
- ``_get_original_loader``, ``get_layer_tensors``, ``get_layerwise_info``: to take the wrappers off,
  and to put a model back as it was.

Test (tests/vllm/test_private.py): every name is there, with the arguments that are used here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rvdcomm import LayoutError

KNOWN = "0.32"
_RELOAD = "vllm.model_executor.model_loader.reload"

NAMES: dict[str, tuple[str, ...]] = {
    f"{_RELOAD}.layerwise.initialize_layerwise_reload": ("model",),
    f"{_RELOAD}.layerwise.finalize_layerwise_reload": (),
    f"{_RELOAD}.layerwise.get_layerwise_info": ("layer",),
    f"{_RELOAD}.layerwise._get_original_loader": ("tensor",),
    f"{_RELOAD}.utils.get_layer_tensors": ("layer",),
}
"""Functions by their whole names, with the names of the arguments that are passed."""


@contextmanager
def without_data(model: torch.nn.Module) -> Iterator[None]:
    """In this context the parameters of a model are those that loaders fill, and have no data.

    After it the model is as it was; nothing may run it meanwhile.
    """
    known = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    lasting = [set(m._non_persistent_buffers_set) for m, _, _ in known]
    attributes = {name: getattr(model, name, None) for name in _OF_MODEL}
    try:
        named("layerwise.initialize_layerwise_reload")(model)
        for layer in model.modules():
            for tensor in named("utils.get_layer_tensors")(layer).values():
                tensor.weight_loader = named("layerwise._get_original_loader")(tensor)
        yield
    finally:
        for (module, parameters, buffers), names in zip(known, lasting, strict=True):
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set = names
            named("layerwise.get_layerwise_info")(module).reset()
        for name, value in attributes.items():
            setattr(model, name, value)


def tied(model: torch.nn.Module) -> list[list[str]]:
    """Names of parameters that are one, in groups of two or more."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """All parameters, tied ones under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


_OF_MODEL = ("_do_torchao_reload", "_original_do_torchao_reload")
"""Attributes of a model that a reload sets."""


@contextmanager
def reload(model: torch.nn.Module, model_config: Any, device: torch.device) -> Iterator[None]:
    """In this context ``model.load_weights`` puts new values where the model has its old ones.

    If the block fails, layers that were loaded have new values and the others their old ones.
    """
    known = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    lasting = [set(m._non_persistent_buffers_set) for m, _, _ in known]
    packers = _packers(model) if device.type == "cpu" else []
    try:
        for method, _ in packers:
            method.moe_kernel = None
        with device:
            named("layerwise.initialize_layerwise_reload")(model)
            yield
            named("layerwise.finalize_layerwise_reload")(model, model_config)
    except BaseException:
        for (module, parameters, buffers), names in zip(known, lasting, strict=True):
            module._parameters.update(parameters)
            module._buffers.update(buffers)
            module._non_persistent_buffers_set = names
            named("layerwise.get_layerwise_info")(module).reset()
        for method, kernel in packers:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        raise


def _packers(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """What packs experts for kernels, and its kernel.

    While there is a kernel, vLLM takes new weights for an update and does not pack them, which
    kernels for CPUs need.
    """
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = [(method, getattr(method, "moe_kernel", None)) for method in methods]
    return [(method, kernel) for method, kernel in kernels if kernel is not None]


def named(name: str) -> Any:
    """A function of vLLM's reload.

    Raises:
        LayoutError: this vLLM has no such name.
    """
    module, _, function = f"{_RELOAD}.{name}".rpartition(".")
    found = getattr(importlib.import_module(module), function, None)
    if found is None:
        import vllm

        raise LayoutError(
            f"vLLM {vllm.__version__} has no {module}.{function}; rvdcomm.interop.vllm knows "
            f"vLLM {KNOWN}."
        )
    return found
