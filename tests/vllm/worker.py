"""What tests look at inside of workers; each function runs there, with the worker as ``self``."""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rvdcomm.interop.vllm import private

_seen: dict[str, dict[str, Tensor]] = {}
"""Parameters of each layer as the last load left them, before they were packed for the kernels."""


def watch(self: Any) -> None:
    """From now on, keep the parameters of layers before vLLM packs them."""
    model = self.model_runner.get_model()
    names = {id(layer): name for name, layer in model.named_modules()}
    from vllm.model_executor.model_loader.reload import layerwise

    process = layerwise._copy_and_restore_kernel_tensors
    materialized = layerwise.materialize_layer

    def materialize(layer: Any, info: Any) -> None:
        materialized(layer, info)
        quant = getattr(layer, "quant_method", None)
        if quant is not None and not hasattr(quant, "watched"):
            quant.watched = quant.process_weights_after_loading

            def packed(layer: Any) -> None:
                _seen[names[id(layer)]] = _own(layer)
                quant.watched(layer)

            quant.process_weights_after_loading = packed

    def copied(layer: Any, info: Any) -> None:
        if getattr(layer, "quant_method", None) is None:
            _seen[names[id(layer)]] = _own(layer)
        process(layer, info)

    layerwise.materialize_layer = materialize
    layerwise._copy_and_restore_kernel_tensors = copied


def _own(layer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in layer.named_parameters(recurse=False)}


def faults(self: Any, checkpoint: str) -> list[str]:
    """Parameters that differ in a bit from what loaders make of whole tensors of a checkpoint."""
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    model = self.model_runner.get_model()
    tied = private.tied(model)
    wanted: dict[str, Tensor] = {}
    with private.without_data(model):
        for module_name, layer in model.named_modules():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                made = materialize_meta_tensor(parameter)
                layer._parameters[name] = made
                wanted[f"{module_name}.{name}"] = made
        tensors = load_file(f"{checkpoint}/model.safetensors")
        model.load_weights(tensors.items())
        # A checkpoint has one tensor for tied parameters.
        parameters = private.parameters(model)
        for names in tied:
            for missing in set(names) - set(tensors):
                (source,) = set(names) & set(tensors)
                parameters[missing].weight_loader(parameters[missing], tensors[source])
    found = []
    num_compared = 0
    for module_name, seen in _seen.items():
        for name, value in seen.items():
            num_compared += 1
            if not torch.equal(value, wanted[f"{module_name}.{name}"]):
                found.append(f"worker {self.rank}: {module_name}.{name}")
    _seen.clear()
    if num_compared < 10:
        found.append(f"worker {self.rank}: {num_compared} parameters were loaded")
    return found


def report(self: Any) -> dict[str, Any]:
    """Bytes of the worker's share, and what was not recorded."""
    receiver = self.weight_transfer_engine._receiver
    return {
        "pid": os.getpid(),
        "share": receiver.share_bytes,
        "whole": dict(receiver.record.whole),
        "is_active": self._weight_update_active,
    }
